"""Heads on disk: `config.json`, `model.safetensors` and a card in one folder.

Knows: how to write the folder so that a reader never sees half of it, and how to read it strictly: unknown keys,
missing or extra tensors, wrong shapes, truncated or edited weights and a foreign draft vocabulary are all refused.
Refuses to know: the base itself, training and decoding.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mtp.config import HeadsConfig
from mtp.errors import UserError
from mtp.heads import Heads, build_heads
from mtp.suggest import nearest
from mtp.vocab import vocab_hash

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
SETTINGS = "settings_sha256"  # of what config.json says besides; heads saved before there was one lack it
SHIPPED = Path(__file__).parent / "pretrained"  # heads that come with the package, a folder per base


def shipped_heads() -> list[str]:
    """Names of the heads that come with the package."""
    return sorted(path.name for path in SHIPPED.glob("*") if (path / CONFIG).is_file())


def find_heads(name: str | Path) -> Path:
    """The folder of heads: one that comes with the package by its name, any other by its path."""
    return SHIPPED / name if str(name) in shipped_heads() else Path(name)


def save_heads(heads: Heads, folder: Path, card: str = "", dtype: torch.dtype | None = None) -> Path:
    """Write the heads to `folder`, replacing what was there as a whole. `card` is Markdown for README.md.

    `dtype`: of the weights in the file, None as they are. bfloat16 halves it; reading brings them back to float32.
    """
    folder = folder.resolve()  # a link stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        build = Path(scratch) / "heads"
        build.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        write_tensors(tensors, build / WEIGHTS)
        document = heads.config.to_json()
        document |= {SETTINGS: settings_hash(document), "weights_sha256": file_hash(build / WEIGHTS)}
        (build / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        (build / CARD).write_text(card or _card(heads.config), encoding="utf-8")
        replace_folder(build, folder)
    return folder


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`. The old one stays readable (`parked`) until the new one stands."""
    for file in (path for path in new.rglob("*") if path.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    old = parked(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def parked(folder: Path) -> Path:
    """Where the folder stands while another takes its place: hidden, as no folder of a user's would be."""
    return folder.with_name(f".{folder.name}.replaced")


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file; OSError where it cannot be written."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written ({error})") from None


def read_config(folder: Path) -> HeadsConfig:
    """The config of saved heads, without their weights."""
    document, _ = _read_document(folder)
    document.pop(SETTINGS, None)
    return HeadsConfig.from_json(document, str(folder / CONFIG))


def load_heads(folder: Path) -> Heads:
    """The heads in `folder`, on the CPU, unbound (see `Heads.bind`). Raises UserError on anything not whole."""
    document, digest = _read_document(folder)
    settings = document.pop(SETTINGS, None)
    config = HeadsConfig.from_json(document, str(folder / CONFIG))
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"--heads {folder} has no {WEIGHTS}; save the heads again or name another folder.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{path} cannot be read ({error}); it is cut short or not safetensors, copy it again."
        ) from None
    if file_hash(path) != digest:
        raise UserError(
            f"{path} does not match the weights_sha256 in {CONFIG}; one of the two was edited or belongs to other "
            "heads. Copy the folder again as a whole."
        )
    heads = build_heads(config)
    _load_strictly(heads, tensors, path)
    if heads.draft_ids is not None and vocab_hash(heads.draft_ids) != config.draft_vocab_hash:
        raise UserError(f"{path}: its draft vocabulary is not the one of draft_vocab_hash in {CONFIG}; copy it again.")
    if settings is not None and settings != settings_hash(document):
        raise UserError(
            f"{folder / CONFIG} was edited: its {SETTINGS} is of other settings. Only base.name and base.revision may "
            "be changed; copy the file again, or train heads with the settings that you want."
        )
    return heads


def settings_hash(document: Mapping[str, Any]) -> str:
    """SHA-256 of a config.json, without where the base lies: tensors alone do not tell an edited draft length."""
    kept = {key: value for key, value in document.items() if key not in (SETTINGS, "weights_sha256")}
    if isinstance(kept.get("base"), Mapping):
        kept["base"] = {key: value for key, value in kept["base"].items() if key not in ("name", "revision")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _read_document(folder: Path) -> tuple[dict[str, Any], str]:
    """The parsed config.json without its digest, and the digest."""
    if not folder.is_dir():
        old = parked(folder)
        hint = f"a copy from before the last save is at {old}" if old.is_dir() else "train some with mtp-train"
        with_package = f" or heads that come with mtp ({', '.join(shipped_heads())})" if shipped_heads() else ""
        raise UserError(
            f"--heads {folder} is not a folder;{_meant(folder)} {hint}, or name a folder with {CONFIG} and {WEIGHTS}"
            f"{with_package}."
        )
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"--heads {folder} has no {CONFIG}; name a folder that mtp-train wrote: runs/<name>/heads.")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}); copy the folder again.") from None
    if not isinstance(document, dict) or not isinstance(document.get("weights_sha256"), str):
        raise UserError(f"{path} lacks weights_sha256; it was not written by mtp or was cut short. Copy it again.")
    return document, document.pop("weights_sha256")


def _meant(folder: Path) -> str:
    """The heads of the nearest name: those that come with the package, or another folder where this one is not."""
    if len(folder.parts) == 1:
        near = nearest(str(folder), shipped_heads())
        if near is not None:
            return f" did you mean {near}? Otherwise"
    first = next((path for path in (*reversed(folder.parents), folder) if not path.exists()), folder)
    try:
        there = [path.name for path in first.parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return ""
    near = nearest(first.name, there)
    whole = None if near is None else first.parent / near / folder.relative_to(first)
    return f" did you mean {whole}? Otherwise" if whole is not None and (whole / CONFIG).is_file() else ""


def _load_strictly(heads: Heads, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Fill the heads; every tensor must be there, none may be left over, and shapes must agree."""
    expected = heads.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not known" for name in tensors if name not in expected]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        raise UserError(f"{path} does not hold the heads that {CONFIG} describes: {'; '.join(problems[:5])}.")
    heads.load_state_dict(tensors)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _card(config: HeadsConfig) -> str:
    """A model card in the Hub's format."""
    vocabulary = f"{config.proposals:,} of {config.vocab_size:,} tokens"
    return f"""---
base_model: {config.base.name}
library_name: mtp-heads
tags: [speculative-decoding, multi-token-prediction]
---
# {config.kind} heads for {config.base.name}

Multi-token-prediction heads: the proxy q that proposes up to {config.draft_length} tokens per step for the frozen base
p. Decoding with them is lossless: rejection sampling keeps the output's distribution exactly the base's.

| | |
| --- | --- |
| base | `{config.base.name}`, revision `{config.base.revision or "-"}` |
| draft length K | {config.draft_length} |
| draft vocabulary | {vocabulary} |
| feature layers | {", ".join(map(str, config.feature_layers))} |

```
mtp-decode generate --heads <this folder> --prompt "Why is the sky blue?"
```
"""
