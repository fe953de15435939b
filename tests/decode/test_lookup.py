"""Prompt lookup: what is found, the law of the text, who drafts when, and what is counted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode import Decoder
from decode import engine as engine_module
from decode.bench import bench
from decode.chain import Chain, Drafting, copy_chain, draft_chain
from decode.cli import main
from decode.engine import Engine
from decode.laws import Laws
from decode.lookup import MOST_DRAFTS, SIZES, NgramIndex
from decode.report import show_bench, show_stats
from decode.request import Request
from decode.stats import DecodeStats
from decode.target import BaseTarget, TargetOutput
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from mtp.sampling import RandomSource
from tests.decode.laws import CHAIN_RULES, EXACT, P2, Q2, P, Q, walk_engine
from tests.decode.test_engine import Recorder, counting
from tests.decode.test_law_settings import LOOKING_BACK
from tests.decode.toys import PLAIN, TableDrafter, TableTarget, decode, table
from tests.tiny import exact_base, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
JUDGING = ["token", "block"]
PROMPT = (1, 2, 0, 1, 2)
"""After its last two tokens came 0, 1, 2 before."""


# ---- what is found -----------------------------------------------------------------------------------------------


def searched(text: Sequence[int], most: int) -> list[int]:
    """What the index must find, by looking at every place."""
    for size in SIZES:
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                return list(text[place : place + most])
    return []


@settings(max_examples=300, deadline=None)
@given(blocks=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8), most=st.integers(0, MOST_DRAFTS))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(blocks: list[list[int]], most: int) -> None:
    """After every block, whatever its size."""
    index, text = NgramIndex(), list[int]()
    for block in blocks:
        index.extend(block)
        text += block
        assert index.continuation(most) == searched(text, most)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([], []),
        ([7], []),
        ([7, 7], []),
        ([7, 7, 7], [7]),  # the places may overlap
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest place
        ([9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], [3, 5, 1, 2, 4]),  # three tokens before two
        ([1, 2, 3, 2, 1], []),
    ],
)
def test_examples(text: list[int], found: list[int]) -> None:
    assert NgramIndex(text).continuation(5) == found


# ---- who drafts, and how much ------------------------------------------------------------------------------------


class Noting(TableTarget):
    """Keeps every block it was given, and the text before it."""

    def start(self, feature_layers: tuple[int, ...]) -> None:
        super().start(feature_layers)
        self.blocks: list[tuple[list[int], list[int]]] = []

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        if num_logits:
            self.blocks.append((self.tokens + tokens[0, :1].tolist(), tokens[0, 1:].tolist()))
        return super().forward(tokens, num_logits)


@pytest.mark.parametrize("draft_length", [0, 2])
def test_the_engine_drafts_what_a_search_finds_and_else_by_the_heads(draft_length: int) -> None:
    """As far as there is room: the context ends 30 tokens behind the prompt, before the limit does."""
    by_lookup = 0
    for seed in range(20):
        target = Noting(table(seed, sharpness=3.0), len(PROMPT) + 30)
        engine = Engine(target, TableDrafter(Q))
        request = replace(PLAIN, lookup=4)
        _, stats = decode(engine, list(PROMPT), 30, draft_length, request=request, random=RandomSource(seed))
        for text, drafts in target.blocks:
            left = target.context_length - len(text) - 1
            found = searched(text, min(4, left))
            by_lookup += bool(found)
            if found:
                assert drafts == found
            else:
                assert len(drafts) == min(draft_length, left)
        assert stats.lookup_steps == sum(bool(searched(text, len(drafts))) for text, drafts in target.blocks)
    assert by_lookup > 50


def test_heads_are_in_step_after_steps_that_they_did_not_draft() -> None:
    """Their q is that of heads which were shown the finished text at once."""
    base = exact_base("llama")
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(draft_length=3), base).double()
    recorder = Recorder(heads.bind(base.embedding, base.output_matrix))
    request = Request(temperature=0.6, lookup=5)
    _, stats = decode(Engine(BaseTarget(base), recorder), [5, 6, 7, 5, 6], 120, 3, request=request)
    assert stats.lookup_steps > 5
    assert 0 < stats.lookup_accepted < stats.lookup_drafted < stats.drafted
    assert stats.steps - stats.lookup_steps - 1 <= len(recorder.first) <= stats.steps - stats.lookup_steps
    for text, logits in recorder.first:
        fresh = Recorder(heads)
        fresh.start(text)
        fresh.ingest(base.forward(text[:, :-1], feature_layers=fresh.feature_layers).features, text[:, 1:])
        torch.testing.assert_close(fresh.draft(1, text[:, -1]), logits, atol=1e-9, rtol=1e-9)


# ---- the law -----------------------------------------------------------------------------------------------------


def law_error(draft_length: int, new_tokens: int, request: Request, **changes: object) -> float:
    """As that of `tests.decode.laws`, and copied drafts were kept and rejected, among those of heads if there are."""
    walked = walk_engine(draft_length, new_tokens, request=request, **({"prompt": PROMPT} | changes))  # type: ignore[arg-type]
    assert 0 < walked.lookup_accepted < walked.lookup_drafted
    assert (walked.lookup_drafted < walked.drafted) == (draft_length > 0)
    return walked.error


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize(("draft_length", "lookup", "new_tokens"), [(0, 1, 4), (0, 3, 5), (1, 3, 3), (2, 1, 3)])
def test_law_equals_base(rule: str, draft_length: int, lookup: int, new_tokens: int) -> None:
    """Without heads, with fewer drafts of theirs than are copied, and with more."""
    request = replace(CHAIN_RULES[rule], lookup=lookup)
    assert law_error(draft_length, new_tokens, request) < EXACT
    if not draft_length:
        assert law_error(0, new_tokens, request, p=P2, q=Q2, prompt=(0, 1, 1, 0, 1)) < EXACT


@pytest.mark.parametrize(("draft_length", "lookup"), [(0, 2), (1, 1), (1, 2)])
def test_law_of_match_equals_base(draft_length: int, lookup: int) -> None:
    """Copied drafts cost no branches, but match draws all rows at once: its walks are kept small."""
    request = replace(CHAIN_RULES["match"], lookup=lookup)
    assert law_error(draft_length, 3, request) < EXACT
    if not draft_length:
        assert law_error(0, 5, request, p=P2, q=Q2, prompt=(0, 1, 1, 0, 1)) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize(("tree", "depth"), [("2", 1), ("1,2", 2), ("dynamic:3", 2)])
def test_law_where_chains_that_are_copied_and_trees_take_turns(rule: str, tree: str, depth: int) -> None:
    assert law_error(depth, 3, replace(CHAIN_RULES[rule], lookup=2, tree=tree)) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
def test_law_with_end_of_sequence_inside_copied_blocks(rule: str) -> None:
    request = replace(CHAIN_RULES[rule], lookup=3)
    for eos in ((1,), (0, 2)):
        assert law_error(0, 4, request, eos=eos) < EXACT
    assert law_error(2, 4, request, eos=(1,)) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
def test_a_draft_vocabulary_binds_the_heads_alone(rule: str) -> None:
    """0 is copied, which these heads never draft."""
    assert law_error(1, 3, replace(CHAIN_RULES[rule], lookup=2), draft_ids=torch.tensor([1])) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("name", LOOKING_BACK)
def test_law_under_a_setting(name: str, rule: str) -> None:
    """Where the processors forbid what would be copied, heads draft; no n-gram twice forbids all of it."""
    request = replace(CHAIN_RULES[rule], lookup=3, top_p=0.95, draft_temperature=0.7, **LOOKING_BACK[name])
    walked = walk_engine(1, 3, prompt=PROMPT, eos=(1,), request=request)
    assert walked.error < EXACT
    assert 0 < walked.accepted < walked.drafted
    assert (walked.lookup_drafted > 0) == (name != "no repeated n-gram")


def judged_by_the_heads(given: Drafting, drafts: Sequence[int]) -> Chain:
    """Copied drafts with the q of the heads at the same places."""
    chain, rows = copy_chain(given, drafts), []
    assert given.drafter is not None
    for k in range(len(drafts)):
        logits = given.drafter.draft(k + 1, chain.block[:, k])
        rows.append(given.laws.q(logits, given.vocab_size, given.committed, [chain.block[0, 1 : k + 1]])[0])
    return replace(chain, q=torch.stack(rows, dim=1))


def unless_the_heads_draw_otherwise(given: Drafting, drafts: Sequence[int]) -> Chain:
    """What the heads drew stands where it differs."""
    drawn = draft_chain(given, len(drafts))
    return copy_chain(given, drafts) if drawn.block[0, 1:].tolist() == list(drafts) else drawn


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("mutant", [judged_by_the_heads, unless_the_heads_draw_otherwise])
def test_wrong_lookup_is_exposed(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Drafting, Sequence[int]], Chain], rule: str
) -> None:
    request = replace(CHAIN_RULES[rule], lookup=2)
    assert walk_engine(2, 3, prompt=PROMPT, request=request).error < EXACT
    monkeypatch.setattr(engine_module, "copy_chain", mutant)
    assert walk_engine(2, 3, prompt=PROMPT, request=request).error > 0.01


class Strict:
    """No 0 behind a 2, and a complaint about a text in which one was generated."""

    stateless = True

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        pairs = text[0, len(PROMPT) - 1 :].tolist()
        assert (2, 0) not in zip(pairs, pairs[1:], strict=False), "a text that can never come to be"
        forbidden = torch.tensor([text[0, -1] == 2, False, False])
        return logits.masked_fill(forbidden, -torch.inf)


def test_no_processor_sees_a_text_that_it_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied drafts end before the first that may not come; here 0, and behind 1, 2 another."""
    for request in (Request(lookup=4, processors=(Strict(),)), replace(PLAIN, lookup=4, processors=(Strict(),))):
        _, stats = decode(Engine(TableTarget(P), TableDrafter(Q)), list(PROMPT), 40, 2, request=request)
        assert 0 < stats.lookup_drafted < stats.drafted
        with monkeypatch.context() as patch:
            patch.setattr(Laws, "allowed", lambda self, drafts, *_: list(drafts))
            with pytest.raises(UserError, match="never come to be"):
                decode(Engine(TableTarget(P), TableDrafter(Q)), list(PROMPT), 40, 2, request=request)


