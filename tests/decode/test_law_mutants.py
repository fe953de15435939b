"""The faults that lossless decoders really had, and the test that kills each."""

import importlib

import pytest

MUTANTS = {
    # drawing
    "raw q with processed drafts": "test_law.test_wrong_proposal_is_exposed",
    "argmax draft with soft q": "test_law.test_wrong_proposal_is_exposed",
    "draft drawn at another temperature than judged": "test_law.test_wrong_proposal_is_exposed",
    # judging
    "resample from p": "test_law.test_wrong_rule_is_exposed",
    "softmax of the residual": "test_law.test_wrong_rule_is_exposed",
    "positive floor on the residual": "test_law.test_wrong_rule_is_exposed",
    "bonus from the row of the last draft": "test_law.test_wrong_rule_is_exposed",
    "match draws again after a mismatch": "test_law.test_drawing_again_after_a_mismatch_is_exposed",
    "u <= chance, with u = 0": "test_law_rows.test_a_draw_that_may_equal_its_chance_emits_what_p_forbids",
    # drafting less
    "all drafts dropped for a later bad row": (
        "test_law_rows.test_dropping_all_drafts_of_a_step_for_a_later_bad_row_is_exposed"
    ),
    "a draft discarded because its q is low": (
        "test_law_adaptive.test_discarding_a_draft_because_its_q_is_low_is_exposed"
    ),
    "draft_min_prob leaves the unlikely draft out": (
        "test_law_adaptive.test_stopping_before_a_draft_by_a_look_at_it_is_exposed"
    ),
    "K chosen after a look at p": "test_law_adaptive.test_choosing_the_length_after_a_look_at_p_is_exposed",
    # drafts that are copied, not drawn
    "copied drafts judged by the heads' q": "test_lookup.test_wrong_lookup_is_exposed",
    "heads or lookup chosen by a look at what the heads drew": "test_lookup.test_wrong_lookup_is_exposed",
    "processors see copied drafts that they forbid": "test_lookup.test_no_processor_sees_a_text_that_it_forbids",
    # settings
    "processors do not see the drafts": "test_law_settings.test_processors_that_do_not_see_the_drafts_are_exposed",
    "no processors on p": "test_law_settings.test_a_base_without_the_processors_is_exposed",
    # block
    "stop at the first threshold that fails": "test_law_block.test_a_wrong_block_rule_is_exposed",
    "token residual after block acceptance": "test_law_block.test_a_wrong_block_rule_is_exposed",
    "weight not capped at 1": "test_law_block.test_a_wrong_block_rule_is_exposed",
    "threshold with p, or q, of the wrong row": "test_law_block.test_a_wrong_block_rule_is_exposed",
    "threshold is the weight": "test_law_block.test_a_wrong_block_rule_is_exposed",
    "residual with the weight of the last draft": "test_law_block.test_a_wrong_block_rule_is_exposed",
    "last index of a block cut short": (
        "test_law_block.test_a_last_index_that_looks_beyond_a_shorter_block_is_exposed"
    ),
    "silently the token rule": "test_law_block.test_the_token_rule_in_its_place_is_exact_but_keeps_fewer",
    # trees
    "siblings judged by the raw q": "test_law_trees.test_a_wrong_tree_is_exposed",
    "rollback in place of keep, or other rows kept": "test_law_trees.test_a_wrong_tree_is_exposed",
    "path in the wrong order": "test_law_trees.test_a_wrong_tree_is_exposed",
    "rows of p in another order than the nodes": "test_law_trees.test_a_wrong_tree_is_exposed",
    "processors see siblings, or no drafts": "test_law_trees.test_a_wrong_tree_is_exposed",
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_every_fault_has_a_test(fault: str) -> None:
    module, name = MUTANTS[fault].split(".")
    assert callable(getattr(importlib.import_module(f"tests.decode.{module}"), name))
