"""Modules that a base ships: filled by name from a file, in either order, and nothing is skipped or guessed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mtp.base import FrozenBase
from mtp.config import HeadsOptions, Order
from mtp.errors import UserError
from mtp.heads import SequentialHeads
from mtp.initialise import new_heads
from mtp.shipped import from_shipped
from tests.mtp.heads_toys import D, K, V, toy_heads
from tests.tiny import tiny_base

DEEPSEEK = {"embed_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
MIMO = {
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "norm": "final_layernorm",
}
LAYER = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn"}


def sequential(order: Order = "embed_hidden", seed: int = 0) -> SequentialHeads:
    heads = toy_heads("sequential", seed=seed, concat_order=order)
    assert isinstance(heads, SequentialHeads)
    return heads


def shipped(heads: SequentialHeads, path: Path, prefix: str, first: int, names: dict[str, str]) -> dict[str, Tensor]:
    """The heads' weights as a base's checkpoint holds them, through a file."""
    tensors = {}
    for name, tensor in heads.state_dict().items():
        _, depth, part, *rest = name.split(".")
        place = [names[part]] if part != "block" else [LAYER.get(rest[0], rest[0]), *rest[1:-1]]
        tensors[".".join([prefix, str(first + int(depth)), *place, rest[-1]])] = tensor
    save_file(tensors, path)
    return load_file(path)


@pytest.mark.parametrize(("prefix", "first", "names"), [("model.layers", 61, DEEPSEEK), ("model.mtp_layers", 0, MIMO)])
@pytest.mark.parametrize("order", ["embed_hidden", "hidden_embed"])
def test_shipped_modules_compute_the_same(
    prefix: str, first: int, names: dict[str, str], order: Order, tmp_path: Path
) -> None:
    source, heads = sequential(), sequential(order, seed=1)
    from_shipped(heads, shipped(source, tmp_path / "base.safetensors", prefix, first, names), "embed_hidden")
    heads.bind(source._embedding, source._output_rows)  # type: ignore[arg-type]
    features, tokens = torch.randn(1, 6, D, dtype=torch.float64), torch.randint(0, V, (1, 6 + K))
    assert (heads(features, tokens) - source(features, tokens)).abs().max() < 1e-9


def test_the_wrong_order_is_seen(tmp_path: Path) -> None:
    """The negative control of the test above."""
    source, heads = sequential(), sequential(seed=1)
    from_shipped(heads, shipped(source, tmp_path / "base.safetensors", "model.layers", 61, DEEPSEEK), "hidden_embed")
    heads.bind(source._embedding, source._output_rows)  # type: ignore[arg-type]
    features, tokens = torch.randn(1, 6, D, dtype=torch.float64), torch.randint(0, V, (1, 6 + K))
    assert (heads(features, tokens) - source(features, tokens)).abs().max() > 0.1


def move(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[f"model.layers.{new}"] = tensors.pop(f"model.layers.{old}")


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("model.layers.62.hnorm.weight"), "nothing was given for depths.1.hidden_norm.weight"),
    "unknown": (lambda t: t.update({"model.norm.weight": torch.ones(D)}), "model.norm.weight is not known"),
    "experts": (
        lambda t: t.update({"model.layers.61.mlp.gate.weight": torch.ones(D)}),
        "61.mlp.gate.weight is not known",
    ),
    "an embedding": (lambda t: t.update({"model.layers.61.embed_tokens.weight": torch.ones(V, D)}), "without copies"),
    "other shape": (lambda t: move(t, "61.enorm.weight", "61.eh_proj.weight"), r"eh_proj.weight is \(32,\)"),
    "two for one": (
        lambda t: t.update({"model.layers.61.final_layernorm.weight": torch.ones(D)}),
        "two tensors are for the same place",
    ),
    "one module too many": (lambda t: t.update({"model.layers.64.enorm.weight": torch.ones(D)}), "64.enorm.weight"),
    "a module too few": (
        lambda t: [t.pop(name) for name in list(t) if ".63." in name],
        r"\[61, 62\].*nothing was given for depths.2.norm.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_named_and_nothing_changes(damage: str, tmp_path: Path) -> None:
    harm, message = DAMAGE[damage]
    source, heads = sequential(), sequential(seed=1)
    tensors = shipped(source, tmp_path / "base.safetensors", "model.layers", 61, DEEPSEEK)
    harm(tensors)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    with pytest.raises(UserError, match=message):
        from_shipped(heads, tensors, "embed_hidden")
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


def with_modules(folder: Path, depths: int) -> tuple[FrozenBase, SequentialHeads]:
    """A tiny base whose folder also holds DeepSeek-style modules, and the heads they were made from."""
    base = tiny_base("llama", folder)
    source = new_heads(HeadsOptions(kind="sequential", draft_length=depths), base)
    assert isinstance(source, SequentialHeads)
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.3)
    home = Path(base.name)
    shipped(source, home / "modules.safetensors", "model.layers", base.num_layers, DEEPSEEK)
    extra = load_file(home / "modules.safetensors")
    extra[f"model.layers.{base.num_layers}.embed_tokens.weight"] = base.embedding.clone()
    save_file(extra, home / "modules.safetensors")
    return base, source


def test_a_base_with_modules_gives_heads_their_start(tmp_path: Path) -> None:
    base, source = with_modules(tmp_path, 2)
    heads = new_heads(HeadsOptions(kind="sequential", draft_length=2, init="shipped"), base)
    for name, tensor in source.state_dict().items():
        assert torch.equal(heads.state_dict()[name], tensor), name
    other = new_heads(HeadsOptions(kind="sequential", draft_length=2), base)
    assert not torch.equal(
        other.state_dict()["depths.0.projection.weight"], source.state_dict()["depths.0.projection.weight"]
    )


def test_modules_that_are_not_there_are_named(tmp_path: Path) -> None:
    base, _ = with_modules(tmp_path, 2)
    with pytest.raises(UserError, match="draft_length is 3 and .* ships 2 modules"):
        new_heads(HeadsOptions(kind="sequential", draft_length=3, init="shipped"), base)
    with pytest.raises(UserError, match="init is shipped, which recurrent heads cannot take"):
        HeadsOptions(kind="recurrent", init="shipped")
    base.name = "no-such-base"
    with pytest.raises(UserError, match="'no-such-base' has no safetensors of its own"):
        new_heads(HeadsOptions(kind="sequential", draft_length=2, init="shipped"), base)
