"""Every kind of stop at every place of a block, against a loop that commits one token at a time.

The tables force what a step commits: p counts (after b comes b + 1) and q has two candidates, of which one is right but
at the places that a scenario spoils. Log-probabilities are not trivial: p is soft, and only temperature makes it count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from decode import Decoder
from decode.engine import Engine
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.stream import Piece, Result, Stream
from decode.text import TextStream, plain_text
from mtp.config import HeadsOptions
from mtp.initialise import new_heads
from mtp.keyed import KeyedSource, exponentials
from mtp.sampling import RandomSource
from tests.decode.toys import TableDrafter, TableTarget, table
from tests.tiny import CONTEXT, tiny_base, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
K, VOCAB, PROMPT, FAR = 3, 24, (0, 1), 10_000
WORDS = [f"{chr(97 + token)}." for token in range(VOCAB)]


@dataclass(frozen=True)
class Stops:
    """All that may end a text."""

    eos: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    when: Callable[[Sequence[int]], bool] | None = None
    new_tokens: int = 100
    context: int = FAR


def words(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def reason_to_end(ids: Sequence[int], stops: Stops, prompt: int, to_text: Callable[[Sequence[int]], str]) -> str | None:
    """Why a text ends at the last of ids, looking at nothing but ids."""
    if ids[-1] in stops.eos:
        return "eos"
    if ids[-1] in stops.stop_ids or any(text in to_text(ids) for text in stops.stop):
        return "stop"
    if stops.when and stops.when(ids):
        return "callback"
    if len(ids) == stops.new_tokens:
        return "length"
    return "context" if prompt + len(ids) == stops.context else None


def reference(p: Tensor, stops: Stops, choose: Callable[[Tensor, int], int]) -> tuple[list[int], list[float], str]:
    """Token by token: `choose` takes a row of logits and its position."""
    ids: list[int] = []
    logprobs: list[float] = []
    reason = None
    while reason is None:
        context = [*PROMPT, *ids]
        row = p[context[-2], context[-1]]
        ids.append(choose(row, len(context)))
        logprobs.append(float(row.log_softmax(-1)[ids[-1]]))
        reason = reason_to_end(ids, stops, len(PROMPT), words)
    return ids, logprobs, reason


def likeliest(row: Tensor, position: int) -> int:
    return int(row.argmax())


def drafted_run(
    p: Tensor, q: Tensor, request: Request, stops: Stops, random: RandomSource | None = None
) -> tuple[list[Piece], Result]:
    """The engine over tables, as a stream of pieces."""
    engine = Engine(TableTarget(p, stops.context), TableDrafter(q, K))
    stopping = Stopping(
        room(len(PROMPT), stops.context, stops.new_tokens), stops.eos, stops.stop, words,
        stop_ids=stops.stop_ids, stop_when=stops.when,
    )  # fmt: skip
    stats = DecodeStats(request.reported_rule, K, request.tree)
    random = random or RandomSource(0)
    steps = engine.run(PROMPT, request=request, stopping=stopping, random=random, stats=stats)
    stream = Stream(steps, TextStream(words), len(PROMPT), stats)
    return list(stream), stream.result


def check_result(pieces: list[Piece], result: Result, ids: list[int], logprobs: list[float], reason: str) -> None:
    """Text, ids, log-probabilities, reason and counts are those of the reference, and end together."""
    assert (result.token_ids, result.finish_reason) == (ids, reason)
    assert result.text == words(ids) == "".join(piece.text for piece in pieces)
    assert result.logprobs == pytest.approx(logprobs, abs=1e-12)
    assert [one for piece in pieces for one in piece.logprobs] == result.logprobs
    check_counts(pieces, result)


def check_counts(pieces: list[Piece], result: Result) -> None:
    """What the statistics count is what was given out: nothing of a discarded tail."""
    stats = result.stats
    sizes = [len(piece.token_ids) for piece in pieces]
    kept = [sum(piece.drafted) for piece in pieces]
    assert all(len(piece.drafted) == size for piece, size in zip(pieces, sizes, strict=True))
    assert (stats.steps, stats.committed) == (len(pieces), len(result.token_ids))
    assert stats.histogram == [sizes.count(size) for size in range(1, stats.draft_length + 2)]
    assert stats.accepted == sum(kept) <= stats.drafted
    assert stats.accepted_at == [sum(count > k for count in kept) for k in range(stats.draft_length)]


# ---- forced blocks -----------------------------------------------------------------------------------------------


def counting_p() -> Tensor:
    """Soft logits whose likeliest token is the next number, by 5 or more."""
    logits = table(7, VOCAB).clamp(-2, 2)
    for b in range(VOCAB):
        logits[:, b, (b + 1) % VOCAB] = 7.0
    return logits


P = counting_p()


def spoilt_q(places: Sequence[int]) -> Tensor:
    """Two candidates after every token; at these places of the text (from 1), none of them is right."""
    logits = torch.full((VOCAB, VOCAB, VOCAB), -torch.inf, dtype=torch.float64)
    for b in range(VOCAB):
        first = 2 if b + 1 - PROMPT[-1] in places else 1
        logits[:, b, (b + first) % VOCAB] = 1.0
        logits[:, b, (b + first + 1) % VOCAB] = 0.0
    return logits


@dataclass(frozen=True)
class Scenario:
    """Sizes of the blocks before the last, and the ending token's place in the last block and what it is there."""

    before: tuple[int, ...]
    kind: str
    place: int

    @property
    def end(self) -> int:
        return sum(self.before) + self.place

    def q(self) -> Tensor:
        """A block of K + 1 ends with its bonus token, a shorter one with a recovered token."""
        ends = [sum(self.before[: index + 1]) for index, size in enumerate(self.before) if size <= K]
        spoilt = {"recovered": self.end, "accepted before a rejection": self.end + 1}.get(self.kind)
        return spoilt_q(ends if spoilt is None else [*ends, spoilt])


