"""The base writes the answers that heads are trained on.

Knows: batching prompts for `generate()` of transformers, and drawing so that a seed means the same in every batch.
Refuses to know: where prompts come from, what the answers are used for, and how their file is kept (`train.answers`).

What a seed promises: the random numbers of an answer depend on the seed and on the index of its prompt only, never on
the batch it was in. The logits they are applied to come from a padded batch, and so differ in the last bits between
batches; at a near tie that can change a token, and all that follows it. At temperature 0 no random numbers are used.
Sizes: B batch, T tokens of the longest prompt in a batch, V vocabulary.
"""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from decode.text import Prompt, encode
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import RandomSource, SamplingConfig, to_probs
from train.answers import AnswerFile
from train.records import Message, read_messages
from train.template import REFUSED

WINDOW = 8  # batches among which prompts are sorted by length, to save padding while the file keeps filling evenly

TOO_LONG = "longer than the context of the base allows"
UNKNOWN = "holds tokens outside the vocabulary of the base"

OnProgress = Callable[[int, int, int], None]


@dataclass
class RegenerateReport:
    """Answers written now and found from before, prompts skipped by reason, tokens written now, seconds taken."""

    written: int = 0
    found: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Job:
    """One prompt to be answered."""

    index: int
    messages: Sequence[Message]
    ids: list[int]
    temperature: float


def regenerate(
    base: FrozenBase,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int = 256,
    temperature: float | Sequence[float] = 0.7,
    batch_size: int = 16,
    seed: int = 0,
    source: str = "",
    on_progress: OnProgress | None = None,
) -> RegenerateReport:
    """Answers each prompt (a text, or messages) and appends it to `out` as one line of JSON.

    An assistant turn at the end of messages is left out: it is what the base writes anew.

    A line holds `messages`, `temperature`, `source`, `finish_reason` (`stop`, or `length` for an answer cut at
    `max_new_tokens`) and `index`, the place of its prompt. Answers that are in the file already are not written again;
    the settings lie beside it in `<out>.meta.json`. Several temperatures are used in turn, by the index of the prompt.

    `on_progress(done, total, tokens)` is called after every step of a batch: prompts finished, prompts in all, tokens
    written by this call. Raises UserError for settings out of range, and for a file that other settings, another base
    or other prompts have begun.
    """
    temperatures = [temperature] if isinstance(temperature, int | float) else list(temperature)
    _check(base, max_new_tokens, temperatures, batch_size)
    started, report = time.monotonic(), RegenerateReport()
    settings = {
        "base": base.name,
        "fingerprint": base.fingerprint(),
        "max_new_tokens": max_new_tokens,
        "temperature": temperatures,
        "seed": seed,
    }
    conversations = [_conversation(prompt, index) for index, prompt in enumerate(prompts)]
    with AnswerFile(out, settings, conversations) as file:
        report.found = len(file.done)
        jobs = list(_jobs(base, conversations, temperatures, max_new_tokens, file.done, report))
        total = report.found + len(jobs)
        for batch in _batches(jobs, batch_size):
            before = report.found + report.written, report.tokens

            def tell(tokens: int, done: int = before[0], written: int = before[1]) -> None:
                if on_progress is not None:
                    on_progress(done, total, written + tokens)

            answers = _answer(base, batch, max_new_tokens, seed, tell)
            file.append([_line(base, job, ids, source) for job, ids in zip(batch, answers, strict=True)])
            report.written += len(batch)
            report.tokens += sum(map(len, answers))
    if on_progress is not None:
        on_progress(total, total, report.tokens)
    report.seconds = time.monotonic() - started
    return report


def _check(base: FrozenBase, max_new_tokens: int, temperatures: Sequence[float], batch_size: int) -> None:
    if not 1 <= max_new_tokens < base.context_length:
        allowed = f"1 to {base.context_length - 1}, what the context of {base.name} leaves"
        raise UserError(f"--max-new-tokens is {max_new_tokens}; allowed is {allowed}.")
    if batch_size < 1:
        raise UserError(f"--batch-size is {batch_size}; allowed is 1 or more.")
    if not temperatures:
        raise UserError("--temperature is an empty list; give one or several numbers, 0 for greedy.")
    for value in temperatures:
        SamplingConfig(temperature=value)


def _conversation(prompt: Prompt, index: int) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = list(read_messages(prompt, f"prompt {index + 1}"))
    messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not messages or messages[-1]["role"] != "user":
        raise UserError(f"prompt {index + 1} has no user turn to answer; give messages that end with a user turn.")
    return messages


