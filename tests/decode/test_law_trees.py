"""The engine's law over trees of drafts, what trees gain, and the faults of the loop that only trees show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.chain import Outcome
from decode.engine import Engine
from decode.laws import Laws, RowCheck
from decode.request import Request
from decode.trees import Tree
from mtp import tree as tree_module
from mtp.sampling import RandomSource
from tests.decode.laws import CHAIN_RULES, EXACT, P, Q, accepted_law, law_error, sparse, spoiled, walk_engine
from tests.decode.test_law_rows import Refusing
from tests.decode.test_law_settings import COMBINED, LOOKING_BACK, forget_drafts
from tests.decode.toys import REFUSED, TableDrafter, TableTarget, decode, table, total_variation

pytestmark = pytest.mark.usefixtures("one_thread")
STATIC = {"2": 1, "3": 1, "1,1": 2, "1,2": 2, "2,1": 2, "1,1,1": 3}
DYNAMIC = {"dynamic:1": 2, "dynamic:2": 3, "dynamic:4": 3, "dynamic:9": 2}
DEPTHS = STATIC | DYNAMIC
ZEROS = [(a, b, (a + b) % 3) for a in range(3) for b in range(3)]


def asking(rule: str, tree: str, **more: Any) -> Request:
    return replace(CHAIN_RULES[rule], tree=tree, **more)


def tree_error(tree: str, rule: str, new_tokens: int = 3, request: Request | None = None, **settings: Any) -> float:
    return law_error(DEPTHS[tree], new_tokens, request=request or asking(rule, tree), **settings)


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", DEPTHS)
def test_law_equals_base(tree: str, rule: str) -> None:
    """Levels fall away near the end of the text, and a prompt of one token has no anchor to draft from."""
    assert tree_error(tree, rule) < EXACT
    assert tree_error(tree, rule, prompt=(2,)) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_law_of_a_wide_tree(rule: str) -> None:
    """Two children of two children, of whom q has no more in some places."""
    q = sparse(Q, *[(a, b, (token + 1) % 3) for a, b, token in ZEROS if (a + b) % 2])
    request = asking(rule, "2,2")
    assert law_error(2, 3, p=sparse(P, *ZEROS), q=q, request=request) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", ["1,2", "dynamic:4"])
def test_law_over_several_whole_trees(tree: str, rule: str) -> None:
    q = sparse(Q, *[(a, b, (token + 1) % 3) for a, b, token in ZEROS])
    assert tree_error(tree, rule, 4, p=sparse(P, *ZEROS), q=q) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", ["2,1", "dynamic:4"])
def test_law_with_a_draft_vocabulary_and_an_end_of_sequence(tree: str, rule: str) -> None:
    assert tree_error(tree, rule, draft_ids=torch.tensor([2, 0]), eos=(1,)) < EXACT
    assert tree_error(tree, rule, draft_ids=torch.tensor([1]), eos=(0,)) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", ["1,2", "dynamic:4"])
@pytest.mark.parametrize("heat", [0.0, 2.5])
def test_law_does_not_depend_on_the_draft_temperature(tree: str, rule: str, heat: float) -> None:
    """At 0, q is one-hot, and every row has one child."""
    assert tree_error(tree, rule, request=asking(rule, tree, draft_temperature=heat)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", [*LOOKING_BACK, *COMBINED])
def test_law_under_settings_that_look_back(name: str, rule: str) -> None:
    """Every row has the text of its own path. The token rule's walks are longer, so its trees have one level here."""
    more = (LOOKING_BACK | COMBINED)[name]
    more = {key: value for key, value in more.items() if key != "draft_min_confidence"}
    if rule == "block":
        assert tree_error("1,2", rule, 3, asking(rule, "1,2", **more), eos=(1,)) < EXACT
    assert tree_error("2", rule, 2, asking(rule, "2", **more), eos=(1,)) < EXACT
    assert tree_error("dynamic:4", rule, 3, asking(rule, "dynamic:4", **more), eos=(1,)) < EXACT


