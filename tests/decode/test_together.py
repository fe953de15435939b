"""Several texts at once are those that each would be alone, whatever is accepted of whose drafts and whoever is beside.

Bases are in float64, so that no token is decided by the rounding of a larger product.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Decoder, Result, step_costs
from decode import stage as stage_module
from decode.drafters import Drafter
from decode.engine import Engine, Step
from decode.request import Request, make_request
from decode.stage import StageCache
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.target import BaseTarget, TargetOutput
from decode.together import Begin, Copies, batch_fault, run_together
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.hub import save_heads
from mtp.initialise import new_heads
from mtp.kernels import MOST_ROWS
from mtp.keyed import KeyedSource
from mtp.sampling import RandomSource
from tests.decode.toys import BaseDrafter
from tests.tiny import CONTEXT, FAMILIES, VOCAB_SIZE, exact_base, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
K = 3
SLIDING = ("mistral", "gemma3")
WHOLE = tuple(family for family in FAMILIES if family not in SLIDING)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return exact_base("llama")


@pytest.fixture(scope="module")
def decoder(base: FrozenBase) -> Decoder:
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(kind="recurrent", draft_length=K), base).double()
    return Decoder(base, heads.bind(base.embedding, base.output_matrix))


# ---- forced acceptances ------------------------------------------------------------------------------------------


class Forced:
    """`Drafter` that knows how the text goes on, drafts its first `right` tokens and then others."""

    draft_ids = None
    feature_layers: tuple[int, ...] = ()
    max_draft_length = K

    def __init__(self, text: Sequence[int], right: int) -> None:
        self.text, self.right = text, right
        self.committed = 0

    def start(self, prompt: Tensor) -> None:
        self.committed = 1

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        self.committed += next_tokens.shape[1]

    def fork(self, origins: Tensor) -> None:
        raise NotImplementedError

    def draft(self, k: int, previous: Tensor) -> Tensor:
        token = self.text[self.committed + k - 1] if self.committed + k <= len(self.text) else 0
        logits = torch.full((1, VOCAB_SIZE), -torch.inf, dtype=torch.float64)
        logits[0, token if k <= self.right else (token + 1) % VOCAB_SIZE] = 0.0
        return logits


def begin(
    base: FrozenBase,
    prompt: Sequence[int],
    request: Request,
    drafter: Drafter | None = None,
    stats: list[DecodeStats] | None = None,
) -> Begin:
    """A text under the request; its counts are added to `stats`."""
    counts = DecodeStats(request.reported_rule, K if drafter else 0)
    if stats is not None:
        stats.append(counts)
    engine = Engine(BaseTarget(base), drafter)
    stopping = Stopping(room(len(prompt), base.context_length, request.max_new_tokens))
    random = RandomSource(0) if request.rule == "block" else KeyedSource(request.seed or 0)
    return partial(engine.begin, prompt, request=request, stopping=stopping, random=random, stats=counts)


def alone(base: FrozenBase, prompt: Sequence[int], request: Request) -> list[int]:
    """The whole text anew for every token, without cache, engine and drafts."""
    tokens = list(prompt)
    source = KeyedSource(request.seed or 0)
    for _ in range(request.max_new_tokens):
        logits = base.logits(base.forward(torch.tensor([tokens])).hidden[0, -1:])
        source.seek(len(tokens))
        drawn = logits.argmax(-1) if request.greedy else source.categorical(logits.softmax(dim=-1))
        tokens.append(int(drawn))
    return tokens[len(prompt) :]


def tokens_of(found: Sequence[tuple[int, Step | UserError]]) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for number, step in found:
        assert isinstance(step, Step), step
        texts.setdefault(number, []).extend(step.tokens)
    return texts


PROMPTS = [[5], [6, 7, 8, 9, 10, 11, 12, 13, 14], [3, 4], [20, 21, 22, 23], [9, 8, 7, 6, 5, 4, 3], [30]]
RIGHT = [0, 1, K, K, 0, 1]
GREEDY = [Request(max_new_tokens=12 + 5 * i) for i in range(len(PROMPTS))]
WARM = [replace(one, temperature=1.0, seed=i, reproducible=True) for i, one in enumerate(GREEDY)]


def forced_batch(base: FrozenBase, requests: Sequence[Request], slots: int) -> tuple[bool, list[DecodeStats]]:
    """Whether every text of a batch is the one alone, and what was counted of each."""
    truth = [alone(base, prompt, request) for prompt, request in zip(PROMPTS, requests, strict=True)]
    stats: list[DecodeStats] = []
    texts = [
        (i, begin(base, prompt, requests[i], Forced([*prompt, *truth[i]], RIGHT[i]), stats))
        for i, prompt in enumerate(PROMPTS)
    ]
    found = tokens_of(list(run_together(base, texts, slots)))
    return found == dict(enumerate(truth)), stats


@pytest.mark.parametrize("slots", [3, 6])
@pytest.mark.parametrize("requests", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("family", WHOLE)
def test_forced_acceptances_of_none_one_and_all(family: str, requests: list[Request], slots: int) -> None:
    """Prompts and texts of different lengths; with three slots, newcomers take the places of those that are done."""
    same, stats = forced_batch(exact_base(family), requests, slots)
    assert same
    for right, prompt, counts in zip(RIGHT, PROMPTS, stats, strict=True):
        whole = counts.steps - 1 - (len(prompt) == 1)  # the first step of one token has no drafts, the last may be cut
        assert counts.histogram[right] >= whole
        assert counts.drafted > counts.steps


def test_the_forced_batch_can_fail(base: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls, through the same function: the gap is seen, padding is seen, accepted tokens stay where
    they were written."""
    prepare = StageCache.prepare

    def all_seen(self: StageCache, counts: Sequence[int], device: torch.device) -> Tensor:
        return torch.ones_like(prepare(self, counts, device))

    def gap_seen(self: StageCache, counts: Sequence[int], device: torch.device) -> Tensor:
        mask = prepare(self, counts, device)
        mask[:, : self.length] = 1
        return mask

    for name, fault in {"prepare": gap_seen, "keep_first": None}.items():
        with monkeypatch.context() as patch:
            if fault is None:
                patch.setattr(stage_module.StageLayer, "move", lambda *_: None)
            else:
                patch.setattr(StageCache, name, fault)
            assert not forced_batch(base, GREEDY, 3)[0]
    with monkeypatch.context() as patch:
        patch.setattr(StageCache, "prepare", all_seen)
        assert not forced_batch(base, GREEDY, 6)[0]


