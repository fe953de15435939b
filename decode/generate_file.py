"""Texts of many prompts in a file of JSON lines, which the same command continues after any end.

Knows: what a line holds, which prompts are done, and what must be the same to go on. Refuses to know how lines are kept
whole (`decode.whole_lines`).
"""

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from jsonargparse import Namespace

from decode.bench import describe, settings_report
from decode.cli import CHECK_FAILED, INTERRUPTED
from decode.command import print_json
from decode.decoder import Decoder
from decode.record import Record
from decode.report import show_stats
from decode.request import Request
from decode.stats import DecodeStats
from decode.stream import Result
from decode.telemetry import vllm_counters
from decode.terminal import Advance, Terminal
from decode.text import Prompt
from decode.whole_lines import WholeLines
from mtp.errors import UserError
from mtp.hub import find_heads
from mtp.share import CONFIG

_MOST_TOLD = 5  # prompts that failed, by name


def generate_file(
    decoder: Decoder,
    prompts: Sequence[Prompt | UserError],
    request: Request,
    options: Namespace,
    terminal: Terminal,
    record: Record,
) -> int:
    """Decode what is not in the file yet; 1 when some prompts of it could not be decoded."""
    with WholeLines(options.output, settings_of(decoder, request, options.heads), "--output") as file:
        job = _Job(file, prompts, lambda result, prompt: record.text(result, prompt, decoder.base.tokenizer))
        record.start({**describe(decoder.base, options.heads), **settings_report(request)})
        found, interrupted = len(job.done), False
        try:
            with terminal.tracked(len(prompts) - found, "prompts") as advance:
                job.run(decoder, request, options.batch_size, advance)
        except KeyboardInterrupt:
            interrupted = True
        if job.total is not None and not terminal.quiet:
            show_stats(job.total)
        _tell(job, found, options, terminal)
        report = _report(job, found, decoder, request, options) | ({"interrupted": True} if interrupted else {})
        if options.json:
            print_json(report)
        if len(job.done) > found:  # a file that was whole keeps the statistics of its making
            record.end({**report, "results": []})
    if interrupted:
        terminal.say("interrupted; the same command goes on.")
        return INTERRUPTED
    return CHECK_FAILED if job.failed else 0


def settings_of(decoder: Decoder, request: Request, heads_name: str | None) -> dict[str, Any]:
    """What texts depend on: base and heads by their content, and all that a shell can ask for."""
    base = decoder.base
    heads = None
    if decoder.heads is not None and heads_name is not None:
        config = (find_heads(heads_name) / CONFIG).read_bytes()  # which holds the hash of the weights
        heads = {"name": heads_name, "sha256": hashlib.sha256(config).hexdigest()[:16]}
    asked = [item.name for item in fields(Request) if not item.metadata.get("python_only")]
    return {
        "base": {"name": base.name, "fingerprint": base.fingerprint()},
        "heads": heads,
        "dtype": str(base.dtype).removeprefix("torch."),
        "quantise": base.quantised,
        **{name: _spelt(getattr(request, name)) for name in asked},
    }


def _spelt(value: Any) -> Any:
    """As JSON has it, infinite numbers included."""
    if isinstance(value, dict):
        return {str(key): str(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


class _Job:
    """The file and its prompts: `done` are the numbers of those that have a line, `failed` what was wrong with some."""

    def __init__(
        self, file: WholeLines, prompts: Sequence[Prompt | UserError], log: Callable[[Result, Prompt], object]
    ) -> None:
        self._file, self._prompts, self._log = file, prompts, log
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}
        self.total: DecodeStats | None = None
        for line, record in file.records():
            self._take(line, record)

    def _take(self, line: int, record: dict[str, Any]) -> None:
        """A line of an earlier run. Those beyond --limit stay, and count for nothing."""
        index = record.get("index")
        where = f"--output {self._file.path}, line {line}"
        if not isinstance(index, int) or index < 0:
            raise UserError(f"{where} has no index of a prompt; delete it, or name a new file.")
        if record.get("settings") != self._file.fingerprint:
            raise UserError(f"{where} was made with other settings; delete it, or name a new file.")
        if index >= len(self._prompts):
            return
        prompt = self._prompts[index]
        if record.get("prompt") != (None if isinstance(prompt, UserError) else prompt):
            raise UserError(
                f"{where} is of another prompt than number {index + 1} of --prompts; give that file as it was, or name "
                "a new --output."
            )
        self.done.add(index)
        if "error" in record:
            self.failed[index] = str(record["error"])

    def run(self, decoder: Decoder, request: Request, batch_size: int, advance: Advance) -> None:
        """Everything that has no line yet, each as soon as it is done."""
        missing = [index for index in range(len(self._prompts)) if index not in self.done]
        readable: list[tuple[int, Prompt]] = []
        for index in missing:
            prompt = self._prompts[index]
            if isinstance(prompt, UserError):
                self._write(index, None, prompt)
                advance()
            else:
                readable.append((index, prompt))
        started = time.perf_counter()
        texts = [prompt for _, prompt in readable]
        for place, found in decoder.as_done(texts, request, batch_size=batch_size):
            self._write(*readable[place], found)
            tokens = 0 if self.total is None else self.total.committed
            advance(f"{tokens / (time.perf_counter() - started):.0f} tok/s")

    def _write(self, index: int, prompt: Prompt | None, found: Result | UserError) -> None:
        made = {"settings": self._file.fingerprint}
        if isinstance(found, UserError):
            self._file.append({"index": index, "prompt": prompt, "error": str(found), **made})
            self.failed[index] = str(found)
        else:
            self._file.append({"index": index, "prompt": prompt, **as_record(found), **made})
            if prompt is not None:
                self._log(found, prompt)
            if self.total is None:
                self.total = found.stats.empty()
            self.total.merge(found.stats)
        self.done.add(index)


def as_record(result: Result) -> dict[str, Any]:
    """What JSON tells of a text."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        **({} if result.logprobs is None else {"logprobs": result.logprobs}),
        "stats": result.stats.to_json(),
    }


def _tell(job: _Job, found: int, options: Namespace, terminal: Terminal) -> None:
    """What is in the file now. What failed is an error, which --quiet does not silence."""
    there = f"{found} were there, " if found else ""
    terminal.say(f"{options.output}: {there}{len(job.done) - found} written, {len(job.failed)} of all failed")
    for index, error in sorted(job.failed.items())[:_MOST_TOLD]:
        print(f"error: prompt {index + 1}: {' '.join(error.split())}", file=sys.stderr)
    if len(job.failed) > _MOST_TOLD:
        print(f"error: {len(job.failed) - _MOST_TOLD} more; look for `error` in {options.output}", file=sys.stderr)


def _report(job: _Job, found: int, decoder: Decoder, request: Request, options: Namespace) -> dict[str, Any]:
    counts = {} if job.total is None else job.total.to_json()
    if job.total is not None:
        counts |= vllm_counters(job.total)
        counts["tok_per_s"] = job.total.committed / max(job.total.total_seconds, 1e-9)
    return {
        **describe(decoder.base, options.heads),
        "batch_size": options.batch_size,
        **settings_report(request),
        "seed": request.seed,
        "output": str(options.output),
        "found": found,
        "written": len(job.done) - found,
        "failed": sorted(job.failed),
        **counts,
    }
