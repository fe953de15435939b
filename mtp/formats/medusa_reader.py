"""Medusa folders, in vLLM's layout and in that of the original repository, read strictly and run.

Knows: which tensors `config.json` calls for, and what vLLM and the original code compute with them. Refuses to know:
how the folders are written (`mtp.formats.medusa`), and our own heads.

Two ways to say a draft vocabulary are read: `token_map` with so many output rows, and whole output matrices in which
all rows outside are one and the same, the mean of the others (see `mtp.formats.medusa`).

Shapes: T position, K draft position, n residual layers, D hidden, F features (= D), V vocabulary, Vt truncated
vocabulary (= V without `token_map`), Vd draft vocabulary.
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
OUTSIDE = "outside_draft_vocabulary"
"""The key of an id whose output row is that of every token outside the draft vocabulary."""
_LAYER = "of a residual layer"
_MOST = 64  # heads, and layers of a head: beyond what anybody trains, and little to check tensors for


@dataclass(frozen=True)
class MedusaReader:
    """Residual layers (weight [D,D], bias [D]) per head, output rows [Vd,D] per head, and the base ids [Vd] of them."""

    heads: list[list[tuple[Tensor, Tensor]]]
    outputs: list[Tensor]
    draft_ids: Tensor | None
    vocab_size: int
    others: list[Tensor] | None = None
    """[D] per head: the row of all tokens outside the draft vocabulary, where the software computes their logits."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the output matrices in the file."""
        return self.outputs[0].dtype

    def logits(self, features: Tensor, tokens: Tensor, drafts: Tensor, lent: Lent) -> Tensor:
        """See `mtp.formats.interface.Reader`. Medusa looks at the last anchor only, and at no token.

        UserError where a token outside the draft vocabulary would be drafted.
        """
        rows = []
        for head, (layers, output) in enumerate(zip(self.heads, self.outputs, strict=True)):
            hidden = features[-1]
            for weight, bias in layers:
                hidden = hidden + F.silu(F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype)))
            rows.append(F.linear(hidden, output.to(hidden.dtype)))
            if self.others is not None and hidden @ self.others[head].to(hidden.dtype) >= rows[-1].max():
                raise UserError(f"{OUTSIDE}: head {head} would draft a token outside; write the folder again.")
        found = torch.stack(rows)
        if self.draft_ids is None:
            return found
        spread = found.new_full((len(rows), self.vocab_size), -torch.inf)
        spread[:, self.draft_ids] = found
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
    residual = [[_pair(tensors, f"blocks.{head}.layers.{layer}") for layer in range(layers)] for head in range(heads)]
    matrices = [tensors[f"lm_heads.{head}.weight"] for head in range(outputs)]
    draft_ids, others = tensors.get("token_map"), None
    if draft_ids is not None:
        check_ids(draft_ids, vocab, "token_map", str(folder / WEIGHTS))
    if OUTSIDE in document:
        if truncated < vocab:
            raise UserError(
                f"{where}: {OUTSIDE} is for whole output matrices, and truncated_vocab_size is {truncated}."
            )
        like = whole_number(document, OUTSIDE, where, 0, vocab - 1)
        draft_ids = _inside(matrices, like, str(folder / WEIGHTS))
        others = [matrix[like] for matrix in matrices] * (heads // outputs)
        matrices = [matrix[draft_ids] for matrix in matrices]
    return MedusaReader(residual, matrices * (heads // outputs), draft_ids, vocab, others)


def _inside(matrices: list[Tensor], like: int, where: str) -> Tensor:
    """Base ids [Vd] of the rows of output matrices [V,D] that are not that of `like`, in all of them.

    UserError unless that row is the mean of these: a token that has it is then never the likeliest.
    """
    inside = (matrices[0] != matrices[0][like]).any(dim=-1)
    for head, matrix in enumerate(matrices):
        if not torch.equal((matrix != matrix[like]).any(dim=-1), inside) or not inside.any():
            raise UserError(f"{where}: lm_heads.{head}.weight has other rows like row {like}; write the folder again.")
        rows = matrix[inside].float()
        # Rounding to bfloat16 moves the mean, and the mean of what was rounded, by 2^-9 of the size of the rows each.
        if ((matrix[like].float() - rows.mean(dim=0)).abs() > 2**-8 * rows.abs().mean(dim=0) + 1e-6).any():
            raise UserError(
                f"{where}: row {like} of lm_heads.{head}.weight is not the mean of the rows of the draft vocabulary, "
                "so tokens outside could be drafted; write the folder again."
            )
    return inside.nonzero()[:, 0]


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