class SpoiltBelow(TableDrafter):
    """Below the first level, only the rows after 2 are laws."""

    value = torch.nan

    def draft(self, k: int, previous: Tensor) -> Tensor:
        logits = super().draft(k, previous).clone()
        if k > 1:
            logits[previous != 2, 0] = self.value
        return logits


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", ["2,1", "1,2", "dynamic:4", "1,1,1"])
def test_rows_of_q_that_are_no_law_have_no_children(tree: str, rule: str) -> None:
    for value in (torch.nan, torch.inf):
        drafter = type("Drafter", (SpoiltBelow,), {"value": value})
        walked = walk_engine(DEPTHS[tree], 3, request=asking(rule, tree), drafter=drafter)
        assert walked.error < EXACT
        assert walked.unusable_q > 0
        assert 0 < walked.accepted < walked.drafted


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", ["1,2", "dynamic:4"])
def test_a_bad_row_of_p_only_refuses_the_texts_that_reach_it(tree: str, rule: str) -> None:
    walked = walk_engine(2, 3, p=spoiled(P, (2, 0)), request=asking(rule, tree))
    assert walked.error < EXACT
    assert 0 < walked.truth[REFUSED] < 1


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("tree", ["2,1", "dynamic:4"])
def test_nothing_is_accepted_when_the_supports_are_disjoint(tree: str, rule: str) -> None:
    p, q = P.clone(), Q.clone()
    p[..., 0], q[..., 1:] = -torch.inf, -torch.inf
    walked = walk_engine(2, 3, p=p, q=q, request=asking(rule, tree))
    assert walked.error < EXACT
    assert walked.accepted == 0 < walked.drafted


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_rejection_of_equal_laws_falls_back_to_p(rule: str) -> None:
    class Source(Refusing):
        def bernoulli(self, prob: Tensor) -> Tensor:
            return torch.zeros_like(prob, dtype=torch.bool)

    p = sparse(P, *ZEROS)
    chain = walk_engine(2, 3, p=p, q=p, request=asking(rule, "1,1"), source=Source)
    assert chain.error < EXACT
    assert chain.residual_empty > 0 == chain.accepted
    wide = walk_engine(2, 3, p=p, q=p, request=asking(rule, "2,1"), source=Source)
    assert wide.law.keys() <= wide.truth.keys()  # rejecting what cannot be rejected bends the law, no more


# ---- what trees gain ---------------------------------------------------------------------------------------------


def test_greedy_trees_give_the_plain_text_and_accept_more_than_a_chain() -> None:
    accepted: dict[str | None, int] = {None: 0, "3,2,1": 0, "dynamic:8": 0}
    for seed in range(12):
        p = table(seed, 8)
        q = p + table(seed + 100, 8) * 0.7
        plain, _ = decode(Engine(TableTarget(p)), [1, 2], 30, 0, request=Request())
        for tree in accepted:
            tokens, stats = decode(Engine(TableTarget(p), TableDrafter(q)), [1, 2], 30, 3, request=Request(tree=tree))
            assert tokens == plain
            accepted[tree] += stats.accepted
    assert 0 < accepted[None] < min(accepted["3,2,1"], accepted["dynamic:8"])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_tree_without_siblings_keeps_as_many_as_the_chain(rule: str) -> None:
    """The whole law of the number of accepted drafts, not its mean only."""
    for seed in range(4):
        p, q = table(seed, 2 + seed % 2), table(seed + 100, 2 + seed % 2)
        tree = accepted_law(3, p=p, q=q, prompt=(0, 1), request=asking(rule, "1,1,1"))
        chain = accepted_law(3, p=p, q=q, prompt=(0, 1), request=CHAIN_RULES[rule])
        assert len(chain) == 4
        assert total_variation(tree, chain) < EXACT
    other = accepted_law(3, p=p, q=q, prompt=(0, 1), request=CHAIN_RULES["token" if rule == "block" else "block"])
    assert total_variation(tree, other) > 0.001


# ---- mutants -----------------------------------------------------------------------------------------------------


def siblings_by_the_raw_q(patch: pytest.MonkeyPatch) -> None:
    """Later siblings are judged by the law of the first."""
    patch.setattr(tree_module, "sibling_law", lambda q, earlier, token, drawing: q.double())


def keep_is_a_rollback(patch: pytest.MonkeyPatch) -> None:
    """The base's cache keeps the first rows of the block in place of the accepted ones."""
    patch.setattr(TableTarget, "keep", lambda self, length, rows: self.rollback(length + len(rows)))


