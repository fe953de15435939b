"""The base writes the answers that heads are trained on.

Knows: which prompts are still to be answered, in which order, and what a line of the file says.
Refuses to know: how answers are computed (an `Engine`, by default `decode.batch`), where prompts come from, what the
answers are used for, and how their file is kept (`train.answers`).

What a seed promises: the random numbers of an answer depend on the seed and on the index of its prompt only, never on
the batch it was in; see `decode.batch` for what that means in floating point.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from decode.batch import Progress, Task, decode_many
from decode.text import Prompt, encode
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import SamplingConfig, check_seed
from train.answers import AnswerFile
from train.records import Message, read_messages
from train.template import REFUSED

BATCH_SIZE = 32  # answers in progress: as many as the kernels of a CPU take in one call; accelerators profit from more
WINDOW = 8  # batches among which prompts are sorted by length, to save padding while the file keeps filling evenly

TOO_LONG = "longer than the context of the base allows"
UNKNOWN = "holds tokens outside the vocabulary of the base"

OnProgress = Callable[[int, int, int], None]


class Engine(Protocol):
    """From tasks to answers; see `decode.batch.decode_many`."""

    def __call__(self, tasks: Sequence[Task], max_new_tokens: int, ends: Sequence[int]) -> Iterator[Progress]: ...


@dataclass
class RegenerateReport:
    """Answers written now and found from before, prompts skipped by reason, tokens written now, seconds taken."""

    written: int = 0
    found: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0


def batch_engine(base: FrozenBase, batch_size: int) -> Engine:
    """The project's own loop, with at most `batch_size` answers in progress. UserError if that is out of range."""
    if batch_size < 1:
        raise UserError(f"--batch-size is {batch_size}; allowed is 1 or more.")

    def run(tasks: Sequence[Task], max_new_tokens: int, ends: Sequence[int]) -> Iterator[Progress]:
        ordered = in_order(tasks, batch_size)
        return decode_many(base, ordered, max_new_tokens=max_new_tokens, slots=batch_size, ends=ends)

    return run


def regenerate(
    base: FrozenBase,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int = 256,
    temperature: float | Sequence[float] = 0.7,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    source: str = "",
    engine: Engine | None = None,
    on_progress: OnProgress | None = None,
) -> RegenerateReport:
    """Answers each prompt (a text, or messages) and appends it to `out` as one line of JSON.

    An assistant turn at the end of messages is left out: it is what the base writes anew.

    A line holds `messages`, `temperature`, `source`, `finish_reason` (`stop`, or `length` for an answer cut at
    `max_new_tokens`) and `index`, the place of its prompt. Answers that are in the file already are not written again;
    the settings lie beside it in `<out>.meta.json`. Several temperatures are used in turn, by the index of the prompt.

    `on_progress(done, total, tokens)` is called after every token of all answers in progress: prompts finished, prompts
    in all, tokens written by this call. Raises UserError for settings out of range, and for a file that other settings,
    another base or other prompts have begun.
    """
    temperatures = [temperature] if isinstance(temperature, int | float) else list(temperature)
    engine = engine or batch_engine(base, batch_size)
    check_settings(base, max_new_tokens, temperatures, seed)
    started, report = time.monotonic(), RegenerateReport()
    settings = {
        "base": base.name,
        "fingerprint": base.fingerprint(),
        "max_new_tokens": max_new_tokens,
        "temperature": temperatures,
        "seed": seed,
    }
    conversations = to_conversations(prompts)
    with AnswerFile(out, settings, conversations) as file:
        report.found = len(file.done)
        tasks = list(prompt_tasks(base, conversations, temperatures, seed, max_new_tokens, file.done, report.skipped))
        total = report.found + len(tasks)
        for step in engine(tasks, max_new_tokens, base.eos_token_ids):
            if step.finished:
                file.append([_line(base, task, conversations[task.index], ids, source) for task, ids in step.finished])
            report.written += len(step.finished)
            report.tokens += step.tokens
            if on_progress is not None:
                on_progress(report.found + report.written, total, report.tokens)
    if on_progress is not None:
        on_progress(total, total, report.tokens)
    report.seconds = time.monotonic() - started
    return report


