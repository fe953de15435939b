"""Reads what an offline wandb run wrote: a LevelDB log (32 KiB blocks) of protobuf records behind a 7-byte header.

wandb no longer ships a reader in Python, and the point of the test is to read the file rather than a mock.
"""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def raw_records(data: bytes) -> Iterator[bytes]:
    """The payloads, joined where they cross blocks."""
    assert data[:4] == b":W&B"
    place, parts = HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        if kind not in (FULL, FIRST, MIDDLE, LAST):
            return
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def records(path: Path, seconds: float = 15.0) -> list[wandb_internal_pb2.Record]:
    """All records of a `.wandb` file, in order. wandb may close it a moment after the run has finished; this waits for
    its last record, the exit."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for data in raw_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
        if time.monotonic() > end or any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)


def history(path: Path) -> list[dict[str, Any]]:
    """Every logged row of a `.wandb` file, in order."""
    rows = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in rows]


def logged(path: Path) -> set[str]:
    """Names under which anything was logged; a table, a page or a histogram counts under its own name."""
    rows = history(path)
    media = {key.rsplit("/", 1)[0] for row in rows for key in row if key.endswith("/_type")}
    inside = tuple(f"{name}/" for name in media)
    return media | {key for row in rows for key in row if not key.startswith(inside)}
