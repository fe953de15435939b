"""`mtp-decode`: the command line of decoding.

Knows: options, terminals and exit codes (0 done, 2 bad input, 130 interrupted). Refuses to decode by itself.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from decode.bench import RIVALS, BenchSettings, bench, describe
from decode.decoder import Decoder, Result, Stream
from decode.prompts import read_prompts
from decode.report import show_bench, show_stats, tracked
from decode.stats import DecodeStats
from decode.text import Prompt
from mtp.errors import UserError
from mtp.sampling import SamplingConfig

BAD_INPUT, INTERRUPTED = 2, 130


def entry() -> None:
    """The console script."""
    sys.exit(main())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        options = build_parser().parse_args(args)
        command: Callable[[Namespace], None] = COMMANDS[options.command]
        command(options[options.command])
    except (UserError, ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    return 0


def build_parser() -> ArgumentParser:
    """The parser with all commands."""
    about = "Decode with heads, exactly as the base."
    parser = ArgumentParser(prog="mtp-decode", description=about, exit_on_error=False)
    commands = parser.add_subcommands(dest="command")
    generate = ArgumentParser(exit_on_error=False, description="Generate text; statistics go to stderr.")
    _add_models(generate)
    _add_sampling(generate)
    generate.add_argument("--prompt", type=str | None, help="one prompt (text)")
    generate.add_argument("--stop", type=str, nargs="+", action="extend", default=[], help="texts that end generation")
    commands.add_subcommand("generate", generate, help="generate text")
    benchmark = ArgumentParser(exit_on_error=False, description="Speed against decoding without heads.")
    _add_models(benchmark)
    _add_sampling(benchmark)
    benchmark.add_argument("--against", default=",".join(RIVALS), help="comma-separated, from: " + ", ".join(RIVALS))
    commands.add_subcommand("bench", benchmark, help="compare speed")
    return parser


def _add_models(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--heads", type=str | None, help="folder of trained heads; generate works without, from --base alone")
    add("--base", type=str | None, help="the base, if not found by the name in the heads' config")
    add("--revision", type=str | None, help="revision of a base on the Hub")
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:N")
    add("--dtype", type=str, default="auto", help="auto, float32, bfloat16 or float16")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the base")


def _add_sampling(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=Path | None, help="JSONL file; each line has prompt, messages or turns")
    add("--limit", type=int | None, help="use only the first prompts of the file")
    add("--max-new-tokens", type=int, default=128, help="most tokens to generate per prompt")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 is off")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass; 1 is off")
    add("--min-p", type=float, default=0.0, help="keep tokens this likely relative to the likeliest; 0 is off")
    add("--draft-length", type=int | None, help="K; default: what was trained; 0 decodes plainly")
    add("--seed", type=int | None, help="makes the draws repeatable; each prompt starts from it")
    add("--no-chat", action="store_true", help="do not put the prompt into the chat template")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")


def generate(options: Namespace) -> None:
    """`mtp-decode generate`."""
    sampling = _sampling(options)
    prompts = _prompts(options)
    decoder = _decoder(options)
    results = []
    for prompt in prompts:
        stream = decoder.open(
            prompt,
            sampling,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            draft_length=options.draft_length,
            stop=options.stop,
            chat=not options.no_chat,
        )
        results.append(_play(stream, silent=options.json))
    total = DecodeStats(results[0].stats.rule, results[0].stats.draft_length)
    for result in results:
        total.merge(result.stats)
    show_stats(total)
    if options.json:
        _print_json(_generate_report(decoder, options, prompts, results, total))


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
    decoder: Decoder, options: Namespace, prompts: Sequence[Prompt], results: Sequence[Result], total: DecodeStats
) -> dict[str, Any]:
    return {
        **describe(decoder.base, options.heads),
        "temperature": options.temperature,
        "seed": options.seed,
        "num_prompts": len(prompts),
        **total.to_json(),
        "tok_per_s": total.committed / max(total.total_seconds, 1e-9),
        "results": [
            {
                "prompt": prompt,
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "stats": result.stats.to_json(),
            }
            for prompt, result in zip(prompts, results, strict=True)
        ],
    }


def run_bench(options: Namespace) -> None:
    """`mtp-decode bench`."""
    if options.heads is None:
        raise UserError("--heads is missing; name the folder of heads to measure.")
    settings = BenchSettings(
        max_new_tokens=options.max_new_tokens,
        sampling=_sampling(options),
        draft_length=options.draft_length,
        seed=options.seed or 0,
        against=[name for name in options.against.split(",") if name],
        chat=not options.no_chat,
    )
    prompts = _prompts(options)
    decoder = _decoder(options)
    with tracked(len(prompts), "prompts") as advance:
        report = bench(decoder, prompts, settings, options.heads, advance)
    show_bench(report, to_stderr=options.json)
    if options.json:
        _print_json(report)


COMMANDS: dict[str, Callable[[Namespace], None]] = {"generate": generate, "bench": run_bench}


def _sampling(options: Namespace) -> SamplingConfig:
    return SamplingConfig(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )


def _prompts(options: Namespace) -> list[Prompt]:
    text = options.get("prompt")
    if (text is None) == (options.prompts is None):
        one_of = "--prompt TEXT or --prompts FILE" if "prompt" in options else "--prompts FILE"
        raise UserError(f"prompts are missing or given twice; use {one_of}.")
    if text is None:
        return read_prompts(options.prompts, options.limit)
    if options.limit is not None:
        raise UserError(f"--limit is {options.limit}, but it only applies to --prompts FILE; leave it out.")
    return [text]


def _decoder(options: Namespace) -> Decoder:
    return Decoder.from_pretrained(
        options.heads,
        options.base,
        revision=options.revision,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        on_progress=lambda text: print(text, file=sys.stderr),
    )


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)
