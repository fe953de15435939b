"""The file of answers while it grows: whole lines only, readable after a kill at any moment, continued by the next run.

Knows: JSONL whose lines hold `messages` and `index`, the settings beside it, and how to mend a torn last line.
Refuses to know: models and tokenizers.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from decode.whole_lines import drop_torn_line
from mtp.errors import UserError
from train.records import Message, read_jsonl

OTHER_FILE = "Give the name of a new file"


class AnswerFile:
    """`done` holds the indices of the prompts that are answered already. Use as a context manager.

    Opening it cuts off a last line without an end, which a killed run may leave. Raises UserError if the file was begun
    with other settings, or for other prompts, or by something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], prompts: Sequence[Sequence[Message]]) -> None:
        self.path = Path(path)
        self.meta = self.path.with_name(self.path.name + ".meta.json")
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            drop_torn_line(self.path)
            self._agree(settings)
            self.done = _done(self.path, prompts)
            self._file = self.path.open("ab", buffering=0)
        except Timeout:
            raise UserError(f"--out {path} is being written by another process; wait for it. {OTHER_FILE}.") from None
        except OSError as error:
            self._lock.release()
            raise UserError(f"--out {path} cannot be written ({error.strerror}). {OTHER_FILE} elsewhere.") from error
        except UserError:
            self._lock.release()
            raise

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds the rows as whole lines in one write, and returns when they are on the disk."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            remedy = "Make room and run the same command again; what was written is kept."
            raise UserError(f"--out {self.path} cannot be written ({error.strerror}). {remedy}") from error

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.release()

    def _agree(self, settings: Mapping[str, Any]) -> None:
        """Settings are compared if there are answers, and saved otherwise, before the first of them is written."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            _write_whole(self.meta, json.dumps(settings, indent=2) + "\n")
            return
        if not self.meta.exists():
            raise UserError(
                f"--out {self.path} exists and has no {self.meta.name} beside it. {OTHER_FILE}, or delete it."
            )
        try:
            before = json.loads(self.meta.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self.meta} is not JSON. {OTHER_FILE} for --out, or delete both.") from error
        for key, value in settings.items():
            if key != "base" and before.get(key) != value:  # a base may move; its fingerprint stays
                told = f"--out {self.path} was begun with {key} {before.get(key)}, and now {key} is {value}"
                raise UserError(f"{told}. Use the same settings, or give the name of a new file.")


def _done(path: Path, prompts: Sequence[Sequence[Message]]) -> set[int]:
    done: set[int] = set()
    if not path.exists():
        return done
    for where, row in read_jsonl(path):
        index, messages = row.get("index"), row.get("messages")
        if not isinstance(index, int) or not isinstance(messages, list):
            raise UserError(
                f"{where}: not an answer with index and messages. {OTHER_FILE} for --out, or delete the line."
            )
        if index < len(prompts):
            if messages[:-1] != list(prompts[index]):
                told = f"{where} answers another prompt than number {index + 1} of the prompts given"
                raise UserError(f"{told}. Give the prompts in their earlier order, or a new file for --out.")
            done.add(index)
    return done


def _write_whole(path: Path, text: str) -> None:
    """The file appears complete or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