def test_a_drafter_that_is_the_base_is_always_accepted(base: FrozenBase) -> None:
    """At temperature 1 by the block rule, beside a text that has no drafts, past the first room of the cache."""
    stats: list[DecodeStats] = []
    request = Request(max_new_tokens=150, temperature=1.0)
    texts = [
        (0, begin(base, [5, 6], request, BaseDrafter(base), stats)),
        (1, begin(base, [7, 8, 9], request)),
        (2, begin(base, [3] * 40, request, BaseDrafter(base), stats)),
    ]
    found = tokens_of(list(run_together(base, texts, 3)))
    assert [len(found[i]) for i in range(3)] == [150] * 3
    for counts in stats:
        assert counts.accepted == counts.drafted > 100


def test_the_last_text_goes_on_alone(base: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it stands, without another look at the prompt; and newcomers alone from the start, one at a time."""
    rows: list[int] = []
    forward = BaseTarget.forward

    def noted(self: BaseTarget, tokens: Tensor, num_logits: int) -> TargetOutput:
        rows.append(tokens.shape[1])
        return forward(self, tokens, num_logits)

    monkeypatch.setattr(BaseTarget, "forward", noted)
    requests = [Request(max_new_tokens=n) for n in (4, 9)]
    truth = [alone(base, prompt, request) for prompt, request in zip(PROMPTS[1:3], requests, strict=True)]
    for slots, forwards in {2: [8, 1, *[1] * 5], 1: [8, *[1] * 4, 1, *[1] * 9]}.items():
        texts = [(i, begin(base, PROMPTS[1 + i], requests[i])) for i in range(2)]
        rows.clear()
        assert tokens_of(list(run_together(base, texts, slots))) == dict(enumerate(truth))
        assert rows == forwards


# ---- as Python calls ---------------------------------------------------------------------------------------------

TEXTS = ["the user", "an ant", "a", "in the thing there", "who is it? 12345", "x y z", "the the the the the"]
MIXED = [
    Request(max_new_tokens=9, ignore_eos=True),
    Request(max_new_tokens=40, temperature=1.0, seed=3, ignore_eos=True, logprobs=True),
    Request(max_new_tokens=30, temperature=1.3, seed=4, verify="token", top_k=20, draft_length=2, ignore_eos=True),
    Request(max_new_tokens=25, temperature=0.7, seed=5, reproducible=True, repetition_penalty=1.3),
    Request(max_new_tokens=50, temperature=1.0, seed=6, draft_length=0, stop=("e", "7")),
    Request(max_new_tokens=33, lookup=5, ignore_eos=True, chat=False),
    Request(max_new_tokens=300, temperature=1.0, seed=7, draft_min_confidence=0.05, lookup=12, ignore_eos=True),
]


def without_seconds(result: Result) -> dict[str, object]:
    return {name: value for name, value in result.stats.to_json().items() if name not in ("seconds", "alpha")}


@pytest.mark.parametrize("batch_size", [2, 3, 7])
def test_texts_of_different_settings(decoder: Decoder, batch_size: int) -> None:
    """Tokens, ends, counts and log-probabilities; the last text goes on to the end of the context."""
    expected = [decoder.generate(text, request) for text, request in zip(TEXTS, MIXED, strict=True)]
    results = list(decoder.generate_many(TEXTS, MIXED, batch_size=batch_size))
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in results] == [one.finish_reason for one in expected]
    assert {one.finish_reason for one in results} >= {"length", "stop", "context"}
    assert [one.text for one in results] == [one.text for one in expected]
    for one, other in zip(results, expected, strict=True):
        assert without_seconds(one) == without_seconds(other)
        assert one.stats.alpha == pytest.approx(other.stats.alpha)
        assert one.logprobs == (None if other.logprobs is None else pytest.approx(other.logprobs))
    assert max(len(one.token_ids) for one in results) + 60 > CONTEXT - 10


@pytest.mark.parametrize("kind", ["medusa", "recurrent", "sequential"])
def test_one_seed_for_all(base: FrozenBase, kind: str) -> None:
    """In another order and other company, every text is the same."""
    torch.manual_seed(1)
    heads = new_heads(HeadsOptions(kind=kind, draft_length=K), base).double()  # type: ignore[arg-type]
    decoder = Decoder(base, heads.bind(base.embedding, base.output_matrix))
    request = Request(max_new_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    expected = [decoder.generate(text, request).token_ids for text in TEXTS]
    found = [one.token_ids for one in decoder.generate_many(TEXTS[::-1], request, batch_size=4)]
    assert found == expected[::-1]
    assert len(set(map(tuple, expected))) == len(TEXTS)


def test_results_come_as_they_are_done_or_in_order(decoder: Decoder) -> None:
    requests = [Request(max_new_tokens=count, ignore_eos=True) for count in (30, 3, 12)]
    done = [index for index, _ in decoder.as_done(TEXTS[:3], requests, batch_size=3)]
    assert done == [1, 2, 0]
    lengths = [len(one.token_ids) for one in decoder.generate_many(TEXTS[:3], requests, batch_size=3)]
    assert lengths == [30, 3, 12]


def test_k_chosen_in_every_step(decoder: Decoder) -> None:
    """By what steps cost in a batch of this size; whatever is chosen, greedy texts are the same."""
    expected = [decoder.generate(text, max_new_tokens=12).token_ids for text in TEXTS[:3]]
    results = list(decoder.generate_many(TEXTS[:3], max_new_tokens=12, draft_length="auto", batch_size=3))
    assert [one.token_ids for one in results] == expected
    costs = decoder._lengths[3, None].costs
    assert len(costs.verify) == K + 1
    assert all(seconds > 0 for seconds in (*costs.verify, *costs.draft[1:]))


def test_a_step_costs_a_text_its_share_of_the_batchs_forward(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def measure(target: object, *_: object, **__: object) -> tuple[list[float], float]:
        asked.append(target)
        return [3.0] * (K + 1), 0.5

    monkeypatch.setattr(step_costs, "measure_steps", measure)
    monkeypatch.setattr(step_costs, "measure_drafts_together", lambda target, texts, drafts: len(texts) / 10)
    costs = decoder._step_costs(3, None)
    assert costs.verify == (1.0,) * (K + 1)
    assert costs.draft[1] == 0.3
    assert isinstance(asked[0], Copies)
    assert asked[0].count == 3
    assert decoder._step_costs(1, None).draft[1] == 0.5
    assert isinstance(asked[1], BaseTarget)


def test_phases_add_up_to_the_time_of_all(decoder: Decoder) -> None:
    """A forward that several texts share is not counted several times."""
    started = time.perf_counter()
    results = list(decoder.generate_many(TEXTS, max_new_tokens=10, batch_size=7))
    wall = time.perf_counter() - started
    assert 0 < sum(result.stats.total_seconds for result in results) < wall
    assert all(result.stats.seconds["verify"] > 0 for result in results)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def poisoned(*tokens: int) -> FrozenBase:
    """A base that gives NaN from any of `tokens` on."""
    base = exact_base("llama")
    base.embedding[list(tokens)] = torch.nan
    return base


BAD = 63


def test_a_text_that_fails_does_not_spoil_the_others(base: FrozenBase) -> None:
    """Before, beside and after it, in the very row of the cache that it had."""
    bad_base, requests = poisoned(BAD), [Request(max_new_tokens=n, ignore_eos=True) for n in (6, 20, 5, 8, 9)]
    prompts = [[5, 6], [7, 8, 9], [5, BAD, 6, 7, 8, 9, 10, 11, 12], [4, 5], [6, 7, 8]]
    expected = [alone(bad_base, prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
    assert all(BAD not in text for i, text in enumerate(expected) if i != 2)
    for batch_size in (1, 2, 3):
        found = dict(Decoder(bad_base).as_done(prompts, requests, batch_size=batch_size))
        error = found.pop(2)
        assert isinstance(error, UserError)
        assert "base returned NaN" in str(error)
        assert {i: one.token_ids for i, one in found.items() if isinstance(one, Result)} == {
            i: text for i, text in enumerate(expected) if i != 2
        }
        in_order = Decoder(bad_base).generate_many(prompts, requests, batch_size=batch_size)
        assert [next(in_order).token_ids for _ in range(2)] == expected[:2]
        with pytest.raises(UserError, match="base returned NaN"):
            next(in_order)


def test_padding_is_nothing_that_a_text_does_not_hold() -> None:
    """Here no other token can be read at all: a state that is not finite would spoil even what never sees it."""
    prompts, requests = [[5, 6], [7], [8, 9, 10, 11]], [Request(max_new_tokens=n) for n in (20, 24, 28)]
    clean = exact_base("llama")
    truth = [alone(clean, *given) for given in zip(prompts, requests, strict=True)]
    held = {token for text in (*prompts, *truth) for token in text}
    bad_base = poisoned(*({*range(VOCAB_SIZE)} - held))
    texts = [
        (i, begin(bad_base, prompt, requests[i], Forced([*prompt, *truth[i]], K) if i else None))
        for i, prompt in enumerate(prompts)
    ]
    assert tokens_of(list(run_together(bad_base, texts, 3))) == dict(enumerate(truth))


def test_bad_prompts_fail_alone(decoder: Decoder) -> None:
    prompts = ["the user", [VOCAB_SIZE], [3] * CONTEXT, "an ant"]
    found = dict(decoder.as_done(prompts, max_new_tokens=4, batch_size=2))
    assert [type(found[i]) for i in range(4)] == [Result, UserError, UserError, Result]
    assert "outside this base" in str(found[1])
    assert "reads at most" in str(found[2])


class Faulty:
    """A processor of the user's that fails on a token; stateless, as a batch needs it."""

    stateless = True

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        raise KeyError("nothing like it")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"processors": (Faulty(),)}, "the logits processor Faulty raised KeyError: 'nothing like it'"),
        (
            {"stop_when": lambda ids: 1 / 0},
            "the function stop_when <lambda> raised ZeroDivisionError: division by zero",
        ),
        (
            {"prefix_allowed_tokens_fn": lambda row, ids: {}[row]},
            "prefix_allowed_tokens_fn <lambda> raised KeyError: 0",
        ),
    ],
    ids=["processors", "stop_when", "prefix_allowed_tokens_fn"],
)
def test_a_function_of_the_users_that_fails_ends_its_own_text(
    decoder: Decoder, options: dict[str, Any], told: str
) -> None:
    prompts = ["the user", "an ant", "the"]
    requests = [Request(max_new_tokens=6), Request(max_new_tokens=6, **options), Request(max_new_tokens=6)]
    found = dict(decoder.as_done(prompts, requests, batch_size=3))
    assert told in str(found[1])
    assert isinstance(found[1], UserError)
    assert found[1].__cause__ is not None
    for place in (0, 2):
        result = found[place]
        assert isinstance(result, Result)
        assert result.token_ids == decoder.generate(prompts[place], max_new_tokens=6).token_ids


