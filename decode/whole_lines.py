"""A JSONL file that grows while it is of use: whole lines only, and the same job continues it after any end.

Knows: how to mend a torn last line, and the settings beside the file, which must be those of what is in it. Refuses to
know what the lines hold.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from decode.report import spelt
from mtp.errors import UserError

_BLOCK = 65536


class WholeLines:
    """Use as a context manager. UserError if another process writes the file, or if it was begun with other settings.

    `settings` are kept in `<name>.meta.json`. Of a setting that has a `name`, only the rest must be the same: what is
    called otherwise now may be what it was.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], option: str) -> None:
        self.path, self._option = path, f"{option} {path}"
        self.meta = path.with_name(f"{path.name}.meta.json")
        self.fingerprint = fingerprint(settings)
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self._option} is being written by another process; wait for it, or name a new file."
            ) from None
        try:
            drop_torn_line(path)
            self._agree(settings)
            self._file = path.open("ab", buffering=0)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "WholeLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.release()

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and content of what is there; UserError on a line that is no object of JSON."""
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    raise UserError(f"{self._option}, line {number} is no JSON object; delete it, or name a new file.")
                yield number, record

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line, and returns when it is on the disk."""
        try:
            data = f"{json.dumps(spelt(record), ensure_ascii=False, allow_nan=False)}\n".encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
            data = f"{json.dumps(spelt(record), allow_nan=False)}\n".encode()
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(
                f"{self._option} cannot be written ({error.strerror}); make room and run the same command again: what "
                "was written is kept."
            ) from error

    def _agree(self, settings: Mapping[str, Any]) -> None:
        """Settings are compared if there are lines, and kept otherwise, before the first of them is written."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            part = self.meta.with_name(self.meta.name + ".part")
            part.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            part.replace(self.meta)
            return
        try:
            before = json.loads(self.meta.read_text(encoding="utf-8"))
            assert isinstance(before, dict)
        except (OSError, ValueError, AssertionError):
            told = f"{self._option} exists, and what it was made with ({self.meta.name}) is not beside it"
            raise UserError(f"{told}; name a new file, or delete it.") from None
        changed = difference(before, settings)
        if changed is not None:
            raise UserError(
                f"{self._option} was begun with {changed}; use the same settings to continue it, or name a new file."
            )


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first setting that is another one, as in "temperature 0.7, and now it is 1.0"; None if none is."""
    for key in dict.fromkeys([*now, *before]):
        old, new = before.get(key), now.get(key)
        if _bare(old) != _bare(json.loads(json.dumps(new))):
            return f"{key.replace('_', ' ')} {_shown(old)}, and now it is {_shown(new)}"
    return None


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that say whether two lines were made with the same settings."""
    bare = {key: _bare(value) for key, value in settings.items()}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()[:16]


def _bare(value: Any) -> Any:
    return {key: item for key, item in value.items() if key != "name"} if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "name" in value:
        return f"{value['name']} ({', '.join(str(item) for item in _bare(value).values())})"
    return "nothing" if value is None else str(value)


def drop_torn_line(path: Path) -> None:
    """Cuts the file behind its last end of line; looks from the end, as a line is short and a file may be long."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start if found < 0 else start + found + 1
            if found >= 0:
                break
        if end < size:
            file.truncate(end)
