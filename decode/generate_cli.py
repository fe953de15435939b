"""`mtp-decode generate`: texts on stdout while they are written, or in a file that the same command continues.

Knows: its options, what to write when, and how to stop. Refuses to decode by itself.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from decode.bench import describe, settings_report
from decode.cli import INTERRUPTED
from decode.colour import painted
from decode.command import add_json, add_models, add_prompts, load_decoder, print_json
from decode.decoder import Decoder
from decode.generate_file import as_record, generate_file
from decode.options import add_request_options, read_request
from decode.play import add_colour, colours, play, wants_colour
from decode.prompts import read_each, read_prompts
from decode.report import show_stats
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import ToText
from decode.stream import Result, Stream
from decode.terminal import Terminal, exact_output
from decode.text import Prompt
from mtp.errors import UserError


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `generate`."""
    add_models(parser, "folder of trained heads, or smollm2-135m; without, --base decodes plainly")
    add = add_prompts(parser)
    add("--prompt", type=str, metavar="TEXT", help="one prompt")
    add("--batch-size", type=int, default=1, metavar="N", help="prompts of the file that are decoded at a time")
    told = "write a line of JSON per prompt here; the same command continues the file"
    add("--output", type=Path | None, metavar="FILE", help=told)
    add_json(parser)
    add_colour(parser)
    add_request_options(parser)


def run(options: Namespace) -> int:
    """`mtp-decode generate`."""
    exact_output()
    terminal, request, coloured = Terminal.of(options), read_request(options), wants_colour(options)
    if options.output is not None:
        if options.prompts is None or options.prompt is not None:
            raise UserError(f"--output is {options.output}, which takes its prompts from a file; use --prompts FILE.")
        each = read_each(options.prompts, options.limit)
        return generate_file(load_decoder(options, terminal), each, request, options, terminal)
    prompts = _prompts(options)
    decoder = load_decoder(options, terminal)
    to_text = colours(decoder, coloured and not options.json, terminal)
    told = _Told(decoder, request, to_text, silent=options.json)
    interrupted = False
    try:
        for result in _numbered(told.results(prompts, options.batch_size), len(prompts)):
            terminal.detail(f"{result.prompt_tokens} tokens of prompt, {len(result.token_ids)} of text")
    except KeyboardInterrupt:
        interrupted = True
    total = told.total()
    if total is not None and not terminal.quiet:
        show_stats(total)
    if options.json and told.done and total is not None:
        report = _report(decoder, options, request, prompts, told.done, total)
        print_json(report | ({"interrupted": True} if interrupted else {}))
    if interrupted:
        terminal.say(_how_to_go_on(len(told.done), len(prompts)))
        return INTERRUPTED
    return 0


def _how_to_go_on(done: int, total: int) -> str:
    if total == 1:
        return "interrupted; the same command starts again."
    return f"interrupted: {done} of {total} prompts are done; with --output FILE the same command would go on."


class _Told:
    """Decodes prompts, writes their texts, and keeps what is done."""

    def __init__(self, decoder: Decoder, request: Request, to_text: ToText | None, silent: bool) -> None:
        self._decoder, self._request, self._to_text, self._silent = decoder, request, to_text, silent
        self._begun: Stream | None = None
        self.done: list[Result] = []

    def results(self, prompts: Sequence[Prompt], batch_size: int) -> Iterator[Result]:
        """In the order of the prompts. Texts are written as they are decoded, or in a batch as they are done."""
        found = self._alone(prompts) if batch_size == 1 else self._together(prompts, batch_size)
        for result in found:
            self._begun = None
            self.done.append(result)
            yield result

    def total(self) -> DecodeStats | None:
        """Counts of what is done, and of a text that was begun; None if nothing was."""
        parts = [result.stats for result in self.done] + ([] if self._begun is None else [self._begun.stats])
        total = parts[0].empty() if parts else None
        for part in parts:
            assert total is not None
            total.merge(part)
        return total if total is not None and total.steps else None

    def _alone(self, prompts: Sequence[Prompt]) -> Iterator[Result]:
        for prompt in prompts:
            stream = self._begun = self._decoder.stream(prompt, self._request)
            if self._silent:
                for _ in stream:
                    pass
            else:
                play(stream, self._to_text)
            yield stream.result

    def _together(self, prompts: Sequence[Prompt], batch_size: int) -> Iterator[Result]:
        for result in self._decoder.generate_many(prompts, self._request, batch_size=batch_size):
            if not self._silent:
                print(result.text if self._to_text is None else painted(result, self._to_text), flush=True)
            yield result


def _numbered(results: Iterator[Result], total: int) -> Iterator[Result]:
    """The results; where one of several prompts cannot be decoded, the message says which."""
    for number in range(1, total + 1):
        try:
            result = next(results)
        except UserError as error:
            raise UserError(f"prompt {number} of {total}: {error}" if total > 1 else str(error)) from None
        yield result


def _report(
    decoder: Decoder,
    options: Namespace,
    request: Request,
    prompts: Sequence[Prompt],
    results: Sequence[Result],
    total: DecodeStats,
) -> dict[str, Any]:
    return {
        **describe(decoder.base, options.heads),
        "batch_size": options.batch_size,
        **settings_report(request),
        "seed": request.seed,
        "num_prompts": len(results),
        **total.to_json(),
        "tok_per_s": total.committed / max(total.total_seconds, 1e-9),
        "results": [
            {"prompt": prompt, **as_record(result)}
            for prompt, result in zip(prompts, results, strict=False)  # fewer results after Ctrl-C
        ],
    }


def _prompts(options: Namespace) -> list[Prompt]:
    text = options.prompt
    if (text is None) == (options.prompts is None):
        raise UserError("prompts are missing or given twice; use --prompt TEXT or --prompts FILE.")
    if text is None:
        return read_prompts(options.prompts, options.limit)
    for name, value, default in (("--limit", options.limit, None), ("--batch-size", options.batch_size, 1)):
        if value != default:
            raise UserError(f"{name} is {value}, but it only applies to --prompts FILE; leave it out.")
    return [text]
