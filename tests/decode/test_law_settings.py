"""The engine's law under every setting of a request, against conditionals that see the whole text before each token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.laws import Laws
from decode.request import Request
from mtp.sampling import to_probs
from tests.decode.laws import CHAIN_RULES, EXACT, P2, Q2, P, conditional_of, law_error, walk_engine
from tests.decode.toys import total_variation, true_law

pytestmark = pytest.mark.usefixtures("one_thread")
EOS = (1,)
PROMPT = (1, 2)


class Own:
    """A processor of the user's: what was said two tokens ago is likelier."""

    stateless = True

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        return logits.scatter_add(1, text[:, -2:-1], logits.new_full((len(text), 1), 1.5))


def allowed(_: int, text: Tensor) -> list[int]:
    """No two 0s in a row, and after an odd sum not the 2."""
    tokens = [0, 1, 2] if int(text.sum()) % 2 == 0 else [0, 1]
    return tokens[1:] if int(text[-1]) == 0 else tokens


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot top-k": {"temperature": 1.3, "top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.4},
    "typical-p": {"typical_p": 0.7},
    "epsilon": {"epsilon_cutoff": 0.25},
    "eta": {"eta_cutoff": 0.3},
}
BIASES: dict[str, dict[str, Any]] = {
    "suppress": {"suppress_tokens": (1,)},
    "logit bias": {"logit_bias": {0: 1.5, 2: -0.7}},
    "forbidding bias": {"logit_bias": {0: -torch.inf}},
}
LOOKING_BACK: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "presence penalty": {"presence_penalty": 1.2},
    "frequency penalty": {"frequency_penalty": 0.9},
    "no repeated n-gram": {"no_repeat_ngram": 2},
    "bad words": {"bad_words_ids": ((0, 1), (2, 2))},
    "min new tokens": {"min_new_tokens": 2},
    "prefix constraint": {"prefix_allowed_tokens_fn": allowed},
    "own processor": {"processors": (Own(),)},
}
COMBINED: dict[str, dict[str, Any]] = {
    "penalties, top-p and a draft temperature": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "draft_temperature": 2.0,
    },
    "constraint, n-gram, bias and top-k": {
        "prefix_allowed_tokens_fn": allowed,
        "no_repeat_ngram": 3,
        "logit_bias": {1: 0.5},
        "top_k": 2,
    },
    "bans, minimum, own processor and min-p": {
        "bad_words_ids": ((0, 0),),
        "min_new_tokens": 1,
        "processors": (Own(),),
        "min_p": 0.1,
        "frequency_penalty": 0.4,
        "draft_min_confidence": 0.5,
    },
}
SETTINGS = TRUNCATIONS | BIASES | LOOKING_BACK | COMBINED


def request_for(rule: str, name: str) -> Request:
    return replace(CHAIN_RULES[rule], **SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_changes_the_law(name: str) -> None:
    """Otherwise the checks below would say nothing of it."""
    plain, changed = (
        true_law(conditional_of(P, request, PROMPT, EOS), list(PROMPT), 3, EOS)
        for request in (CHAIN_RULES["block"], request_for("block", name))
    )
    assert total_variation(plain, changed) > 0.01


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", SETTINGS)
def test_law_under_a_setting(name: str, rule: str) -> None:
    assert law_error(2, 3, prompt=PROMPT, eos=EOS, request=request_for(rule, name)) < EXACT


@pytest.mark.parametrize("name", SETTINGS)
def test_law_of_match_under_a_setting(name: str) -> None:
    """One draft only: match branches over all tokens at K + 1 places at once."""
    assert law_error(1, 2, prompt=PROMPT, eos=EOS, request=request_for("match", name)) < EXACT


def test_law_of_match_under_penalties_with_two_drafts() -> None:
    request = replace(CHAIN_RULES["match"], repetition_penalty=1.8, frequency_penalty=0.5)
    assert law_error(2, 3, p=P2, q=Q2, prompt=(0, 1), request=request) < EXACT


@pytest.mark.parametrize("name", ["repetition penalty", "no repeated n-gram", "prefix constraint"])
def test_law_under_a_setting_over_more_steps(name: str) -> None:
    """A longer text and a longer prompt, no end of sequence, and a draft vocabulary."""
    request = request_for("block", name)
    assert law_error(2, 4, prompt=(1, 2, 0, 2), request=request) < EXACT
    assert law_error(2, 3, prompt=(1, 2, 0, 2), request=request, draft_ids=torch.tensor([0, 2])) < EXACT


# ---- mutants -----------------------------------------------------------------------------------------------------


def forget_drafts(self: Laws, logits: Tensor, committed: Tensor, suffixes: Sequence[Tensor]) -> Tensor:
    """The processors see the committed text only, for every row of the block."""
    assert self._processors is not None
    rows = [self._processors(committed[None], logits[row : row + 1]) for row in range(len(suffixes))]
    return torch.cat(rows)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", LOOKING_BACK)
def test_processors_that_do_not_see_the_drafts_are_exposed(
    monkeypatch: pytest.MonkeyPatch, name: str, rule: str
) -> None:
    """Without an end of sequence, but for the setting that needs one."""
    eos = EOS if name == "min new tokens" else ()
    request = request_for(rule, name)
    assert law_error(2, 3, prompt=PROMPT, eos=eos, request=request) < EXACT
    monkeypatch.setattr(Laws, "_process", forget_drafts)
    assert walk_engine(2, 3, prompt=PROMPT, eos=eos, request=request).error > 0.01


@pytest.mark.parametrize("name", ["repetition penalty", "prefix constraint"])
def test_processors_of_match_that_do_not_see_the_drafts_are_exposed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    request = request_for("match", name)
    assert law_error(1, 2, prompt=(0, 0), request=request) < EXACT
    monkeypatch.setattr(Laws, "_process", forget_drafts)
    assert law_error(1, 2, prompt=(0, 0), request=request) > 0.01


def forget_processors(self: Laws, logits: Tensor, committed: Tensor, suffixes: Sequence[Tensor]) -> Tensor:
    return logits.double()


def test_a_base_without_the_processors_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the truth: leaving the processors out altogether is seen too."""
    request = request_for("block", "repetition penalty")
    monkeypatch.setattr(Laws, "_process", forget_processors)
    assert law_error(2, 3, prompt=PROMPT, request=request) > 0.01


def test_a_drafter_without_the_processors_keeps_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """q may be any law, as long as the drafts are judged by it: only the number of accepted drafts falls."""
    request = request_for("block", "no repeated n-gram")
    honest = walk_engine(2, 4, q=P, prompt=(1, 2, 0), request=request)
    assert honest.accepted == honest.drafted

    def unprocessed(self: Laws, logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return to_probs(logits, request), torch.ones(len(logits), dtype=torch.bool)

    monkeypatch.setattr(Laws, "q", unprocessed)
    walked = walk_engine(2, 4, q=P, prompt=(1, 2, 0), request=request)
    assert walked.error < EXACT
    assert walked.mean["accepted"] < honest.mean["accepted"] - 0.05
