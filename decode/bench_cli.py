"""`mtp-decode bench`: speeds side by side, as a table, a JSON document and a picture.

Knows: its options, and how to stop. Refuses to measure (`decode.bench`).
"""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from decode.bench import (
    DEFAULT_RIVALS,
    RIVALS,
    bench,
    check_context,
    check_rivals,
    check_together,
    describe,
    settings_report,
)
from decode.bench_page import check_report, write_report
from decode.bench_picture import check_plot, draw
from decode.cli import INTERRUPTED
from decode.command import add_json, add_models, add_prompts, load_decoder, print_json
from decode.costs import CONTEXT
from decode.options import add_request_options, read_request
from decode.png import write
from decode.prompts import read_categorised
from decode.record import Record, add_record_options
from decode.report import show_bench
from decode.request import Request
from decode.stream import Result
from decode.terminal import Terminal
from decode.text import plain_text
from decode.trace import trace
from decode.vllm_side import find_python
from mtp.errors import UserError


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `bench`."""
    add_models(parser)
    add = add_prompts(parser)
    add("--per-category", type=int | None, metavar="N", help="only the first prompts of each `category`")
    add = parser.add_argument_group("measuring").add_argument
    against = ",".join(DEFAULT_RIVALS)
    add("--against", default=against, metavar="SIDES", help="comma-separated, from: " + ", ".join(RIVALS))
    add("--batch-size", type=int, default=1, metavar="N", help="prompts that every side decodes at a time")
    told = "tokens of text behind which a forward over 1, 2, … rows is measured"
    add("--context", type=int, default=CONTEXT, metavar="N", help=told)
    add("--vllm", type=Path | None, metavar="PYTHON", help="for vllm: the Python of the environment that has it")
    add("--plot", type=Path | None, metavar="FILE", help="draw the speed-up over K here (.png)")
    page = "write a page with charts, tables and texts here (.html), and its charts beside it (.png)"
    add("--report", type=Path | None, metavar="FILE", help=page)
    add_json(parser)
    add_record_options(parser)
    add_request_options(parser)


def run(options: Namespace) -> int:
    """`mtp-decode bench`."""
    if options.heads is None:
        raise UserError("--heads is missing; name the folder of heads to measure.")
    against = [name for name in options.against.split(",") if name]
    check_rivals(against)
    check_context(options.context)
    check_together(against, options.batch_size)
    _check_vllm(options, against)
    request = read_request(options, seed=options.seed or 0)
    if options.prompts is None:
        raise UserError("prompts are missing; use --prompts FILE.")
    _check_files(options, request, against)
    found = read_categorised(options.prompts, options.limit, options.per_category)
    prompts, categories = [prompt for prompt, _ in found], [category for _, category in found]
    terminal, texts = Terminal.of(options), list[Result]()
    with Record(options, "bench", terminal.say) as record:
        decoder = load_decoder(options, terminal)
        record.start({**describe(decoder.base, options.heads), **settings_report(request)})
        with terminal.tracked(len(prompts), "prompts") as advance, terminal.stoppable("this prompt") as stop:
            report = bench(
                *(decoder, prompts, request, options.heads, against, advance, categories, options.context),
                *(options.vllm, texts, stop, options.batch_size),
            )
        if not (options.json and terminal.quiet):
            show_bench(report, to_stderr=options.json)
        if options.json:
            print_json(report)
        record.end(report)
    if options.plot is not None:  # after the numbers, which a full disk is not to take along
        write(draw(report), options.plot, "--plot")
        terminal.say(f"picture: {options.plot}")
    if options.report is not None:
        to_text = plain_text(decoder.base.tokenizer, special=True)
        traces = [trace(result, *of, to_text) for result, of in zip(texts, found, strict=False)]  # fewer after Ctrl-C
        for path in write_report(report, traces, options.report, options.typed):
            terminal.say(f"report: {path}")
    if report["num_prompts"] < len(prompts):
        told = f"interrupted: these are {report['num_prompts']} of {len(prompts)} prompts"
        terminal.say(f"{told}; the same command measures all of them.")
        return INTERRUPTED
    return 0


def _check_vllm(options: Namespace, against: list[str]) -> None:
    if options.vllm is not None and "vllm" not in against:
        raise UserError(f"--vllm is {options.vllm}, but --against has no vllm; add it, or leave --vllm out.")
    if "vllm" in against:
        find_python(options.vllm)


def _check_files(options: Namespace, request: Request, against: list[str]) -> None:
    """Before anything is measured."""
    if options.plot is not None:
        check_plot(options.plot, request, against, options.batch_size)
    if options.report is not None:
        check_report(options.report)
        if options.plot is not None and options.plot.resolve() == options.report.with_suffix(".png").resolve():
            raise UserError(f"--plot is {options.plot}, where --report puts its own charts; use another name for one.")