def to_conversations(prompts: Sequence[Prompt]) -> list[list[Message]]:
    """Each prompt as the turns before the answer. UserError for one that has no user turn to answer."""
    return [_conversation(prompt, index) for index, prompt in enumerate(prompts)]


def check_settings(base: FrozenBase, max_new_tokens: int, temperatures: Sequence[float], seed: int) -> None:
    """UserError if one of them is out of range for the base."""
    check_limit(base, "max-new-tokens", max_new_tokens)
    if not temperatures:
        raise UserError("--temperature is an empty list; give one or several numbers, 0 for greedy.")
    for value in temperatures:
        SamplingConfig(temperature=value)
    check_seed(seed)


def check_limit(base: FrozenBase, name: str, tokens: int, before: int = 1) -> None:
    """UserError unless the context of the base has room for so many tokens behind a prompt of `before` tokens."""
    most = base.context_length - before
    if not 1 <= tokens <= most:
        allowed = f"1 to {most}, what the context of {base.name} leaves"
        raise UserError(f"--{name} is {tokens}; allowed is {allowed}.")


def _conversation(prompt: Prompt, index: int) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = list(read_messages(prompt, f"prompt {index + 1}"))
    messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not messages or messages[-1]["role"] != "user":
        raise UserError(f"prompt {index + 1} has no user turn to answer; give messages that end with a user turn.")
    return messages


def prompt_tasks(
    base: FrozenBase,
    conversations: Sequence[Sequence[Message]],
    temperatures: Sequence[float],
    seed: int,
    max_new_tokens: int,
    done: set[int],
    skipped: Counter[str],
) -> Iterator[Task]:
    """What is left to do; prompts that the base cannot answer are counted in `skipped`."""
    for index, messages in enumerate(conversations):
        if index in done:
            continue
        try:
            alone = len(messages) == 1 and not base.tokenizer.chat_template
            ids = encode(base.tokenizer, messages[0]["content"] if alone else messages, chat=True)
        except UserError:
            skipped[REFUSED] += 1
            continue
        if not ids or max(ids) >= base.vocab_size:
            skipped[UNKNOWN] += 1
        elif len(ids) + max_new_tokens > base.context_length:
            skipped[TOO_LONG] += 1
        else:
            yield Task(index, ids, float(temperatures[index % len(temperatures)]), row_seed(seed, str(index)))


def in_order(tasks: Sequence[Task], batch_size: int) -> list[Task]:
    """Longest first within windows of several batches, so that what is read together is of like length."""
    ordered: list[Task] = []
    for start in range(0, len(tasks), batch_size * WINDOW):
        ordered += sorted(tasks[start : start + batch_size * WINDOW], key=lambda task: -len(task.ids))
    return ordered


def _line(base: FrozenBase, task: Task, messages: Sequence[Message], ids: Sequence[int], source: str) -> dict[str, Any]:
    text, stopped = answer_text(base, ids, base.eos_token_ids)
    return {
        "messages": [*messages, {"role": "assistant", "content": text}],
        "temperature": task.temperature,
        "source": source,
        "finish_reason": "stop" if stopped else "length",
        "index": task.index,
    }


def answer_text(base: FrozenBase, ids: Sequence[int], ends: Sequence[int]) -> tuple[str, bool]:
    """The text of an answer without special tokens, and whether it ended by itself."""
    stopped = ids[-1] in ends
    text: str = base.tokenizer.decode(list(ids[:-1] if stopped else ids), skip_special_tokens=True)
    return (text if stopped else text.rstrip("\ufffd")), stopped  # the limit may have cut a character in two


def row_seed(seed: int, index: str) -> int:
    """The seed of one answer's own draws."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:7], "little")
