"""What a foreign folder must hold, and how it is told what is wrong with it.

Knows: JSON and safetensors files, and how to compare the tensors that are there with those that are expected, in both
directions. Refuses to know: any one format; a reader says what it expects.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mtp.errors import UserError

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
RECORD = "export.json"
"""What `mtp-decode export` notes of a folder, for people and for reading it again; no other software reads it."""
RECORD_VERSION = 1
_MOST_TOLD = 5
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Expected(NamedTuple):
    """One tensor: its shape, what it is for, its type (None is any floating one), and whether it may be left out."""

    shape: tuple[int, ...]
    purpose: str
    dtype: torch.dtype | None = None
    required: bool = True

    def __str__(self) -> str:
        kind = "float" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)}: {self.purpose}"


def read_document(folder: Path, option: str) -> dict[str, Any]:
    """The object in `folder`'s config.json. UserError, naming `option`, where there is none."""
    if not folder.is_dir():
        raise UserError(f"{option} is {folder}, which is not a folder; name one with {CONFIG} and safetensors.")
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{option} {folder} has no {CONFIG}; copy the folder again as a whole.")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}); copy the folder again.") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds {type(document).__name__}; an object with keys is needed: copy it again.")
    read_record(folder)
    return document


def read_record(folder: Path) -> dict[str, Any]:
    """What export noted of the folder; empty where others wrote it, who leave no record.

    UserError where a newer version wrote the folder, in a way that this one cannot know.
    """
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, writer = record["record_version"], record["versions"]["mtp"]
        record.get("base", {}).get("fingerprint")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not what export writes; copy the folder again, or remove that file.") from None
    if not isinstance(version, int) or version > RECORD_VERSION:
        raise UserError(
            f"{path}: record_version is {version}, and this version of mtp reads {RECORD_VERSION}; the folder was "
            f"written by mtp {writer}: update mtp, or export the heads again."
        )
    return record


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. UserError where it is missing or cannot be read."""
    if not path.is_file():
        pickles = sorted(file.name for file in path.parent.glob("*") if file.suffix in (".bin", ".pt", ".pth"))
        hint = f"; {pickles[0]} is a pickle, which is not read: convert it to safetensors first" if pickles else ""
        raise UserError(f"{path.parent} has no {path.name}{hint or '; copy the folder again as a whole'}.")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"{path} cannot be read ({error}); it is cut short or not safetensors, copy it again."
        ) from None
    return tensors


def whole_number(document: Mapping[str, Any], key: str, where: str, least: int = 1, most: int | None = None) -> int:
    """The key's value; UserError unless it is a whole number from `least` to `most`."""
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{where}: {key} is {value!r}; a whole number {limits} is needed: correct the file.")
    return value


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Expected], where: str) -> None:
    """UserError unless required ⊆ found ⊆ expected, with the shapes and types that are expected.

    Each problem is told with the tensor's name, what was found and what is expected.
    """
    problems = [f"{name} is missing, {one} is expected" for name, one in expected.items() if _lacks(found, name, one)]
    problems += [f"{name} {list(found[name].shape)} is not of this format" for name in found if name not in expected]
    for name in sorted(found.keys() & expected.keys()):
        tensor, one = found[name], expected[name]
        if tuple(tensor.shape) != one.shape or not _typed(tensor, one):
            kind = str(tensor.dtype).removeprefix("torch.")
            problems.append(f"{name} is {kind} {list(tensor.shape)}, {one} is expected")
    if problems:
        more = f"; and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
        raise UserError(
            f"{where} does not fit its {CONFIG}: {'; '.join(problems[:_MOST_TOLD])}{more}. Correct {CONFIG} if it is "
            "wrong, else write or copy the folder again."
        )


def _lacks(found: Mapping[str, Tensor], name: str, one: Expected) -> bool:
    return one.required and name not in found


def _typed(tensor: Tensor, one: Expected) -> bool:
    return tensor.dtype in _FLOATS if one.dtype is None else tensor.dtype == one.dtype
