"""Records: what a line of a data file says, in one of three shapes.

Knows: JSONL files (own reader, so that a bad line is named by file and number), all that `datasets` can load, and
the usual spellings of a record (`messages`, ShareGPT `conversations`, prompt and response, Alpaca, plain `text`).
Refuses to know: tokenizers, chat templates, batches.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mtp.errors import UserError

Kind = Literal["chat", "completion", "text"]
Message = dict[str, str]

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
SHAPES = (
    "messages (list of role and content), conversations (list of from and value), prompt with response or completion, "
    "instruction with output, or text"
)
RESPONSE_KEYS = ("response", "completion")
LOCAL_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training record, normalised.

    `kind` is `chat` (messages), `completion` (one user and one assistant turn that may be used without a chat template
    too) or `text` (every token is supervised). `finished` is false where the last answer is known to have been cut at
    a length limit, so that the end of a turn must not be learned there.
    """

    kind: Kind
    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    finished: bool = True

    @property
    def prompt_key(self) -> str:
        """What two records must not share if one is for training and the other for validation: the first user turn."""
        users = [m["content"] for m in self.messages if m["role"] == "user"]
        start = users[0] if users else self.text or "".join(m["content"] for m in self.messages)
        return " ".join(start.casefold().split())


def read_records(
    source: str, *, split: str = "train", limit: int | None = None, streaming: bool = False
) -> list[Record]:
    """All records of one source, in its order; at most `limit`. `streaming` fetches no more than these.

    `source` is a `.jsonl` file, a local parquet, json, csv or arrow file, a folder or Hub id that `datasets` can load;
    a Hub id may carry the name of a subset after a colon (`org/name:subset`). Files have no splits, and ignore `split`.

    Raises UserError for a source that cannot be read and for the first record that cannot be used, naming its place.
    """
    records = [normalise(row, where) for where, row in islice(read_rows(source, split, streaming), limit)]
    if not records:
        raise UserError(f"{source} holds no records; allowed are lines with {SHAPES}. Give a file that is not empty.")
    return records