def keep_moves_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Each accepted row is taken from one place to the left."""
    honest = TableTarget.keep
    patch.setattr(TableTarget, "keep", lambda self, length, rows: honest(self, length, [row - 1 for row in rows]))


def keep_reverses_the_path(patch: pytest.MonkeyPatch) -> None:
    """The base's cache holds the accepted drafts from the last to the first."""
    honest = TableTarget.keep
    patch.setattr(TableTarget, "keep", lambda self, length, rows: honest(self, length, rows[::-1]))


def path_from_the_leaf(patch: pytest.MonkeyPatch) -> None:
    """Accepted tokens are committed from the leaf to the root."""
    honest = Tree.judge

    def judge(self: Tree, rule: str, p: Tensor, check: RowCheck, random: RandomSource) -> Outcome:
        outcome = honest(self, rule, p, check, random)
        return replace(outcome, tokens=[*outcome.tokens[:-1][::-1], outcome.tokens[-1]])

    patch.setattr(Tree, "judge", judge)


def rows_of_p_out_of_order(patch: pytest.MonkeyPatch) -> None:
    """Nodes in another order than their rows of p."""
    honest = Tree.judge
    patch.setattr(
        Tree,
        "judge",
        lambda self, rule, p, check, random: honest(self, rule, torch.cat([p[:1], p[1:].flip(0)]), check, random),
    )


def processors_see_the_whole_block(patch: pytest.MonkeyPatch) -> None:
    """The text before a row is taken to be all rows before it, siblings included."""
    patch.setattr(Tree, "suffixes", lambda self: [self.block[0, 1 : row + 1] for row in range(self.block.shape[1])])


def processors_see_no_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Laws, "_process", forget_drafts)


PENALTY = {"repetition_penalty": 1.8}
# Where a single token is likelier under p than under q, the residual is one-hot and hides a wrong law of siblings.
SPREAD = {"p": table(6), "q": table(20)}
MUTANTS: Sequence[tuple[Callable[[pytest.MonkeyPatch], None], str, str, int, dict[str, Any], dict[str, Any]]] = [
    (siblings_by_the_raw_q, "2", "token", 3, {}, SPREAD),
    (siblings_by_the_raw_q, "1,2", "block", 3, {}, {}),
    (siblings_by_the_raw_q, "dynamic:4", "block", 3, {}, {}),
    (keep_is_a_rollback, "2", "token", 3, {}, {}),
    (keep_is_a_rollback, "2,1", "match", 4, {}, {}),
    (keep_is_a_rollback, "dynamic:4", "block", 4, {}, {}),
    (keep_moves_the_neighbours, "2", "block", 3, {}, {}),
    (keep_reverses_the_path, "2,1", "match", 4, {}, {}),
    (keep_reverses_the_path, "dynamic:4", "block", 4, {}, {}),
    (path_from_the_leaf, "1,2", "block", 3, {}, {}),
    (path_from_the_leaf, "dynamic:4", "match", 3, {}, {}),
    (rows_of_p_out_of_order, "2", "token", 3, {}, {}),
    (rows_of_p_out_of_order, "1,2", "block", 3, {}, {}),
    (processors_see_the_whole_block, "1,2", "block", 3, {"no_repeat_ngram": 2}, {}),
    (processors_see_the_whole_block, "dynamic:9", "match", 3, PENALTY, {"prompt": (1, 1)}),
    (processors_see_no_drafts, "1,2", "token", 3, PENALTY, {}),
    (processors_see_no_drafts, "1,2", "block", 3, {"no_repeat_ngram": 2}, {}),
]


@pytest.mark.parametrize(
    ("mutant", "tree", "rule", "new_tokens", "more", "settings"),
    MUTANTS,
    ids=[f"{mutant.__name__}-{tree}-{rule}" for mutant, tree, rule, *_ in MUTANTS],
)
def test_a_wrong_tree_is_exposed(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
    tree: str,
    rule: str,
    new_tokens: int,
    more: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    request = asking(rule, tree, **more)
    assert tree_error(tree, rule, new_tokens, request=request, **settings) < EXACT
    mutant(monkeypatch)
    assert tree_error(tree, rule, new_tokens, request=request, **settings) > 0.005
