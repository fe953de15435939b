"""Where a picture goes: a .png, whole or not at all.

Knows: which paths to refuse before anything is computed for them. Refuses to know what is drawn.
"""

import os
from pathlib import Path

from mtp.errors import UserError


def check_path(path: Path, option: str = "--out") -> None:
    """UserError, naming `option`, unless a .png can be written there."""
    if path.suffix.lower() != ".png" or path.is_dir():
        raise UserError(f"{option} is {path}; name a file that ends in .png.")
    if not path.parent.is_dir():
        raise UserError(f"{option} is {path}, but there is no folder {path.parent}; create it or choose another.")
    part = _part(path)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        told = f"{option} is {path}, but the folder {path.parent} cannot be written ({error.strerror})"
        raise UserError(f"{told}; choose another.") from error


def write(image: bytes, path: Path, option: str = "--out") -> None:
    """The whole file, or what was there before and a UserError."""
    try:
        put(image, path)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}); choose another place.") from error


def put(content: bytes, path: Path) -> None:
    """The whole file, or what was there before and an OSError."""
    part = _part(path)
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
