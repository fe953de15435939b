"""Records are tokenised once: examples are kept in files named by everything they depend on.

Knows: the hash of records, tokenizer, template and settings; the file (safetensors, whose JSON header holds the account
of the records); that a file is whole or rebuilt, never trusted; and that of several processes one builds while the
others wait. Any of the files may be deleted at any time.
Refuses to know: how records become examples (`train.chat`), and where the folder is.
Sizes: N examples, T tokens of all of them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtp.fingerprint import tokenizer_fingerprint
from train.chat import Example, encode_records
from train.records import Record
from train.report import DataReport
from train.template import Tokenizer

ENCODING = 1  # raise it whenever the same records become other examples than before
SUFFIX = ".safetensors"

Encoded = tuple[list[Example], DataReport]


def encode_cached(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    folder: Path | None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Encoded:
    """`encode_records`, or what it gave earlier for the same input, out of `folder`; None keeps nothing.

    A folder that cannot be used costs time and no run: the report's notes say so.
    """

    def build() -> Encoded:
        return encode_records(records, tokenizer, max_length=max_length, on_progress=on_progress)

    if folder is None:
        return build()
    key = cache_key(records, tokenizer, max_length)
    path = folder / f"{key[:32]}{SUFFIX}"
    lock = FileLock(folder / f".{path.stem}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()  # of the ranks of a run the first builds, and the others wait here
    except (OSError, NotImplementedError) as error:
        examples, report = build()
        report.notes.append(f"tokens not kept: data.cache_dir {folder} cannot be used ({error})")
        return examples, report
    try:
        return _read_or_build(path, key, records, build)
    finally:
        lock.release()


def cache_key(records: Sequence[Record], tokenizer: Tokenizer, max_length: int) -> str:
    """SHA-256 of all that decides what the examples are. The place of a record is not part of it: files may move."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = {
        "encoding": ENCODING,
        "transformers": transformers.__version__,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "pipeline": None if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "max_length": max_length,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for record in records:
        content = [record.kind, record.messages, record.text, record.finished]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _read_or_build(path: Path, key: str, records: Sequence[Record], build: Callable[[], Encoded]) -> Encoded:
    damage = None
    if path.exists():
        try:
            return _read(path, key, records)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            damage = " ".join(str(error).split())[:200]
    examples, report = build()
    notes = [] if damage is None else [f"tokens in {path} were damaged ({damage}) and are made anew"]
    try:
        _write(path, key, examples, report, records)
        notes.append(f"tokens kept in {path}")
    except (OSError, SafetensorError) as error:
        notes.append(f"tokens not kept: {path} cannot be written ({error})")
    report.notes += notes
    return examples, report


def _write(path: Path, key: str, examples: Sequence[Example], report: DataReport, records: Sequence[Record]) -> None:
    """The file appears whole or not at all."""
    tensors = {
        "tokens": torch.cat([example.tokens for example in examples]),
        "supervised": torch.cat([example.supervised for example in examples]),
        "lengths": torch.tensor([len(example) for example in examples]),
        "records": torch.tensor(_numbers([example.where for example in examples], records)),
    }
    account = report.to_json()
    account["first_dropped"] = {reason: _numbers([where], records)[0] for reason, where in report.first_dropped.items()}
    header = {"key": key, "content": _content_hash(tensors), "report": json.dumps(account)}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=header)
        os.replace(part, path)  # noqa: PTH105
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path, key: str, records: Sequence[Record]) -> Encoded:
    """The examples and their account; ValueError and the like where anything is not as written."""
    with safe_open(path, framework="pt") as file:
        header: Mapping[str, str] = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header["key"] != key:
        raise ValueError("it belongs to other data")
    if header["content"] != _content_hash(tensors):
        raise ValueError("its content does not match its hash")
    lengths = tensors["lengths"].tolist()
    if sum(lengths) != len(tensors["tokens"]) or len(lengths) != len(tensors["records"]):
        raise ValueError("its lengths do not add up")
    parts = zip(tensors["tokens"].split(lengths), tensors["supervised"].split(lengths), strict=True)
    places = [records[number].where for number in tensors["records"].tolist()]
    examples = [Example(tokens, marks, where) for (tokens, marks), where in zip(parts, places, strict=True)]
    account: dict[str, Any] = json.loads(header["report"])
    account["first_dropped"] = {reason: records[number].where for reason, number in account["first_dropped"].items()}
    report = DataReport.from_json(account)
    report.notes.append(f"tokens read from cache {path}")
    return examples, report


def _numbers(places: Sequence[str], records: Sequence[Record]) -> list[int]:
    """Which record each place belongs to; places come in the order of the records."""
    numbers, number = [], 0
    for place in places:
        while records[number].where != place:
            number += 1
        numbers.append(number)
    return numbers


def _content_hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