# ---- texts of a base ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    """In float64, so that no near tie is decided by the number of rows."""
    base = exact_base("llama")
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(draft_length=3), base).double()
    return {"none": Decoder(base), "heads": Decoder(base, heads.bind(base.embedding, base.output_matrix))}


WAYS: dict[str, dict[str, object]] = {
    "greedy": {},
    "keyed": {"temperature": 0.4, "seed": 2, "reproducible": True},
    "greedy, processed": {"repetition_penalty": 1.1, "suppress_tokens": (5,), "min_new_tokens": 9},
    "keyed, processed": {"temperature": 0.4, "seed": 2, "reproducible": True, "presence_penalty": 0.1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", ["none", "heads"])
def test_the_text_is_that_of_plain_decoding_and_repeats_are_kept(
    decoders: dict[str, Decoder], way: str, who: str
) -> None:
    request = Request(max_new_tokens=120, ignore_eos=True, **WAYS[way])  # type: ignore[arg-type]
    plain = decoders["none"].generate("the user the user", request)
    for lookup in (1, 5, MOST_DRAFTS):
        result = decoders[who].generate("the user the user", request, lookup=lookup)
        stats = result.stats
        assert result.token_ids == plain.token_ids
        assert 0 < stats.lookup_accepted <= stats.lookup_drafted
        assert (stats.drafted > stats.lookup_drafted) == (who == "heads")
        assert len(stats.accepted_per_position) == stats.most_drafts == max(lookup, 3 if who == "heads" else 0)
    assert plain.stats.lookup_steps == 0 < plain.stats.steps == 120


def test_heads_that_are_switched_off_leave_lookup_alone(decoders: dict[str, Decoder]) -> None:
    request = Request(max_new_tokens=60, lookup=4, draft_length=0)
    alone, beside = (decoders[who].generate("hi", request) for who in ("none", "heads"))
    assert alone.token_ids == beside.token_ids
    assert alone.stats.drafted == beside.stats.drafted == beside.stats.lookup_drafted > 0


def test_a_processor_with_state_is_decoded_for_without_lookup(decoders: dict[str, Decoder]) -> None:
    for decoder in decoders.values():
        result = decoder.generate("hi", max_new_tokens=30, lookup=4, processors=[lambda text, logits: -logits])
        stats = result.stats.to_json()
        assert (stats["undrafted_texts"], stats["lookup"], stats["draft_length"], stats["drafted"]) == (1, 0, 0, 0)


# ---- counts ------------------------------------------------------------------------------------------------------

ROUND = [*range(12), 0, 1]
"""A base that counts goes on with 2, 3, 4, …, as this prompt did."""


@pytest.mark.parametrize(
    ("new_tokens", "eos", "histogram", "copied"),
    [
        (10, (), [0, 0, 0, 0, 2], (2, 8, 8)),
        (3, (), [0, 0, 1, 0, 0], (1, 2, 2)),  # room for two drafts
        (1, (), [1, 0, 0, 0, 0], (0, 0, 0)),
        (10, (4,), [0, 0, 1, 0, 0], (1, 3, 3)),  # 5, which was kept too, comes behind the end
        (10, (8,), [0, 1, 0, 0, 1], (2, 6, 6)),
    ],
)
def test_counts(new_tokens: int, eos: tuple[int, ...], histogram: list[int], copied: tuple[int, int, int]) -> None:
    """Nothing of a discarded tail is counted."""
    _, stats = decode(Engine(TableTarget(counting())), ROUND, new_tokens, 0, request=replace(PLAIN, lookup=4), eos=eos)
    assert stats.histogram == histogram
    assert (stats.lookup_steps, stats.lookup_drafted, stats.lookup_accepted) == copied
    assert (stats.drafted, stats.accepted) == copied[1:]
    total = stats.empty()
    for _ in range(2):
        total.merge(stats)
    document = total.to_json()
    assert [document[name] for name in ("lookup_steps", "lookup_drafted", "lookup_accepted")] == [2 * n for n in copied]
    assert (document["lookup"], document["draft_length"], len(document["alpha"])) == (4, 0, 4)


def test_texts_of_another_lookup_are_not_added() -> None:
    with pytest.raises(AssertionError):
        DecodeStats("token", 4).merge(DecodeStats("token", 4, lookup=2))


def test_what_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    """K stays that of the heads."""
    for draft_length, name in ((0, "K = 0, lookup 4, token"), (2, "K = 2, lookup 4, token")):
        engine = Engine(TableTarget(counting()), TableDrafter(counting()))
        _, stats = decode(engine, ROUND, 10, draft_length, request=replace(PLAIN, lookup=4))
        show_stats(stats)
        shown = capsys.readouterr().err
        assert f"5.00 tokens per step ({name})" in shown
        assert "lookup: 8 of 8 drafts kept, in 2 steps" in shown
        show_stats(replace(stats, lookup=0))
        assert "lookup" not in capsys.readouterr().err


def test_bench_names_it_and_has_rivals_without(
    decoders: dict[str, Decoder], capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(decoders["heads"], ["the user"], Request(max_new_tokens=60, lookup=5), "heads", against=("plain",))
    assert (report["draft_length"], report["lookup"]) == (3, 5)
    ours, plain = report["results"]
    assert 0 < ours["lookup_accepted"] <= ours["lookup_drafted"]
    assert plain["accept_len"] == 1.0
    assert "lookup_steps" not in plain
    show_bench(report, to_stderr=False)
    assert "K = 3, lookup 5, greedy" in " ".join(capsys.readouterr().out.split())
    report = bench(decoders["heads"], ["the user"], Request(max_new_tokens=6), "heads", against=())
    show_bench(report, to_stderr=False)
    assert "lookup" not in capsys.readouterr().out


def test_the_command_line_needs_no_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("llama", tmp_path / "base")
    args = ["generate", "--base", str(folder), "--device", "cpu", "--prompt", "the user", "--max-new-tokens", "60"]
    assert main([*args, "--lookup", "5"]) == 0
    shown = capsys.readouterr()
    assert "K = 0, lookup 5, greedy" in shown.err
    assert main(args) == 0
    assert capsys.readouterr().out == shown.out
