"""Writing a foreign folder: checked against our heads before it stands under its name, and then whole.

Knows: the order of the steps. Refuses to know: any one format, and where heads and base come from.

Shapes: T position, K draft position, V vocabulary.
"""

import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.embedded import EMBEDDED
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.interface import Content, Format, Lent, Reader
from mtp.formats.tensors import CARD, CONFIG
from mtp.heads import Heads
from mtp.hub import replace_folder, write_tensors
from mtp.last_block import some_tokens
from mtp.suggest import did_you_mean

_ANCHORS = 24
_TOLERANCE = 1e-3
_EMBEDDED_NOTE = """
`{base}` is a name that only `mtp` knows. Give other software the folder that it keeps the base in (`bases/{base}` in
`MTP_HOME`, by default `mtp` in the user's cache folder), and export with `--base` and that folder where the files are
to name it.
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compared: `worst` is the largest difference between logits, `scale` their size."""

    folder: Path
    size: int
    compared: int
    worst: float
    scale: float


def export(
    heads: Heads, base: FrozenBase, format_name: str, folder: Path, *, dtype: str = "float32", overwrite: bool = False
) -> Exported:
    """Write `heads`, which belong to `base`, to `folder` in a format; all or nothing.

    dtype: of the floating tensors in the file. Before the folder gets its name it is read again by the format's own
    reader, whose logits must be those of the heads (rounded to `dtype`). UserError on an unknown format, heads that it
    cannot express, a folder that exists (unless `overwrite`), and logits that differ.
    """
    chosen = find_format(format_name)
    check_dtype(dtype)
    check_free(folder, overwrite)
    if told := chosen.fault(heads, base):
        raise UserError(f"--format {format_name} {told}; formats that can hold these heads: {_able(heads, base)}.")
    lent = Lent(base.embedding.cpu().float(), base.output_matrix.cpu().to(DTYPES[dtype]).float())
    rounded = _rounded(heads, lent, DTYPES[dtype])
    folder = folder.resolve()  # a link stays one, and . has a name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        build = Path(scratch) / folder.name
        write(chosen.content(heads, base), build, DTYPES[dtype])
        card = describe(chosen, heads, base, folder)
        (build / CARD).write_text(card, encoding="utf-8")
        compared, worst, scale = compare(chosen.read(build), rounded, base, lent)
        size = sum(file.stat().st_size for file in build.rglob("*") if file.is_file())
        replace_folder(build, folder)
    return Exported(folder, size, compared, worst, scale)


def find_format(name: str) -> Format:
    """The format of that name, or a UserError."""
    if name not in FORMATS:
        raise UserError(f"--format is {name!r}; {did_you_mean(name, FORMATS)}")
    return FORMATS[name]


def check_dtype(dtype: str) -> None:
    """UserError unless files can be written in it."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; {did_you_mean(dtype, DTYPES)}")


def check_free(folder: Path, overwrite: bool) -> None:
    """UserError where something stands at `folder` that was not given up."""
    if folder.exists() and not overwrite:
        raise UserError(f"--output is {folder}, which exists; choose another folder, or replace it with --overwrite.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output is {folder}, which is a file; name a folder.")


def _able(heads: Heads, base: FrozenBase) -> str:
    return ", ".join(name for name, one in FORMATS.items() if one.fault(heads, base) is None) or "none"


def write(content: Content, folder: Path, dtype: torch.dtype) -> None:
    """The new folder `folder` with config, weights (floating ones in `dtype`) and texts."""
    folder.mkdir()
    config = dict(content.config)
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")  # two names, by the reader's age
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Cloned, as some tensors share their storage, which safetensors refuses.
    tensors = {name: _stored(tensor, dtype) for name, tensor in content.tensors.items()}
    write_tensors(tensors, folder / content.weights)
    for name, text in content.texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _rounded(heads: Heads, lent: Lent, dtype: torch.dtype) -> Heads:
    """A copy of the heads on the CPU in float32, with the numbers that the file will hold."""
    return copy.deepcopy(heads).cpu().to(dtype).float().bind(lent.embedding, lent.output_matrix)


@torch.no_grad()
def compare(reader: Reader, heads: Heads, base: FrozenBase, lent: Lent) -> tuple[int, float, float]:
    """How many logits were compared on real features, the largest difference, and the usual size of a logit.

    Heads in float32 on the CPU, bound to what is lent. UserError where they differ by more than rounding.
    """
    k = heads.config.draft_length
    count = min(_ANCHORS, base.context_length - k - 1)
    text = some_tokens(base, count + k)
    output = base.forward(text[:, :count], feature_layers=heads.config.feature_layers)
    features, tokens, drafts = output.features.float().cpu(), text[:, 1 : count + 1].cpu(), text[0, count + 1 :].cpu()
    ours = _ours(heads, features, tokens, drafts)
    theirs = reader.logits(features[0], tokens[0], drafts, lent)
    return _difference(ours, theirs)


def _difference(ours: Tensor, theirs: Tensor) -> tuple[int, float, float]:
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        raise UserError(
            f"the folder proposes from other tokens than the heads (logits {list(theirs.shape)}, heads "
            f"{list(ours.shape)}); nothing was kept. This is a fault of the conversion: please report it."
        )
    can = ours.isfinite()
    scale, worst = float(ours[can].abs().mean()), float((ours - theirs)[can].abs().max())
    if not worst <= _TOLERANCE * max(scale, 1.0):
        raise UserError(
            f"the folder gives other logits than the heads (they differ by {worst:.3g}, where logits are "
            f"{scale:.3g} on average); nothing was kept. This is a fault of the conversion: please report it."
        )
    return int(can.sum()), worst, scale


def _ours(heads: Heads, features: Tensor, tokens: Tensor, drafts: Tensor) -> Tensor:
    """Logits [K,V] by the decoding road of our heads: features [1,T,F], tokens [1,T], drafts [K-1]."""
    state = heads.new_state(1)
    heads.ingest(state, features, tokens)
    previous = [tokens[0, -1:], *drafts[:, None]]
    found = torch.cat([heads.draft(state, k, token) for k, token in enumerate(previous, start=1)])
    if heads.draft_ids is None:
        return found
    spread = found.new_full((len(found), heads.config.vocab_size), -torch.inf)
    spread[:, heads.draft_ids] = found
    return spread


def describe(chosen: Format, heads: Heads, base: FrozenBase, folder: Path) -> str:
    """The folder's README.md."""
    config = heads.config
    usage = chosen.usage.format(folder=folder, base=base.name, k=config.draft_length, k_and_one=config.draft_length + 1)
    return f"""---
base_model: {base.name}
tags: [speculative-decoding, multi-token-prediction]
---
# {config.kind} heads for {base.name}, in the layout `{chosen.name}`

Written by `mtp-decode export` for {chosen.written_for}. Other versions may read it otherwise.

| | |
| --- | --- |
| base | `{base.name}`, revision `{config.base.revision or "-"}`, fingerprint `{config.base.fingerprint or "-"}` |
| draft tokens per step, at most | {config.draft_length} |
| draft vocabulary | {config.proposals:,} of {config.vocab_size:,} tokens |
| feature layers (input of layer i) | {", ".join(map(str, config.feature_layers))} |

When the folder was written it was read again and gave the logits of the heads it was made from.

{usage}
{_EMBEDDED_NOTE.format(base=base.name) if base.name in EMBEDDED else ""}"""
