"""Medusa folders, in vLLM's layout and in that of the original repository, read strictly and run.

Knows: which tensors `config.json` calls for, and what vLLM and the original code compute with them. Refuses to know:
how the folders are written (`mtp.formats.medusa`), and our own heads.

Shapes: T position, K draft position, n residual layers, D hidden, F features (= D), V vocabulary, Vt truncated
vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp.errors import UserError
from mtp.formats.interface import Lent
from mtp.formats.tensors import CONFIG, WEIGHTS, Expected, check_tensors, read_document, read_tensors, whole_number

ORIGINAL_WEIGHTS = "medusa_lm_head.safetensors"
_LAYER = "of a residual layer"
_MOST = 64  # heads, and layers of a head: beyond what anybody trains, and little to check tensors for


@dataclass(frozen=True)
class MedusaReader:
    """Residual layers (weight [D,D], bias [D]) per head, an output matrix [Vt,D] per head, and base ids [Vt]."""

    heads: list[list[tuple[Tensor, Tensor]]]
    outputs: list[Tensor]
    token_map: Tensor | None
    vocab_size: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the output matrices in the file."""
        return self.outputs[0].dtype

    def logits(self, features: Tensor, tokens: Tensor, drafts: Tensor, lent: Lent) -> Tensor:
        """See `mtp.formats.interface.Reader`. Medusa looks at the last anchor only, and at no token."""
        rows = []
        for layers, output in zip(self.heads, self.outputs, strict=True):
            hidden = features[-1]
            for weight, bias in layers:
                hidden = hidden + F.silu(F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype)))
            rows.append(F.linear(hidden, output.to(hidden.dtype)))
        found = torch.stack(rows)
        if self.token_map is None:
            return found
        spread = found.new_full((len(rows), self.vocab_size), -torch.inf)
        spread[:, self.token_map] = found
        return spread


def read_vllm(folder: Path, option: str = "--input") -> MedusaReader:
    """A folder in vLLM's layout, with one output matrix for all heads or for each. UserError on anything not whole."""
    document, where = read_document(folder, option), str(folder / CONFIG)
    heads, layers, size, vocab = _sizes(document, ("num_heads", "num_hidden_layers"), where)
    truncated = whole_number(document, "truncated_vocab_size", where, 2)
    _require(document, {"medusa_fc_bias": True, "model_type": "medusa"}, where)
    outputs = 1 if document.get("original_lm_head") is True else heads
    if truncated > vocab:
        raise UserError(f"{where}: truncated_vocab_size is {truncated}, more than vocab_size {vocab}; correct one.")
    purpose = "output matrix of all heads" if outputs == 1 else "output matrix of a head"
    expected = {f"lm_heads.{head}.weight": Expected((truncated, size), purpose) for head in range(outputs)}
    if truncated < vocab:
        expected["token_map"] = Expected((truncated,), "base ids of the truncated vocabulary", torch.int64)
    for head in range(heads):
        for layer in range(layers):
            expected |= _layer(f"blocks.{head}.layers.{layer}", size)
    tensors = read_tensors(folder / WEIGHTS)
    check_tensors(tensors, expected, str(folder / WEIGHTS))
    token_map = tensors.get("token_map")
    if token_map is not None:
        check_ids(token_map, vocab, "token_map", str(folder / WEIGHTS))
    residual = [[_pair(tensors, f"blocks.{head}.layers.{layer}") for layer in range(layers)] for head in range(heads)]
    matrices = [tensors[f"lm_heads.{head % outputs}.weight"] for head in range(heads)]
    return MedusaReader(residual, matrices, token_map, vocab)


def read_original(folder: Path, option: str = "--input") -> MedusaReader:
    """A folder in the original repository's layout. UserError on anything not whole.

    `hidden_size` and `vocab_size` are not always in its config; the first head's output matrix then says them.
    """
    document, where = read_document(folder, option), str(folder / CONFIG)
    heads = whole_number(document, "medusa_num_heads", where, most=_MOST)
    layers = whole_number(document, "medusa_num_layers", where, most=_MOST)
    tensors = read_tensors(folder / ORIGINAL_WEIGHTS)
    first = tensors.get(f"0.{layers}.weight")
    vocab, size = tuple(first.shape) if first is not None and first.dim() == 2 else (0, 0)
    vocab, size = document.get("vocab_size", vocab), document.get("hidden_size", size)
    expected = {}
    for head in range(heads):
        expected[f"{head}.{layers}.weight"] = Expected((vocab, size), "output matrix of a head")
        for layer in range(layers):
            expected |= _layer(f"{head}.{layer}.linear", size)
    check_tensors(tensors, expected, str(folder / ORIGINAL_WEIGHTS))
    residual = [[_pair(tensors, f"{head}.{layer}.linear") for layer in range(layers)] for head in range(heads)]
    return MedusaReader(residual, [tensors[f"{head}.{layers}.weight"] for head in range(heads)], None, vocab)


def check_ids(ids: Tensor, vocab: int, name: str, where: str) -> None:
    """UserError unless base ids [Vt] are different ones of a vocabulary of `vocab`."""
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        raise UserError(
            f"{where}: {name} leads to id {int(outside[0])}, outside the base's 0…{vocab - 1}; it belongs to another "
            "vocabulary or holds ids where offsets are expected (or the reverse): write the folder again."
        )
    if len(set(ids.tolist())) < len(ids):
        raise UserError(f"{where}: {name} leads to the same base id twice; write the folder again.")


def _sizes(document: Mapping[str, Any], names: tuple[str, str], where: str) -> tuple[int, int, int, int]:
    heads, layers = (whole_number(document, name, where, most=_MOST) for name in names)
    size, vocab = (whole_number(document, name, where) for name in ("hidden_size", "vocab_size"))
    return heads, layers, size, vocab


def _require(document: Mapping[str, Any], needed: Mapping[str, Any], where: str) -> None:
    for key, value in needed.items():
        if document.get(key) != value:
            raise UserError(
                f"{where}: {key} is {document.get(key)!r}; only {value!r} is read here: write the folder again."
            )


def _layer(name: str, size: int) -> dict[str, Expected]:
    return {
        f"{name}.weight": Expected((size, size), f"matrix {_LAYER}"),
        f"{name}.bias": Expected((size,), f"bias {_LAYER}"),
    }


def _pair(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]