def read_rows(source: str, split: str, streaming: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Raw rows with their place, for messages: `file:line` for JSONL, `source[split] row i` otherwise."""
    path = Path(source)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    return _read_dataset(source, split, streaming)


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) for each line that is not empty. Lines are read one by one, so files may be large."""
    with open_lines(path) as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                where = f"{path}:{number}"
                yield where, parse_line(raw, where)


def open_lines(path: Path) -> BinaryIO:
    """The file, open; UserError where it cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"file {path} cannot be read ({error.strerror}); give the path of a .jsonl file.") from error


def normalise(row: Mapping[str, Any], where: str) -> Record:
    """One record from one row, in any of the accepted spellings; other keys are ignored, and null counts as absent."""
    row = {key: value for key, value in row.items() if value is not None}
    finished = row.get("finish_reason") != "length"
    if "messages" in row:
        return Record(kind="chat", where=where, messages=read_messages(row["messages"], where), finished=finished)
    if "conversations" in row:
        return Record(kind="chat", where=where, messages=_share_gpt(row, where), finished=finished)
    if "prompt" in row and any(key in row for key in RESPONSE_KEYS):
        return _prompt_response(row, where, finished)
    if "instruction" in row and "output" in row:
        prompt = "\n\n".join(filter(None, (_text(row, "instruction", where), _text(row, "input", where, default=""))))
        return _completion(prompt, _text(row, "output", where), where, finished)
    if "text" in row:
        return Record(kind="text", where=where, text=_text(row, "text", where))
    raise UserError(f"{where}: keys {sorted(row)} are no known record; allowed are {SHAPES}.")


def read_messages(value: Any, where: str, *, role_key: str = "role", text_key: str = "content") -> tuple[Message, ...]:
    """Messages whose `role` is system, user, assistant or tool and whose `content` is a text."""
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: the messages are {_kind_of(value)}; allowed is a list of {role_key} and {text_key}.")
    numbered = enumerate(value, start=1)
    return tuple(_read_message(item, f"{where}: message {i}", role_key, text_key) for i, item in numbered)


def parse_line(raw: bytes, where: str) -> dict[str, Any]:
    """The object of a line of a JSONL file. UserError, which names the place, for anything else."""
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        remedy = "allowed is one JSON object per line. Correct or delete the line."
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); {remedy}") from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, endless nesting
        raise UserError(f"{where}: not usable JSON ({error}). Correct or delete the line.") from error
    if not _is_writable(row):
        raise UserError(f"{where}: half of a surrogate pair (\\ud800…\\udfff) is no text. Correct or delete the line.")
    if not isinstance(row, dict):
        raise UserError(f"{where}: the line is {_kind_of(row)}; allowed is one JSON object per line.")
    return row


def _is_writable(value: Any) -> bool:
    """Whether all texts in it can be written as UTF-8; JSON can name code points that are not characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_dataset(source: str, split: str, streaming: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, row in enumerate(open_dataset(source, split, streaming=streaming)):
        yield f"{source}[{split}] row {i}", row


def open_dataset(source: str, split: str, *, streaming: bool = False) -> Any:
    """Rows by `datasets`, of which `streaming` keeps none in memory or on disk. UserError where it cannot."""
    import datasets  # half a second that JSONL users need not wait for

    path = Path(source)
    try:
        if path.is_file():
            builder = LOCAL_BUILDERS.get(path.suffix)
            if builder is None:
                allowed = ", ".join([".jsonl", *LOCAL_BUILDERS])
                raise UserError(f"data file {source} ends in {path.suffix!r}; allowed are {allowed}.")
            return datasets.load_dataset(builder, data_files=str(path), split="train", streaming=streaming)
        name, subset = (source, None) if path.exists() else _split_subset(source)
        return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises dozens of types, and each of them means that this source is unusable
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        remedy = "Give a .jsonl file, or an id (and split) that exists, and for a Hub id a network connection."
        raise UserError(f"data source {source} (split {split}) cannot be loaded: {reason}. {remedy}") from error


def _split_subset(source: str) -> tuple[str, str | None]:
    name, _, subset = source.partition(":")
    return name, subset or None


def _share_gpt(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    turns = row["conversations"]
    spelled = isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and "role" in turns[0]
    keys = ("role", "content") if spelled else ("from", "value")
    messages = read_messages(turns, where, role_key=keys[0], text_key=keys[1])
    if "system" in row and messages[0]["role"] != "system":
        system = _text(row, "system", where)
        return ({"role": "system", "content": system}, *messages) if system.strip() else messages
    return messages


def _prompt_response(row: Mapping[str, Any], where: str, finished: bool) -> Record:
    key = next(key for key in RESPONSE_KEYS if key in row)
    if isinstance(row["prompt"], list) and isinstance(row[key], list):  # both halves given as messages
        messages = read_messages(row["prompt"] + row[key], where)
        return Record(kind="chat", where=where, messages=messages, finished=finished)
    return _completion(_text(row, "prompt", where), _text(row, key, where), where, finished)


def _completion(prompt: str, response: str, where: str, finished: bool) -> Record:
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": response})
    return Record(kind="completion", where=where, messages=messages, finished=finished)


def _read_message(item: Any, where: str, role_key: str, text_key: str) -> Message:
    if not isinstance(item, Mapping) or role_key not in item or text_key not in item:
        raise UserError(f"{where} is {_kind_of(item)}; allowed is an object with {role_key} and {text_key}.")
    role, content = item[role_key], item[text_key]
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where} has the {role_key} {role!r}; allowed are {', '.join(ROLES)}.")
    if isinstance(content, list):
        content = _join_parts(content, where)
    if not isinstance(content, str):
        raise UserError(f"{where} has {_kind_of(content)} as {text_key}; allowed is a text.")
    return {"role": ROLES[role], "content": content}


def _join_parts(parts: list[Any], where: str) -> str:
    """Content given as parts, when all of them are texts."""
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise UserError(f"{where} has parts that are no text; allowed are text parts. Remove images and tools.")
    return "".join(part["text"] for part in parts)


def _text(row: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} is {_kind_of(value)}; allowed is a text.")
    return value


def _kind_of(value: Any) -> str:
    """A value in words, short, for messages."""
    if isinstance(value, Mapping):
        return f"an object with the keys {sorted(value)}" if value else "an empty object"
    if isinstance(value, list | tuple) and not value:
        return "an empty list"
    names = {str: "a text", bool: "a boolean", int: "a number", float: "a number", type(None): "missing"}
    names[list] = "a list"
    return names.get(type(value), type(value).__name__)