def _jobs(
    base: FrozenBase,
    prompts: Sequence[Sequence[Message]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    done: set[int],
    report: RegenerateReport,
) -> Iterator[_Job]:
    """What is left to do; prompts that the base cannot answer are counted in the report."""
    for index, messages in enumerate(prompts):
        if index in done:
            continue
        try:
            alone = len(messages) == 1 and not base.tokenizer.chat_template
            ids = encode(base.tokenizer, messages[0]["content"] if alone else messages, chat=True)
        except UserError:
            report.skipped[REFUSED] += 1
            continue
        if not ids or max(ids) >= base.vocab_size:
            report.skipped[UNKNOWN] += 1
        elif len(ids) + max_new_tokens > base.context_length:
            report.skipped[TOO_LONG] += 1
        else:
            yield _Job(index, messages, ids, float(temperatures[index % len(temperatures)]))


def _batches(jobs: Sequence[_Job], batch_size: int) -> Iterator[Sequence[_Job]]:
    for start in range(0, len(jobs), batch_size * WINDOW):
        window = sorted(jobs[start : start + batch_size * WINDOW], key=lambda job: len(job.ids))
        for i in range(0, len(window), batch_size):
            yield window[i : i + batch_size]


def _answer(
    base: FrozenBase, batch: Sequence[_Job], max_new_tokens: int, seed: int, tell: Callable[[int], None]
) -> list[list[int]]:
    """The new ids of each answer, with the end-of-sequence token if it came."""
    pad_id = base.tokenizer.pad_token_id
    pad_id = (*base.eos_token_ids, 0)[0] if pad_id is None else pad_id
    tokens_BT = torch.full((len(batch), max(len(job.ids) for job in batch)), pad_id, dtype=torch.long)
    mask_BT = torch.zeros_like(tokens_BT)
    for i, job in enumerate(batch):
        tokens_BT[i, -len(job.ids) :] = torch.tensor(job.ids)
        mask_BT[i, -len(job.ids) :] = 1
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(base.eos_token_ids) or None,
        pad_token_id=pad_id,
    )
    choose = _SeededChoice(batch, seed, base.eos_token_ids, tell)
    with _without_generation_defaults(base.model):
        out = base.model.generate(
            tokens_BT.to(base.device),
            attention_mask=mask_BT.to(base.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([choose]),
        )
    rows: list[list[int]] = out[:, tokens_BT.shape[1] :].tolist()
    return [_until_end(row, base.eos_token_ids) for row in rows]


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    place = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: place + 1]


def _line(base: FrozenBase, job: _Job, ids: list[int], source: str) -> dict[str, Any]:
    stopped = ids[-1] in base.eos_token_ids
    text = base.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
    text = text if stopped else text.rstrip("\ufffd")  # the limit may have cut a character in two
    return {
        "messages": [*job.messages, {"role": "assistant", "content": text}],
        "temperature": job.temperature,
        "source": source,
        "finish_reason": "stop" if stopped else "length",
        "index": job.index,
    }


class _SeededChoice(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of every row from its own random source and leaves only that token possible.

    `generate()` can then take the maximum, and needs neither the global random state nor one temperature for all rows.
    """

    def __init__(self, batch: Sequence[_Job], seed: int, ends: Sequence[int], tell: Callable[[int], None]) -> None:
        self.rows: dict[float, list[int]] = defaultdict(list)
        for row, job in enumerate(batch):
            self.rows[job.temperature].append(row)
        self.random = _RowSources([RandomSource(_row_seed(seed, job.index)) for job in batch])
        self.open = [True] * len(batch)
        self.ends, self.tell, self.tokens = ends, tell, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] become 0 at the drawn token and -inf elsewhere."""
        probs = torch.empty_like(scores)
        for temperature, rows in self.rows.items():
            probs[rows] = to_probs(scores[rows], SamplingConfig(temperature=temperature)).to(scores.dtype)
        drawn = self.random.categorical(probs)
        self.tokens += sum(self.open)
        self.open = [o and token not in self.ends for o, token in zip(self.open, drawn.tolist(), strict=True)]
        self.tell(self.tokens)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)


class _RowSources(RandomSource):
    """One random source for each row of a batch, behind the interface of one."""

    def __init__(self, rows: Sequence[RandomSource]) -> None:
        self.rows = rows

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """float64 [B, ...] in (0, 1), each row from its own source."""
        assert shape[0] == len(self.rows)
        return torch.stack([row.uniform(shape[1:]) for row in self.rows])


def _row_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:7], "little")


@contextmanager
def _without_generation_defaults(model: Any) -> Iterator[None]:
    """`generate()` fills what a call leaves open from the model's own defaults, such as a repetition penalty.

    Heads are judged against the base's plain distribution, so nothing of that may shape the answers.
    """
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept
