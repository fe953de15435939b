"""An instruct base writes its own prompts: it continues the header behind which its chat template expects the user.

Knows: that header and what ends the user's turn, which texts make no prompt, and a file beside the answers that keeps
what was written, so that a killed run goes on with the same prompts. Refuses to know: how texts are computed (an
`Engine`), and how the prompts are answered.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.batch import Task
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import SamplingConfig, check_seed
from train.answers import AnswerFile
from train.records import read_jsonl
from train.regenerate import Engine, answer_text, check_limit, row_seed

SOURCE = "own"
EMPTY = "own prompts that are empty"
ENDLESS = "own prompts not finished within --own-max-tokens"
SPECIAL = "own prompts with special tokens in them"
REPEATED = "own prompts that repeat another"
_MARK = "mtp0the0text0of0the0user"


@dataclass
class OwnPrompts:
    """Different, finished prompts in a fixed order, and how many texts were dropped, by reason."""

    prompts: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def write_own_prompts(
    base: FrozenBase,
    count: int,
    out: Path,
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    engine: Engine,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OwnPrompts:
    """Have `count` texts written, those in `<out>.prompts.jsonl` left as they are, and give those that make prompts.

    Text i depends on seed and i; a larger `count` adds to the file. `on_progress(done, count)` is called after every
    token of all texts in progress. Raises UserError for a base without a chat template, and as `regenerate` does.
    """
    if count < 1:
        raise UserError(f"--own-prompts is {count}; allowed is 1 or more.")
    header, ends = user_header(base)
    check_limit(base, "own-max-tokens", max_tokens, before=len(header))
    _check_temperature(temperature)
    check_seed(seed)
    settings = {
        "base": base.name,
        "fingerprint": base.fingerprint(),
        "own_temperature": temperature,
        "own_max_tokens": max_tokens,
        "seed": seed,
    }
    path = out.with_name(out.name + ".prompts.jsonl")
    with AnswerFile(path, settings, [[]] * count) as file:
        tasks = [Task(i, header, temperature, row_seed(seed, f"own/{i}")) for i in range(count) if i not in file.done]
        done = len(file.done)
        for step in engine(tasks, max_tokens, ends):
            if step.finished:
                file.append([_line(base, task, ids, ends) for task, ids in step.finished])
            done += len(step.finished)
            on_progress(done, count)
    return _choose(path, count)


def _check_temperature(temperature: float) -> None:
    try:
        SamplingConfig(temperature=temperature)
    except UserError as error:
        raise UserError(str(error).replace("--temperature", "--own-temperature")) from None


def user_header(base: FrozenBase) -> tuple[list[int], tuple[int, ...]]:
    """The ids that the chat template prints before the user's text, and those that end it."""
    tokenizer = base.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"--own-prompts: base {base.name!r} has no chat template, so it has no user to speak as; give --prompts."
        )
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    except Exception as error:  # templates are programs of the base's authors and raise what they like
        raise UserError(
            f"--own-prompts: the base's chat template refuses a bare turn ({error}); give --prompts."
        ) from error
    before, found, after = text.partition(_MARK)
    # A blank belongs to the word behind it, in the eyes of most tokenizers.
    header = list(tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"])
    if not found or not header:
        raise UserError(
            f"--own-prompts: the chat template of base {base.name!r} prints nothing before a user's text; "
            "give --prompts."
        )
    follows = list(tokenizer(after, add_special_tokens=False)["input_ids"])[:1]
    marks = _special_ids(tokenizer).intersection(follows)
    return header, tuple(dict.fromkeys([*base.eos_token_ids, *marks]))


def _special_ids(tokenizer: Any) -> set[int]:
    """Named ones such as the end of a text, and those that are only marked as special, as most of templates are."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, what in added.items() if what.special)}


def _line(base: FrozenBase, task: Task, ids: Sequence[int], ends: Sequence[int]) -> dict[str, object]:
    text, stopped = answer_text(base, ids, ends)
    said = ids[:-1] if stopped else ids
    special = not _special_ids(base.tokenizer).isdisjoint(said) or max(said, default=0) >= len(base.tokenizer)
    return {
        "messages": [{"role": "user", "content": text.strip()}],
        "temperature": task.temperature,
        "source": SOURCE,
        "finish_reason": "special" if special else "stop" if stopped else "length",
        "index": task.index,
    }


def _choose(path: Path, count: int) -> OwnPrompts:
    """Of the first `count` texts in the order of their index, those that make prompts; of equal ones the first."""
    rows = sorted((row for _, row in read_jsonl(path) if row["index"] < count), key=lambda row: int(row["index"]))
    chosen, seen = OwnPrompts(), set[str]()
    for row in rows:
        text = str(row["messages"][0]["content"])
        key = " ".join(text.casefold().split())
        if row["finish_reason"] == "special":
            chosen.dropped[SPECIAL] += 1
        elif row["finish_reason"] == "length":
            chosen.dropped[ENDLESS] += 1
        elif not key:
            chosen.dropped[EMPTY] += 1
        elif key in seen:
            chosen.dropped[REPEATED] += 1
        else:
            seen.add(key)
            chosen.prompts.append(text)
    return chosen
