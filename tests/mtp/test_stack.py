"""A stack of our own blocks gives the base's states, and no base gets one that does not."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.slots import SlotCache
from mtp import last_block
from mtp.base import FrozenBase, Steps
from mtp.cache import BaseCache
from mtp.kernels import Kernels
from mtp.last_block import Unreadable
from mtp.stack import Stack
from mtp.tree_mask import TreeMask
from tests.mtp.test_last_block import base_like
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_base

READABLE = ("llama", "qwen2", "qwen3", "phi3", "gpt_neox")
LAYERS = (0, 2, 4)


def tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize("family", READABLE)
@pytest.mark.parametrize("with_kernels", [False, True])
def test_states_over_steps_and_rollbacks(family: str, with_kernels: bool, tmp_path: Path, kernels: Kernels) -> None:
    """Blocks of random lengths, some taken back, up to beyond the first size of the cache's buffers."""
    base = tiny_base(family, tmp_path)
    ours, _, _ = follow(base, Stack.of(base, kernels if with_kernels else None).forward)
    assert ours.length > 140


def follow(base: FrozenBase, forward: Steps) -> tuple[BaseCache, BaseCache, int]:
    """Compare with the base over blocks of random lengths, some taken back; both caches then, and how many blocks."""
    ours, theirs, draw = base.new_cache(), base.new_cache(), random.Random(0)
    base.forward(tokens(1, 20), cache=ours)
    base.forward(tokens(1, 20), cache=theirs)
    for step in range(60):
        block = tokens(step, draw.randint(1, 9))
        if ours.length + block.shape[1] > CONTEXT:
            break
        found = forward(block, ours, LAYERS, None)
        wanted = base.forward(block, cache=theirs, feature_layers=LAYERS)
        assert_close(found.features, wanted.features)
        assert_close(found.hidden, wanted.hidden)
        length = ours.length - draw.randint(0, block.shape[1] - 1)
        ours.rollback(length)
        theirs.rollback(length)
    return ours, theirs, step


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_trees(family: str, tmp_path: Path) -> None:
    base = tiny_base(family, tmp_path)
    stack = Stack.of(base)
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    tree = TreeMask(visible, torch.tensor([0, 1, 1, 2]))
    ours, theirs = base.new_cache(), base.new_cache()
    for cache in (ours, theirs):
        base.forward(tokens(1, 7), cache=cache)
    found = stack.forward(tokens(2, 4), ours, tree=tree).hidden
    assert_close(found, base.forward(tokens(2, 4), cache=theirs, tree=tree).hidden)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_token_of_each_of_several_texts(family: str, tmp_path: Path, kernels: Kernels) -> None:
    base = tiny_base(family, tmp_path)
    stack, cache, lengths = Stack.of(base, kernels), SlotCache(base.new_cache(), 4), (5, 40, 17)
    texts = [tokens(number, length + 3)[0] for number, length in enumerate(lengths)]
    for text, length in zip(texts, lengths, strict=True):
        read = base.new_cache()
        base.forward(text[None, :length], cache=read)
        cache.take(read, [length])
    for step in range(3):
        following = torch.stack([text[length + step] for text, length in zip(texts, lengths, strict=True)])
        found = stack.several(following, cache.past()).hidden
        cache.advance(1)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            assert_close(found[row], base.forward(text[None, : length + step + 1]).hidden[0, -1])


def test_weights_are_shared(tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    stack = Stack.of(base)
    own = {parameter.data_ptr() for parameter in base.model.parameters()}
    assert all(
        parameter.data_ptr() in own for block in stack.blocks for parameter in block.parameters() if parameter.ndim == 2
    )


@pytest.mark.parametrize(
    ("family", "why"),
    [("mistral", "a window only"), ("gemma3", "a window only"), ("gpt2", "come out differently|something else")],
)
def test_refused(family: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=why):
        Stack.of(tiny_base(family, tmp_path))


def test_a_rotation_that_changes_with_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(Unreadable, match="of type dynamic"):
        Stack.of(base_like("llama", rope_parameters=rope))


def test_a_layer_that_is_unlike_the_last_one_is_seen(tmp_path: Path) -> None:
    """As in families where some layers have no rotary positions, or another scale."""
    base = tiny_base("llama", tmp_path)
    attention: Any = base.layers[1].self_attn
    attention.scaling *= 1.5
    with pytest.raises(Unreadable, match="states at layer 2 come out differently"):
        Stack.of(base)


def test_the_base_takes_its_steps_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("llama", tmp_path)
    asked: list[int] = []
    forward = Stack.of(base).forward

    def spy(block: torch.Tensor, *rest: Any) -> Any:
        asked.append(block.shape[1])
        return forward(block, *rest)

    base.steps = spy
    cache = base.new_cache()
    base.forward(tokens(0, 40), cache=cache)  # long
    base.forward(tokens(0, 3))  # without a cache
    base.forward(torch.cat([tokens(0, 3)] * 2), cache=base.new_cache())  # two texts
    assert not asked
    base.forward(tokens(0, 3), cache=cache)
    assert asked == [3]


def test_candidates_for_all_layers_are_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused matrix is understood in the way that was found right for the last layer."""
    base = base_like("gpt_neox")
    assert len(last_block.share_blocks(base)) == base.num_layers
    monkeypatch.setattr(FrozenBase, "layers", property(lambda self: torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 4)))
    with pytest.raises(Unreadable):
        last_block.share_blocks(base)