ENDS = [
    *product(("accepted", "recovered"), range(1, K + 1)),
    *product(("accepted before a rejection",), range(1, K)),
    ("bonus", K + 1),
]
SCENARIOS = [Scenario(before, kind, place) for before, (kind, place) in product([(), (K + 1,), (2,), (1, 3)], ENDS)]
_SHARP = {"temperature": 0.01}  # p is then the counting table to 1e-200
_TREE = {"temperature": 0.01, "draft_temperature": 1.0}  # both candidates are drafted at every node
REQUESTS = {
    "greedy": Request(logprobs=True),
    **{rule: Request(**_SHARP, verify=rule, logprobs=True) for rule in ("token", "block", "match")},
    "tree greedy": Request(tree="2,2,2", logprobs=True),
    **{f"tree {rule}": Request(**_TREE, verify=rule, tree="2,2,2", logprobs=True) for rule in ("token", "block")},
    "tree match": Request(**_TREE, verify="match", tree="dynamic:14", logprobs=True),
}
KINDS: dict[str, Callable[[int], Stops]] = {
    "eos": lambda token: Stops(eos=(token,)),
    "one of several eos": lambda token: Stops(eos=(VOCAB - 1, token, VOCAB - 2)),
    "stop id": lambda token: Stops(stop_ids=(VOCAB - 1, token)),
    "stop string of one token": lambda token: Stops(stop=("zz", WORDS[token])),
    "stop string inside a token": lambda token: Stops(stop=(WORDS[token][0],)),
    "stop string of two tokens": lambda token: Stops(stop=(words([token - 1, token]), "zz")),
    "stop string ending inside a token": lambda token: Stops(stop=(words([token - 2, token - 1, token])[1:-1],)),
    "callback": lambda token: Stops(when=lambda ids: ids[-1] == token),
    "length": lambda token: Stops(new_tokens=token - PROMPT[-1]),
    "context": lambda token: Stops(context=len(PROMPT) + token - PROMPT[-1]),
}
TOKENS_OF_STOP = {"stop string of two tokens": 2, "stop string ending inside a token": 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", REQUESTS)
def test_a_block_ends_where_single_tokens_end(asked: str, kind: str) -> None:
    """All places in a block, all roles of the ending token, first and later blocks; strings span blocks at place 1."""
    seen = 0
    for scenario in SCENARIOS:
        if scenario.end < TOKENS_OF_STOP.get(kind, 1):
            continue  # a stop string would begin in the prompt: see below
        stops = KINDS[kind](PROMPT[-1] + scenario.end)
        ids, logprobs, reason = reference(P, stops, likeliest)
        assert len(ids) == scenario.end
        pieces, result = drafted_run(P, scenario.q(), REQUESTS[asked], stops)
        check_result(pieces, result, ids, logprobs, reason)
        limited = kind in {"length", "context"}
        check_blocks(scenario, pieces, result.stats, scenario.end if limited else FAR)
        seen += 1
    assert seen >= 24


def check_blocks(scenario: Scenario, pieces: list[Piece], stats: DecodeStats, limit: int) -> None:
    """The blocks are the scenario's. Where a limit is known beforehand the last block is drafted shorter: its last
    token is then the bonus."""
    sizes = (*scenario.before, scenario.place)
    cut = scenario.kind.startswith("accepted") and limit == FAR
    flags = [(True,) * (size - 1) + (False,) for size in sizes]
    assert [piece.drafted for piece in pieces] == [*flags[:-1], (True,) * sizes[-1] if cut else flags[-1]]
    depths = [min(K, limit - sum(sizes[:step]) - 1) for step in range(len(sizes))]
    if cut:
        depths[-1] = scenario.place
    assert stats.drafted_at == [sum(depth > k for depth in depths) for k in range(K)]
    if stats.tree is None:
        assert stats.drafted == sum(depths)


@pytest.mark.parametrize("asked", REQUESTS)
def test_a_stop_string_does_not_begin_in_the_prompt(asked: str) -> None:
    stops = Stops(stop=(words([PROMPT[-1], PROMPT[-1] + 1]),), new_tokens=6)
    pieces, result = drafted_run(P, spoilt_q([]), REQUESTS[asked], stops)
    check_result(pieces, result, *reference(P, stops, likeliest))
    assert result.finish_reason == "length"


AT_ONCE: dict[str, Callable[[int], dict[str, object]]] = {
    "eos": lambda token: {"eos": (token,)},
    "stop": lambda token: {"stop_ids": (token,), "stop": (WORDS[token],)},
    "callback": lambda token: {"when": lambda ids: ids[-1] == token},
    "length": lambda token: {"new_tokens": token - PROMPT[-1]},
    "context": lambda token: {"context": len(PROMPT) + token - PROMPT[-1]},
}


@pytest.mark.parametrize("reasons", [pair for n in (2, 5) for pair in combinations(AT_ONCE, n)], ids=" ".join)
def test_of_two_reasons_at_one_token_the_first_is_given(reasons: tuple[str, ...]) -> None:
    """The documented order: eos, stop, callback, length (and the context last)."""
    for asked, place in product(("block", "greedy", "tree token"), range(1, K + 2)):
        settings: dict[str, object] = {}
        for reason in reasons:
            settings |= AT_ONCE[reason](PROMPT[-1] + place)
        stops = Stops(**settings)  # type: ignore[arg-type]
        pieces, result = drafted_run(P, spoilt_q([]), REQUESTS[asked], stops)
        assert (result.finish_reason, len(result.token_ids)) == (reasons[0], place)
        check_result(pieces, result, *reference(P, stops, likeliest))


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize(("first", "later"), [pair for pair in product(AT_ONCE, AT_ONCE) if pair[0] != pair[1]])
def test_of_two_stops_in_one_block_the_earlier_token_counts(asked: str, first: str, later: str) -> None:
    stops = Stops(**(AT_ONCE[later](PROMPT[-1] + 3) | AT_ONCE[first](PROMPT[-1] + 2)))  # type: ignore[arg-type]
    pieces, result = drafted_run(P, spoilt_q([]), REQUESTS[asked], stops)
    assert (result.finish_reason, len(result.token_ids)) == (first, 2)
    check_result(pieces, result, *reference(P, stops, likeliest))


@pytest.mark.parametrize("asked", REQUESTS)
def test_the_callback_sees_each_text_once_and_none_that_was_discarded(asked: str) -> None:
    calls: list[list[int]] = []

    def when(ids: Sequence[int]) -> bool:
        calls.append(list(ids))
        return len(ids) == 6

    _, result = drafted_run(P, spoilt_q([2]), REQUESTS[asked], Stops(when=when, stop_ids=(VOCAB - 1,)))
    assert calls == [result.token_ids[:count] for count in range(1, 7)]


# ---- soft laws ---------------------------------------------------------------------------------------------------

SOFT = Stops(eos=(5,), stop_ids=(4,), stop=("a.b.c", "b.b."), when=lambda ids: sum(ids) > 14, new_tokens=9)


@pytest.mark.parametrize("tree", [None, "2,2,1", "dynamic:6"])
@pytest.mark.parametrize("reproducible", [False, True], ids=["greedy", "keyed"])
def test_random_tables(tree: str | None, reproducible: bool) -> None:
    """Here drafts are kept as chance has it; the keyed draws make the reference loop comparable at temperature 1."""
    reasons = []
    for seed in range(60):
        p, q = table(seed, 6, 1.5), table(seed, 6, 1.5) + table(seed + 500, 6)
        options = {"temperature": 1.0, "seed": seed, "reproducible": True} if reproducible else {}
        request = Request(**options, tree=tree, logprobs=True)  # type: ignore[arg-type]

        def race(row: Tensor, position: int, seed: int = seed) -> int:
            return int((torch.from_numpy(exponentials(seed, position, 6)) / row.softmax(-1)).argmin())

        ids, logprobs, reason = reference(p, SOFT, race if reproducible else likeliest)
        pieces, result = drafted_run(p, q, request, SOFT, KeyedSource(seed))
        check_result(pieces, result, ids, logprobs, reason)
        reasons.append(reason)
    assert set(reasons) == {"eos", "stop", "callback", "length"}


@pytest.mark.parametrize("tree", [None, "2,2,1", "dynamic:6"])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_sampled_texts_end_at_their_first_reason(rule: str, tree: str | None) -> None:
    """Without shared draws there is no text to compare with, but its end is still a function of its tokens."""
    p, q = table(3, 6), table(4, 6)
    request = Request(temperature=1.0, verify=rule, tree=tree, logprobs=True)
    last = set()
    for seed in range(40):
        pieces, result = drafted_run(p, q, request, SOFT, RandomSource(seed))
        ids, rest = result.token_ids, iter(result.token_ids)
        check_result(pieces, result, *reference(p, SOFT, lambda row, position, rest=rest: next(rest)))  # type: ignore[misc]
        last.add((len(pieces[-1].token_ids), pieces[-1].drafted[-1], len(ids) > len(pieces[-1].token_ids)))
    assert len(last) >= 5


# ---- a real base -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = tiny_base("llama", tmp_path_factory.mktemp("stops"))
    torch.manual_seed(0)
    return Decoder(base, new_heads(HeadsOptions(draft_length=K), base))


SPELL = plain_text(tiny_tokenizer(), special=True)
REAL = {
    "greedy": Request(max_new_tokens=40),
    "greedy tree": Request(max_new_tokens=40, tree="3,2,1"),
    "keyed": Request(max_new_tokens=40, temperature=1.0, seed=3, reproducible=True),
    "keyed tree": Request(max_new_tokens=40, temperature=1.0, seed=3, reproducible=True, tree="dynamic:8"),
}


@pytest.mark.parametrize("asked", REAL)
def test_a_real_base_ends_where_plain_decoding_ends(decoder: Decoder, asked: str) -> None:
    """Stops are taken from the text itself; 2e-4 is what float32 may move the log-probabilities of this base."""
    request = replace(REAL[asked], ignore_eos=True, logprobs=True)
    whole = decoder.generate("the user", replace(request, draft_length=0, tree=None))
    assert whole.logprobs is not None
    for end in range(1, 10):
        ids = whole.token_ids[:end]
        for stops in (
            Stops(stop_ids=(ids[-1],)),
            Stops(stop=(SPELL(ids[-2:]),)),
            Stops(when=lambda seen, end=end: len(seen) == end),  # type: ignore[misc]
            Stops(new_tokens=end),
        ):
            result = decoder.generate(
                "the user", request, stop_ids=stops.stop_ids, stop=stops.stop, stop_when=stops.when,
                max_new_tokens=min(stops.new_tokens, request.max_new_tokens),
            )  # fmt: skip
            reasons = [reason_to_end(ids[:count], stops, whole.prompt_tokens, SPELL) for count in range(1, end + 1)]
            count = next(place for place, reason in enumerate(reasons, start=1) if reason)
            assert (result.token_ids, result.finish_reason) == (ids[:count], reasons[count - 1])
            assert result.text == decoder.base.tokenizer.decode(ids[:count], skip_special_tokens=True)
            assert result.logprobs == pytest.approx(whole.logprobs[:count], abs=2e-4)
            assert result.stats.committed == count


@pytest.mark.parametrize("asked", REAL)
def test_a_real_base_ends_at_its_context(decoder: Decoder, asked: str) -> None:
    for left in (1, 2, 4, 5):
        result = decoder.generate([5] * (CONTEXT - left), REAL[asked], ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (left, "context")


@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_ignore_eos_goes_on_behind_it(decoder: Decoder, tree: str | None) -> None:
    """The same keyed draws, with and without: the text is the same up to the end, and then goes on."""
    ended = 0
    for seed in range(6):
        request = Request(max_new_tokens=40, temperature=2.0, seed=seed, reproducible=True, tree=tree)
        result = decoder.generate("hi", request)
        longer = decoder.generate("hi", request, ignore_eos=True)
        assert (len(longer.token_ids), longer.finish_reason) == (40, "length")
        assert longer.token_ids[: len(result.token_ids)] == result.token_ids
        if result.finish_reason == "eos":
            ended += 1
            assert result.token_ids[-1] in decoder.base.eos_token_ids
            assert not set(result.token_ids[:-1]) & set(decoder.base.eos_token_ids)
    assert ended >= 2