def stateful(text: Tensor, logits: Tensor) -> Tensor:
    return logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size is 0; use at least 1"),
        ({"tree": "2,1"}, "--batch-size is 4, but --tree is 2,1"),
        ({"processors": (stateful,)}, "--batch-size is 4, but a processor of the request may keep state"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"request": [Request()] * 2}, "there are 2 requests for 7 prompts"),
    ],
)
def test_what_no_batch_can_do_is_refused_at_once(decoder: Decoder, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoder.generate_many(TEXTS, **({"batch_size": 4} | options))  # type: ignore[arg-type]


def test_no_prompts_give_no_results(decoder: Decoder) -> None:
    assert list(decoder.generate_many([], batch_size=4)) == list(decoder.generate_many([], batch_size=1)) == []


@pytest.mark.parametrize("family", SLIDING)
def test_a_sliding_window_is_refused_but_for_single_texts(family: str) -> None:
    decoder = Decoder(exact_base(family))
    with pytest.raises(UserError, match=r"--batch-size is 2, but base .* see a sliding window only; use 1"):
        decoder.generate_many(TEXTS, batch_size=2)
    assert len(list(decoder.generate_many(TEXTS[:2], max_new_tokens=2, batch_size=1))) == 2


def test_a_base_that_mixes_texts_up_is_found_out(base: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_fault(base) is None
    run = FrozenBase._run

    def heedless(
        self: FrozenBase, tokens: Tensor, cache: object, attention_mask: Tensor | None, tree: object
    ) -> Tensor:
        seen = None if attention_mask is None else torch.ones_like(attention_mask)
        return run(self, tokens, cache, seen, tree)  # type: ignore[arg-type]

    monkeypatch.setattr(FrozenBase, "_run", heedless)
    assert batch_fault(base) == "a text of a batch gets other states than alone"
    monkeypatch.setattr(FrozenBase, "_run", lambda *_: (_ for _ in ()).throw(ValueError("no")))
    assert batch_fault(base) == "its attention takes no mask of a batch (ValueError)"


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"lookup": 3}, {"draft_length": 0}])
def test_in_one_call_of_the_kernels_not_even_rounding_differs(
    options: dict[str, object], tmp_path: Path, compiled_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, log-probabilities included, although texts leave and others come in."""
    folder = tmp_path / "heads"
    save_heads(new_heads(HeadsOptions(draft_length=3), tiny_base("llama", tmp_path)), folder, card="")
    decoder = Decoder.from_pretrained(folder, device="cpu", compile="on", home=compiled_home)
    several, asked = decoder.base.several, []
    assert several is not None
    assert decoder.base.kernels is not None
    decoder.base.kernels.rows = frozenset(range(1, MOST_ROWS + 1))
    monkeypatch.setattr(decoder.base, "several", lambda *given: asked.append(len(given[1].texts)) or several(*given))
    prompts = ["the user", "a", "what is the name of it", "the user said so and", "x y"]
    requests = [
        make_request({"max_new_tokens": 9 + 5 * n, "ignore_eos": True, "seed": n, "logprobs": True, **options})
        for n in range(len(prompts))
    ]
    found = list(decoder.generate_many(prompts, requests, batch_size=3))
    assert max(asked) == 3
    for prompt, request, result in zip(prompts, requests, found, strict=True):
        alone = decoder.generate(prompt, request)
        assert result.token_ids == alone.token_ids
        assert result.logprobs == alone.logprobs
        assert result.stats.accepted_per_position == alone.stats.accepted_per_position
