"""Heads on disk: `config.json`, `model.safetensors` and a card in one folder.

Knows: how to write the folder so that a reader never sees half of it, and how to read it strictly: unknown keys,
missing or extra tensors, wrong shapes, truncated or edited weights and a foreign draft vocabulary are all refused.
Refuses to know: the base itself, training and decoding.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mtp.card import make_card
from mtp.config import HeadsConfig
from mtp.errors import UserError
from mtp.heads import Heads, build_heads
from mtp.hub_access import USUAL, HubAccess
from mtp.share import CARD, CONFIG, DIGEST, WEIGHTS, fetch
from mtp.suggest import nearest
from mtp.vocab import vocab_hash

SETTINGS = "settings_sha256"  # of what config.json says besides; heads saved before there was one lack it
SHIPPED = Path(__file__).parent / "pretrained"  # heads that come with the package, a folder per base
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\S+)?")


def shipped_heads() -> list[str]:
    """Names of the heads that come with the package."""
    return sorted(path.name for path in SHIPPED.glob("*") if (path / CONFIG).is_file())


def find_heads(
    name: str | Path,
    access: HubAccess = USUAL,
    revision: str | None = None,
    *,
    force_download: bool = False,
) -> Path:
    """The folder of heads: one that comes with the package by its name, any other by its path.

    A text `owner/name` or `owner/name@revision` that is no folder here is downloaded from the Hub; `revision` is
    another way to say which. UserError where the Hub does not give it.
    """
    if str(name) in shipped_heads():
        return SHIPPED / name
    path = Path(name)
    if not isinstance(name, str) or path.is_dir() or parked(path).is_dir() or not _ON_HUB.fullmatch(name):
        return path
    repo_id, _, at = name.partition("@")
    if at and revision not in (None, at):
        raise UserError(f"--heads {name} names the revision {at}, and revision is {revision}; give one of them.")
    return fetch(repo_id, revision or at or None, access, force_download=force_download)


def save_heads(heads: Heads, folder: Path, card: str = "", dtype: torch.dtype | None = None) -> Path:
    """Write the heads to `folder`, replacing what was there as a whole. `card` is Markdown for README.md; by default
    the one of the folder that the heads were loaded from, if they are still the same, or else a new one.

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
        document |= {SETTINGS: settings_hash(document), DIGEST: file_hash(build / WEIGHTS)}
        (build / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        text = card or _earlier_card(heads) or make_card(heads.config)
        (build / CARD).write_text(text, encoding="utf-8")
        replace_folder(build, folder)
    return folder


def write_card(folder: Path, card: str) -> None:
    """Another card for saved heads."""
    part = folder / f"{CARD}.part"
    part.write_text(card, encoding="utf-8")
    part.replace(folder / CARD)


def _earlier_card(heads: Heads) -> str:
    """The card of the folder that the heads came from; none where they are no longer what it describes."""
    folder = heads.loaded_from
    if folder is None or not (folder / CARD).is_file():
        return ""
    try:
        earlier = load_heads(folder)
    except UserError:
        return ""
    then, now = earlier.state_dict(), heads.state_dict()
    same = all(torch.equal(tensor, now[name].to(tensor)) for name, tensor in then.items() if name in now)
    return (folder / CARD).read_text(encoding="utf-8") if same and earlier.config == heads.config else ""


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
        raise UserError(
            f"--heads {folder} has no {WEIGHTS}, and no other file of weights is read; save the heads again or name "
            "another folder."
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{path} cannot be read ({error}); it is cut short or not safetensors, copy it again."
        ) from None
    if file_hash(path) != digest:
        raise UserError(
            f"{path} does not match the {DIGEST} in {CONFIG}; one of the two was edited or belongs to other "
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
    heads.loaded_from = folder
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
    if not isinstance(document, dict) or not isinstance(document.get(DIGEST), str):
        raise UserError(f"{path} lacks {DIGEST}; it was not written by mtp or was cut short. Copy it again.")
    return document, document.pop(DIGEST)


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
    """Fill the heads; every tensor must be there, none may be left over, and shapes and types must agree.

    Numbers with a fraction may be stored in any precision, and become the heads' own.
    """
    expected = heads.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not known" for name in tensors if name not in expected]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    problems += [
        f"{name} is of type {_type(tensors[name])} instead of {_type(tensor)}"
        for name, tensor in expected.items()
        if name in tensors and not _same_kind(tensors[name], tensor)
    ]
    if problems:
        raise UserError(f"{path} does not hold the heads that {CONFIG} describes: {'; '.join(problems[:5])}.")
    heads.load_state_dict(tensors)


def _same_kind(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if expected.is_floating_point():
        return found.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return found.dtype == expected.dtype


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
