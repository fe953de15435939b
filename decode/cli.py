"""`mtp-decode`: the command line of decoding.

Knows: commands, terminals and exit codes (0 done, 1 a check failed, 2 bad input, 130 interrupted). Refuses to decode by
itself.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from decode import export_cli, lab, push_cli
from decode.bench import DEFAULT_RIVALS, RIVALS, bench, check_context, check_rivals, describe, settings_report
from decode.bench_page import check_report, write_report
from decode.bench_picture import check_plot, draw
from decode.check import NUM_FINDINGS, check
from decode.costs import CONTEXT
from decode.decoder import OTHER_BASE, Decoder
from decode.evidence import CheckSettings
from decode.options import add_request_options, read_request
from decode.png import write
from decode.prompts import read_categorised, read_prompts
from decode.record import Record, add_record_options
from decode.report import as_json, show_bench, show_findings, show_stats, tracked
from decode.request import Request
from decode.stats import DecodeStats
from decode.stream import Result, Stream
from decode.telemetry import vllm_counters
from decode.text import Prompt, plain_text
from decode.trace import trace
from decode.vllm_side import find_python
from mtp.errors import UserError

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def entry() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows its number
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        options = build_parser().parse_args(args)
        options[options.command].typed = list(sys.argv[1:] if args is None else args)  # a page says how it was made
        return COMMANDS[options.command](options[options.command]) or 0
    except (UserError, ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a name that is too long, a disk that is full
        print(
            f"error: {error.strerror or error} ({error.filename or 'output'}); choose another place.", file=sys.stderr
        )
        return BAD_INPUT
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def build_parser() -> ArgumentParser:
    """The parser with all commands."""
    about = "Decode with heads, exactly as the base."
    parser = ArgumentParser(prog="mtp-decode", description=about, exit_on_error=False, allow_abbrev=False)
    commands = parser.add_subcommands(dest="command")
    generate = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, description="Generate text; statistics go to stderr."
    )
    _add_models(generate)
    _add_prompts(generate)
    generate.add_argument("--prompt", type=str, help="one prompt (text)")
    generate.add_argument("--batch-size", type=int, default=1, help="prompts of the file that are decoded at a time")
    add_record_options(generate)
    add_request_options(generate)
    commands.add_subcommand("generate", generate, help="generate text")
    benchmark = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, description="Speed against decoding without heads."
    )
    _add_models(benchmark)
    _add_prompts(benchmark)
    benchmark.add_argument("--per-category", type=int | None, help="only the first prompts of each `category`")
    against = ",".join(DEFAULT_RIVALS)
    benchmark.add_argument("--against", default=against, help="comma-separated, from: " + ", ".join(RIVALS))
    benchmark.add_argument("--vllm", type=Path | None, help="for vllm: the Python of the environment that has it")
    told = "tokens of text behind which a forward over 1, 2, … rows is measured"
    benchmark.add_argument("--context", type=int, default=CONTEXT, help=told)
    benchmark.add_argument("--plot", type=Path | None, help="draw the speed-up over K here (.png)")
    page = "write a page with charts, tables and texts here (.html), and its charts beside it (.png)"
    benchmark.add_argument("--report", type=Path | None, help=page)
    add_record_options(benchmark)
    add_request_options(benchmark)
    commands.add_subcommand("bench", benchmark, help="compare speed")
    certificate = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, description="Is decoding with these heads lossless, here and now?"
    )
    _add_models(certificate)
    _add_prompts(certificate)
    certificate.add_argument("--samples", type=int, default=CheckSettings.samples, help="texts per chi-square test")
    certificate.add_argument("--max-new-tokens", type=int, default=CheckSettings.max_new_tokens, help="tokens per text")
    certificate.add_argument("--seed", type=int, default=CheckSettings.seed, help="of all draws")
    commands.add_subcommand("check", certificate, help="certify your own base and heads")
    laboratory = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=lab.ABOUT)
    lab.add_arguments(laboratory)
    commands.add_subcommand("lab", laboratory, help="see what each acceptance rule does to the distribution")
    exporter = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=export_cli.ABOUT)
    export_cli.add_arguments(exporter)
    commands.add_subcommand("export", exporter, help="write heads for vLLM, SGLang and others")
    importer = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=export_cli.ABOUT_IMPORT)
    export_cli.add_import_arguments(importer)
    commands.add_subcommand("import", importer, help="read heads made for vLLM, SGLang and others")
    pusher = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=push_cli.ABOUT)
    push_cli.add_arguments(pusher)
    commands.add_subcommand("push", pusher, help="send heads to the Hub")
    return parser


def _add_models(parser: ArgumentParser) -> None:
    add = parser.add_argument
    named = "folder of heads, smollm2-135m, or you/name[@revision] on the Hub; generate works without, from --base"
    add("--heads", type=str, help=named)
    add("--base", type=str, help="the base, if not found by the name in the heads' config")
    add("--revision", type=str, help="revision of a base on the Hub")
    add("--allow-other-base", action="store_true", help=f"take a base the heads were not trained for: {OTHER_BASE}")
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:N")
    add("--dtype", type=str, default="auto", help="auto, float32, bfloat16 or float16")
    add("--compile", type=str, default="auto", help="compiled kernels for steps on a CPU: auto, on or off")
    add("--quantise", type=str | None, help="int8: round the base's weights, which is then another p (needs torchao)")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the base")


def _add_prompts(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=Path | None, help="JSONL file; each line has prompt, messages or turns")
    add("--limit", type=int | None, help="use only the first prompts of the file")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")


def generate(options: Namespace) -> None:
    """`mtp-decode generate`."""
    request = read_request(options)
    prompts = _prompts(options)
    with Record(options, "generate") as record:
        decoder = _decoder(options)
        record.start({**describe(decoder.base, options.heads), **settings_report(request)})
        found = _numbered(_results(decoder, prompts, request, options.batch_size, silent=options.json), len(prompts))
        tokenizer = decoder.base.tokenizer
        results = [record.text(result, prompt, tokenizer) for result, prompt in zip(found, prompts, strict=True)]
        total = results[0].stats.empty()
        for result in results:
            total.merge(result.stats)
        show_stats(total)
        report = _generate_report(decoder, options, request, prompts, results, total)
        if options.json:
            _print_json(report)
        record.end(report)


def _numbered(results: Iterator[Result], total: int) -> Iterator[Result]:
    """The results; where one of several prompts cannot be decoded, the message says which."""
    for number in range(1, total + 1):
        try:
            result = next(results)
        except UserError as error:
            raise UserError(f"prompt {number} of {total}: {error}" if total > 1 else str(error)) from None
        yield result


def _results(
    decoder: Decoder, prompts: Sequence[Prompt], request: Request, batch_size: int, silent: bool
) -> Iterator[Result]:
    """In the order of the prompts. Texts are written as they are generated, or in a batch as they are done."""
    if batch_size == 1:
        yield from (_play(decoder.stream(prompt, request), silent) for prompt in prompts)
        return
    for result in decoder.generate_many(prompts, request, batch_size=batch_size):
        if not silent:
            print(result.text, flush=True)
        yield result


def _play(stream: Stream, silent: bool) -> Result:
    """Write the text as it is generated."""
    for piece in stream:
        if not silent:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    if not silent:
        sys.stdout.write("\n")
    return stream.result


def _generate_report(
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
        "num_prompts": len(prompts),
        **total.to_json(),
        **vllm_counters(total),
        "tok_per_s": total.committed / max(total.total_seconds, 1e-9),
        "results": [
            {
                "prompt": prompt,
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                **({} if result.logprobs is None else {"logprobs": result.logprobs}),
                "stats": result.stats.to_json(),
            }
            for prompt, result in zip(prompts, results, strict=True)
        ],
    }


def run_bench(options: Namespace) -> None:
    """`mtp-decode bench`."""
    if options.heads is None:
        raise UserError("--heads is missing; name the folder of heads to measure.")
    against = [name for name in options.against.split(",") if name]
    check_rivals(against)
    check_context(options.context)
    if options.vllm is not None and "vllm" not in against:
        raise UserError(f"--vllm is {options.vllm}, but --against has no vllm; add it, or leave --vllm out.")
    if "vllm" in against:
        find_python(options.vllm)
    request = read_request(options, seed=options.seed or 0)
    if options.prompts is None:
        raise UserError("prompts are missing; use --prompts FILE.")
    if options.plot is not None:
        check_plot(options.plot, request, against)
    if options.report is not None:
        check_report(options.report)
    found = read_categorised(options.prompts, options.limit, options.per_category)
    prompts, categories = [prompt for prompt, _ in found], [category for _, category in found]
    texts: list[Result] = []
    with Record(options, "bench") as record:
        decoder = _decoder(options)
        record.start({**describe(decoder.base, options.heads), **settings_report(request)})
        with tracked(len(prompts), "prompts") as advance:
            report = bench(
                *(decoder, prompts, request, options.heads, against, advance, categories, options.context),
                *(options.vllm, texts),
            )
        show_bench(report, to_stderr=options.json)
        if options.json:
            _print_json(report)
        record.end(report)
    if options.plot is not None:  # after the numbers, which a full disk is not to take along
        write(draw(report), options.plot, "--plot")
        print(f"picture: {options.plot}", file=sys.stderr)
    if options.report is not None:
        to_text = plain_text(decoder.base.tokenizer, special=True)
        traces = [trace(result, *of, to_text) for result, of in zip(texts, found, strict=True)]
        for path in write_report(report, traces, options.report, options.typed):
            print(f"report: {path}", file=sys.stderr)


def run_check(options: Namespace) -> int:
    """`mtp-decode check`; 1 when a check failed."""
    if options.heads is None:
        raise UserError("--heads is missing; name the folder of heads to check.")
    settings = CheckSettings(samples=options.samples, max_new_tokens=options.max_new_tokens, seed=options.seed)
    if options.prompts is not None:
        settings = replace(settings, prompts=read_prompts(options.prompts, options.limit))
    elif options.limit is not None:
        raise UserError(f"--limit is {options.limit}, but it only applies to --prompts FILE; leave it out.")
    decoder = _decoder(options)
    started = time.perf_counter()
    with tracked(NUM_FINDINGS, "checks") as advance:
        findings = check(decoder, settings, advance)
    passed = all(finding.passed for finding in findings)
    where = describe(decoder.base, options.heads)
    title = f"{where['base']} with {where['heads']}, {where['device']}, {where['dtype']}"
    show_findings(findings, title, time.perf_counter() - started, to_stderr=options.json)
    if options.json:
        checks = [vars(finding) for finding in findings]
        _print_json({**where, "passed": passed, "seed": options.seed, "checks": checks})
    return 0 if passed else CHECK_FAILED


COMMANDS: dict[str, Callable[[Namespace], int | None]] = {
    "generate": generate,
    "bench": run_bench,
    "check": run_check,
    "lab": lab.run,
    "export": export_cli.run,
    "import": export_cli.run_import,
    "push": push_cli.run,
}


def _prompts(options: Namespace) -> list[Prompt]:
    text = options.get("prompt")
    if (text is None) == (options.prompts is None):
        one_of = "--prompt TEXT or --prompts FILE" if "prompt" in options else "--prompts FILE"
        raise UserError(f"prompts are missing or given twice; use {one_of}.")
    if text is None:
        return read_prompts(options.prompts, options.limit)
    for name, value, default in (("--limit", options.limit, None), ("--batch-size", options.batch_size, 1)):
        if value != default:
            raise UserError(f"{name} is {value}, but it only applies to --prompts FILE; leave it out.")
    return [text]


def _decoder(options: Namespace) -> Decoder:
    return Decoder.from_pretrained(
        options.heads,
        options.base,
        revision=options.revision,
        device=options.device,
        dtype=options.dtype,
        quantise=options.quantise,
        trust_remote_code=options.trust_remote_code,
        compile=options.compile,
        allow_other_base=options.allow_other_base,
        on_progress=lambda text: print(text, file=sys.stderr),
    )


def _print_json(document: dict[str, Any]) -> None:
    print(as_json(document), flush=True)
