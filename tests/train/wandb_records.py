"""Reads what an offline wandb run wrote: a LevelDB log (32 KiB blocks) of protobuf records behind a 7-byte header.

wandb no longer ships a reader in Python, and the point of the test is to read the file rather than a mock.
"""

import json
import struct
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


def history(path: Path) -> list[dict[str, Any]]:
    """Every logged row of a `.wandb` file, in order."""
    rows = []
    for data in raw_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def logged(path: Path) -> set[str]:
    """Names under which anything was logged; a table, a page or a histogram counts under its own name."""
    rows = history(path)
    media = {key.rsplit("/", 1)[0] for row in rows for key in row if key.endswith("/_type")}
    inside = tuple(f"{name}/" for name in media)
    return media | {key for row in rows for key in row if not key.startswith(inside)}
