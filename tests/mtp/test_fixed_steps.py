"""Recorded steps are those of the base wherever the text stands and whoever has the buffers.

In place of a GPU's graphs: the operations of one run, with the tensors that it read, run again. Whatever else the run
looked at, such as a length in Python, stays as it was, as in a graph.
"""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from decode import speed
from decode.decoder import Decoder
from mtp import fixed_steps
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.fixed_steps import FixedSteps
from mtp.initialise import new_heads
from mtp.stack import Stack
from mtp.tree_mask import TreeMask
from tests.mtp.test_stack import LAYERS, READABLE, assert_close, follow, tokens
from tests.tiny import exact_base, tiny_base


class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Notes every operation with its arguments; `replay` runs them again, each result in the place of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[tuple[object, object, object, object]] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(named or {}))
        self.played.append((function, arguments, named or {}, result))
        return result

    def replay(self) -> None:
        new: dict[int, Tensor] = {}

        def latest(value: object) -> object:
            return new.get(id(value), value) if isinstance(value, Tensor) else value

        for function, arguments, named, result in self.played:
            found = function(*tree_map(latest, arguments), **tree_map(latest, named))  # type: ignore[operator]
            if isinstance(result, Tensor):
                if all(result is not argument for argument in arguments):
                    new[id(result)] = found
            else:
                new |= {id(old): one for old, one in zip(result, found, strict=True)}  # type: ignore[call-overload]
        self.result = new


def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    run()
    with Tape() as tape:
        result = run()

    def replay() -> Tensor:
        tape.replay()
        return tape.result[id(result)]

    return replay


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buffers that soon are too small, and how often something was recorded."""
    monkeypatch.setattr(fixed_steps, "_LEAST_PLACES", 32)
    return []


def counted(stack: Stack, log: list[int]) -> FixedSteps:
    def note(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        log.append(1)
        return record(run)

    return FixedSteps(stack, note)


@pytest.mark.parametrize("family", READABLE)
def test_states_over_steps_and_rollbacks(family: str, tmp_path: Path, recorded: list[int]) -> None:
    """Blocks of random lengths, some taken back, through several sizes of the buffers."""
    base = tiny_base(family, tmp_path)
    ours, theirs, made = follow(base, counted(Stack.of(base), recorded).forward)
    assert ours.length > 140
    assert len(recorded) < made  # most were replayed
    base.forward(tokens(2, 20), cache=ours)  # and what was written serves the model itself
    base.forward(tokens(2, 20), cache=theirs)
    more = [base.forward(tokens(3, 2), cache=cache).hidden for cache in (ours, theirs)]
    assert_close(*more)


def test_trees_and_chains_by_the_same_record(tmp_path: Path, recorded: list[int]) -> None:
    base = tiny_base("llama", tmp_path)
    steps, ours, theirs = counted(Stack.of(base), recorded), base.new_cache(), base.new_cache()
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    tree = TreeMask(visible, torch.tensor([0, 1, 1, 2]))
    for seed, shape in ((1, None), (2, tree), (3, None), (4, tree)):
        found = steps.forward(tokens(seed, 4), ours, tree=shape).hidden
        assert_close(found, base.forward(tokens(seed, 4), cache=theirs, tree=shape).hidden)
        for cache in (ours, theirs):
            cache.keep(cache.length - 4, [cache.length - 4, cache.length - 2, cache.length - 1])
    assert len(recorded) == 1


def test_texts_in_turns_each_keep_their_own(tmp_path: Path, recorded: list[int]) -> None:
    base = tiny_base("qwen2", tmp_path)
    steps = counted(Stack.of(base), recorded)
    pairs = [(base.new_cache(), base.new_cache()) for _ in range(3)]
    for turn in range(12):
        ours, theirs = pairs[turn % 3 if turn < 9 else turn % 2]
        found = steps.forward(tokens(turn, 1 + turn % 4), ours, LAYERS)
        wanted = base.forward(tokens(turn, 1 + turn % 4), cache=theirs, feature_layers=LAYERS)
        assert_close(found.features, wanted.features)
        del found
    del pairs[0], ours  # a text that is gone is not copied
    steps.forward(tokens(0, 1), pairs[0][0])


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
@pytest.mark.parametrize("settings", [{}, {"tree": "2,2"}, {"temperature": 1.0, "seed": 3}])
def test_texts_are_those_of_plain_steps(kind: str, settings: dict[str, object], recorded: list[int]) -> None:
    """In float64, where sums in another order turn no draw."""
    base = exact_base("qwen2")
    torch.manual_seed(0)
    decoder = Decoder(base, new_heads(HeadsOptions(kind=kind, draft_length=3), base).double())  # type: ignore[arg-type]
    wishes = {"max_new_tokens": 60, "ignore_eos": True, **settings}
    plain = decoder.generate([5, 9, 12, 7], **wishes).token_ids
    base.steps = counted(Stack.of(base), recorded).forward
    assert decoder.generate([5, 9, 12, 7], **wishes).token_ids == plain
    streams = [decoder.stream([5, 9, 12, 7], **wishes) for _ in range(2)]
    for _ in zip_longest(*streams):
        pass
    assert [stream.result.token_ids for stream in streams] == [plain, plain]
    assert recorded


def test_a_length_in_python_would_show(tmp_path: Path) -> None:
    """The negative control of the tape: steps that read the cache's length themselves stay where they were recorded."""
    base = tiny_base("llama", tmp_path)
    stack, cache = Stack.of(base), base.new_cache()
    base.forward(tokens(1, 6), cache=cache)
    held = torch.zeros(1, 1, dtype=torch.long)

    def run() -> Tensor:
        hidden = stack.forward(held, cache).hidden
        cache.rollback(cache.length - 1)
        return hidden

    replay, first = record(run), run()
    assert_close(replay(), first)
    cache.rollback(3)
    assert float((replay() - run()).abs().max()) > 1e-2 * float(first.abs().max())


# ---- what --compile does with them -----------------------------------------------------------------------------------


def test_a_base_gets_them_or_a_reason(tmp_path: Path) -> None:
    said: list[str] = []
    base = tiny_base("llama", tmp_path)
    speed._record_steps(base, "auto", said.append, record)
    assert base.steps is not None
    assert not said

    def broken(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand much more")

    def wrong(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: run() * 1.01

    for fault, message in ((broken, "operation not permitted"), (wrong, "states at layer 0 come out differently")):
        other = FrozenBase.from_model(base.model, None, "other")
        speed._record_steps(other, "auto", said.append, fault)
        assert other.steps is None
        assert message in said.pop()
        with pytest.raises(UserError, match="--compile is on, but steps of base 'other' are not recorded"):
            speed._record_steps(other, "on", said.append, fault)
    other.quantised = "int8"
    speed._record_steps(other, "auto", said.append, record)
    assert "its weights are rounded" in said.pop()
