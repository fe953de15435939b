"""Prompt files: one JSON object per line, holding `prompt`, `messages` or `turns`, and maybe a `category`.

Knows: the three forms and how to name a bad line. Refuses to know tokenizers.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from decode.text import Prompt
from mtp.errors import UserError

_Found = TypeVar("_Found")


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, at most `limit` of them; blank lines are skipped.

    Of `turns`, a list of user messages, the first is used. UserError with file and line number on a line that is none
    of the forms, and on a file without prompts.
    """
    return [prompt for prompt, _ in read_categorised(path, limit)]


def read_categorised(
    path: Path, limit: int | None = None, per_category: int | None = None
) -> list[tuple[Prompt, str | None]]:
    """The same with the category of each, None where a line has none; at most `per_category` of every category."""
    _check_count("--limit", limit)
    _check_count("--per-category", per_category)
    prompts: list[tuple[Prompt, str | None]] = []
    seen: Counter[str | None] = Counter()
    for where, line in _lines(path):
        if len(prompts) == limit:
            break
        prompt, category = _parse(line, where)
        seen[category] += 1
        if per_category is None or seen[category] <= per_category:
            prompts.append((prompt, category))
    return _some(prompts, path)


def read_each(path: Path, limit: int | None = None) -> list[Prompt | UserError]:
    """The prompts, and in the place of a line that is none what is wrong with it."""
    _check_count("--limit", limit)
    found: list[Prompt | UserError] = []
    for where, line in islice(_lines(path), limit):
        try:
            found.append(_parse(line, where)[0])
        except UserError as error:
            found.append(error)
    return _some(found, path)


def _check_count(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"{option} is {value}; use at least 1, or leave it out for all prompts.")


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, each with its name in a message."""
    if not path.is_file():
        raise UserError(f"--prompts {path} is not a file; name a JSONL file with a prompt per line.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"--prompts {path}, line {number}", line


def _some(found: list[_Found], path: Path) -> list[_Found]:
    """UserError if there are none."""
    if not found:
        raise UserError(f'--prompts {path} has no prompts; give at least one line such as {{"prompt": "Hello"}}.')
    return found


def _parse(line: bytes, where: str) -> tuple[Prompt, str | None]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSON syntax, UTF-8, endless nesting
        raise UserError(f"{where} is not JSON ({error}); correct or remove the line.") from None
    record = record if isinstance(record, dict) else {}
    category = record.get("category")
    return _prompt(record, where), category if isinstance(category, str) else None


def _prompt(record: dict[str, Any], where: str) -> Prompt:
    if _is_text(record.get("prompt")):
        return str(record["prompt"])
    turns, messages = record.get("turns"), record.get("messages")
    if isinstance(turns, list) and turns and _is_text(turns[0]):
        return str(turns[0])
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    raise UserError(
        f"{where} has no usable prompt; it must hold one of: prompt (text), messages (list of role and content), "
        "turns (list of texts)."
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
