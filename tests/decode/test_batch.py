"""Many answers at a time are those that the base gives one by one, whatever shares a batch, and follow its law."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch

from decode import batch as module
from decode import slots as slots_module
from decode.batch import Task, decode_many, draw, pick
from decode.ragged import RaggedAttention
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import SamplingConfig, to_probs
from tests.tiny import FAMILIES, VOCAB_SIZE, exact_base

ENDS = (2, *range(40, 46))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of 1 to 30 tokens; two in three begin alike."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        length = 1 + int(torch.randint(0, 30, (), generator=generator))
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        found.append([7, 8, 9] * (i % 3 > 0) + ids)
    return found


def tasks(count: int, temperature: float | None = None) -> list[Task]:
    return [
        Task(i, ids, float(i % 3) if temperature is None else temperature, 100 + i)
        for i, ids in enumerate(prompts(count))
    ]


def answers(base: FrozenBase, given: Sequence[Task], slots: int, limit: int = 20) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    tokens = 0
    for step in decode_many(base, given, max_new_tokens=limit, slots=slots, ends=ENDS):
        tokens += step.tokens
        for task, ids in step.finished:
            assert task.index not in found
            found[task.index] = ids
    assert tokens == sum(map(len, found.values()))
    return found


def alone(base: FrozenBase, ids: Sequence[int], limit: int) -> list[int]:
    """Greedy, the whole text anew for every token."""
    new: list[int] = []
    while len(new) < limit and not (new and new[-1] in ENDS):
        hidden = base.forward(torch.tensor([[*ids, *new]])).hidden
        new.append(int(base.logits(hidden[0, -1]).argmax()))
    return new


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_one_by_one_decoding(family: str) -> None:
    base, given = exact_base(family), tasks(12, temperature=0.0)
    found = answers(base, given, slots=5)
    assert found == {task.index: alone(base, task.ids, 20) for task in given}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma3"])
def test_answers_do_not_depend_on_the_batch(family: str) -> None:
    """Neither on the number of slots, nor on the order of the prompts, nor on which others there are."""
    base, given = exact_base(family), tasks(24)
    found = answers(base, given, slots=1)
    assert answers(base, given, slots=3) == found
    assert answers(base, given[::-1], slots=9) == found
    assert answers(base, given, slots=40) == found
    assert answers(base, given[5:9], slots=4) == {i: found[i] for i in range(5, 9)}
    other = [Task(t.index, t.ids, t.temperature, t.seed + 1) for t in given]
    changed = answers(base, other, slots=9)
    assert all(changed[i] == found[i] for i in range(0, 24, 3))  # temperature 0
    assert any(changed[i] != found[i] for i in range(24))


def test_answers_end_at_an_end_token_or_at_the_limit() -> None:
    base = exact_base("llama")
    found = answers(base, tasks(24, temperature=1.0), slots=6, limit=9)
    assert len(found) == 24
    for ids in found.values():
        assert not set(ids[:-1]) & set(ENDS)
        assert ids[-1] in ENDS or len(ids) == 9
    assert {ids[-1] in ENDS for ids in found.values()} == {True, False}
    assert {len(ids) for ids in answers(base, tasks(5), slots=2, limit=1).values()} == {1}
    assert answers(base, [], slots=2) == {}


def test_places_are_taken_again_and_columns_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any columns to grow into, and prompts longer than all that is in progress, the answers stay."""
    base, given = exact_base("mistral"), tasks(24)
    expected = answers(base, given, slots=24)
    monkeypatch.setattr(slots_module, "SLACK", 2)
    monkeypatch.setattr(module, "READ_AT_ONCE", 20)
    assert answers(base, sorted(given, key=lambda task: len(task.ids)), slots=4) == expected
    steps = list(decode_many(base, given, max_new_tokens=20, slots=4, ends=ENDS))
    assert len(steps) < 2 * sum(map(len, expected.values())) / 4, "rows idle"


def test_short_texts_are_spared_the_columns_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    base, given = exact_base("llama"), tasks(24)
    expected, made = answers(base, given, slots=8), []

    class Watched(RaggedAttention):
        def _fits(self, *args: object) -> bool:
            fits = super()._fits(*args)  # type: ignore[arg-type]
            made.append(fits)
            return fits

    monkeypatch.setattr("decode.ragged.GROUP", 2)
    monkeypatch.setattr("decode.ragged.WORTH", 1.0)
    monkeypatch.setattr(module, "RaggedAttention", Watched)
    assert answers(base, given, slots=8) == expected
    assert sum(made) > 100


def test_first_tokens_follow_the_base() -> None:
    """First two tokens of 2,000 equal prompts against p: chi-square over pairs expected 5 times or more. The negative
    control, p at another temperature, must fail the same test."""
    base, count, prompt = exact_base("qwen2"), 2000, [7, 8, 9, 20]
    given = [Task(i, prompt, 0.8, i) for i in range(count)]
    seen = Counter(tuple(ids) for ids in answers(base, given, slots=500, limit=2).values())

    def law(temperature: float) -> dict[tuple[int, ...], float]:
        def probs(ids: list[int]) -> list[float]:
            logits = base.logits(base.forward(torch.tensor([ids])).hidden[0, -1])
            row: list[float] = to_probs(logits, SamplingConfig(temperature=temperature)).tolist()
            return row

        expected: dict[tuple[int, ...], float] = defaultdict(float)
        for a, p_a in enumerate(probs(prompt)):
            if a in ENDS:
                expected[(a,)] = p_a
                continue
            for b, p_b in enumerate(probs([*prompt, a])):
                expected[(a, b)] = p_a * p_b
        return expected

    def excess(temperature: float) -> float:
        expected = {pair: prob * count for pair, prob in law(temperature).items()}
        common = [pair for pair, n in expected.items() if n >= 5]
        cells = [(seen[pair], expected[pair]) for pair in common]
        cells.append((count - sum(o for o, _ in cells), count - sum(e for _, e in cells)))
        chi = sum((o - e) ** 2 / e for o, e in cells if e > 1e-9)
        degrees = len(cells) - 1
        return (chi - degrees) / (2 * degrees) ** 0.5

    assert excess(0.8) < 6
    assert excess(1.2) > 6


@pytest.mark.parametrize("vocab", [5, 256, 257, 1000])
def test_a_uniform_number_picks_the_token_of_its_share(vocab: int) -> None:
    """Against the plain running sum in float64, with tokens of probability 0 among them, first and last too."""
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(400, vocab, generator=generator)
    probs[torch.rand(probs.shape, generator=generator) < 0.4] = 0.0
    probs[:, [0, -1]] = 0.0
    probs[:, vocab // 2] += 0.01
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([2.0**-54, 1 - 2.0**-53])
    picked = pick(probs, uniforms)
    sums = probs.double().cumsum(-1)
    expected = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True).squeeze(-1)
    assert (probs.gather(-1, picked[:, None]) > 0).all()
    assert (picked == expected).float().mean() > 0.99  # a float32 sum of a block may move a threshold by a rounding


def test_one_token_alone_is_always_picked() -> None:
    probs = torch.zeros(3, 700)
    probs[[0, 1, 2], [0, 300, 699]] = 1.0
    for uniform in (2.0**-54, 0.5, 1 - 2.0**-53):
        assert pick(probs, torch.full((3,), uniform, dtype=torch.float64)).tolist() == [0, 300, 699]


def test_logits_that_are_not_finite_are_refused() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        draw(logits, [1.0, 0.0], torch.tensor([0.5, 0.5], dtype=torch.float64))
