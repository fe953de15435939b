"""Where an export may go: nothing is replaced but an earlier one, and nothing that is read.

Knows: the names of all files that exports write, and what killed ones leave beside their output. Refuses to know: what
the files hold.
"""

import glob
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from mtp.errors import UserError
from mtp.formats.custom_generate import CODE_FILES
from mtp.formats.medusa_reader import ORIGINAL_WEIGHTS
from mtp.formats.tensors import CARD, CONFIG, RECORD, WEIGHTS
from mtp.hub import parked

_WRITTEN = {CONFIG, CARD, RECORD, WEIGHTS, ORIGINAL_WEIGHTS, *CODE_FILES}
"""All files that any format writes."""
_DAY = 86400.0


def is_export(folder: Path) -> bool:
    """Whether a folder holds nothing but what export writes, and says so itself; or nothing at all."""
    return is_written(folder, _WRITTEN, RECORD, "record_version", int)


def is_written(folder: Path, names: Set[str], document: str, key: str, kind: type) -> bool:
    """Whether a folder holds no other files than `names`, and in the JSON of one a `key` of that kind by which its
    writer is known; or nothing at all."""
    found = files_in(folder)
    try:
        known = isinstance(json.loads((folder / document).read_text(encoding="utf-8"))[key], kind)
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    return not found or (known and found <= names)


def files_in(folder: Path) -> set[str]:
    """Paths in a folder of all that is not itself a folder."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found}


def check_free(
    folder: Path,
    overwrite: bool,
    sources: Iterable[tuple[str, Path | None]] = (),
    ours: Callable[[Path], bool] = is_export,
    writer: str = "export",
) -> None:
    """UserError where something stands at `folder` that was not given up, or that `writer` did not write (`ours`).

    sources: what is read, by its option. The output must not be one of these folders, nor hold it, nor lie in it.
    """
    for option, path in sources:
        if path is None or not path.is_dir():
            continue
        place, source = folder.resolve(), path.resolve()
        if place == source or place in source.parents or source in place.parents:
            raise UserError(f"--output is {folder}, which is, holds or lies in {option} {path}; choose another folder.")
    if folder.exists() and not overwrite:
        raise UserError(f"--output is {folder}, which exists; choose another folder, or replace it with --overwrite.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output is {folder}, which is a file; name a folder.")
    if folder.exists() and not ours(folder):
        raise UserError(
            f"--output is {folder}, which holds other things than what {writer} writes; --overwrite replaces an "
            f"earlier {writer} and nothing else: choose another folder, or remove this one yourself."
        )


def clear_up(folder: Path) -> None:
    """Remove what exports to `folder` left beside it that were killed a day ago or earlier."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        made_here = re.fullmatch(r"[a-z0-9_]{8}", path.name.removeprefix(f".{folder.name}.")) and path != parked(folder)
        if not made_here or path.is_symlink() or not path.is_dir() or time.time() - path.stat().st_mtime < _DAY:
            continue
        if [inner.name for inner in path.iterdir()] == [folder.name] and files_in(path / folder.name) <= _WRITTEN:
            shutil.rmtree(path, ignore_errors=True)
