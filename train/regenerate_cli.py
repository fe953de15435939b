"""`mtp-train regenerate`: the base answers prompts of a file or its own, here or in vLLM.

Knows: the options, the console, and which parts they call for.
Refuses to know: how answers are computed or kept.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import Progress

from decode.prompts import read_prompts
from decode.speed import speed_up
from decode.text import Prompt
from mtp.base import FrozenBase
from mtp.embedded import EMBEDDED, default_home, ensure_embedded
from mtp.errors import UserError
from train.against_generate import GENERATE_BATCH, Comparison, compare
from train.console import COLUMNS, load_base
from train.help import command_parser, read_options
from train.options import BaseOptions
from train.own_prompts import SOURCE, write_own_prompts
from train.regenerate import (
    BATCH_SIZE,
    Engine,
    batch_engine,
    check_settings,
    in_order,
    prompt_tasks,
    regenerate,
    to_conversations,
)
from train.run import interactive
from train.vllm_engine import require_vllm, vllm_engine


def regenerate_parser() -> ArgumentParser:
    """Options of `mtp-train regenerate`."""
    parser = command_parser(
        "regenerate",
        "The base answers prompts: the data its heads should be trained on. Resumes where it stopped.",
        (
            "--prompts configs/prompts/demo_train.jsonl --out runs/answers.jsonl",
            "--own-prompts 500 --out runs/own.jsonl",
            "--base org/name --engine vllm --prompts P.jsonl --out A.jsonl",
        ),
    )
    add = parser.add_argument
    add("--base", type=str, default=BaseOptions.name, help="embedded name, folder, .gguf or Hub id")
    add("--revision", type=str | None, default=None, help="of a Hub id")
    add("--dtype", type=str, default=BaseOptions.dtype, help="auto, float32, bfloat16, float16")
    add("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:0, … of --engine mtp")
    add("--trust-remote-code", action="store_true", help="run code that a Hub repository brings")
    add("--prompts", type=Path | None, default=None, help="JSONL with prompt, messages or turns")
    add("--own-prompts", type=int | None, default=None, help="instead: so many prompts that the base writes itself")
    add("--own-temperature", type=float, default=1.0, help="of the base's own prompts")
    add("--own-max-tokens", type=int, default=256, help="own prompts that are longer are dropped")
    add("--out", type=Path | None, default=None, help="JSONL to append answers to")
    add("--limit", type=int | None, default=None, help="answer only the first so many prompts")
    add("--max-new-tokens", type=int, default=256, help="per answer")
    add("--temperature", type=float, nargs="+", default=[0.7], help="one, or several used in turn; 0: greedy")
    add("--batch-size", type=int, default=BATCH_SIZE, help="answers in progress at a time, of --engine mtp")
    add("--seed", type=int, default=0, help="of the draws")
    add("--engine", type=Literal["mtp", "vllm"], default="mtp", help="vllm: hand the work to vLLM, if installed")
    add(
        "--compare-generate",
        type=int | None,
        default=None,
        help="write nothing; answer all prompts so many times here and by generate() of transformers, and time both",
    )
    return parser


def run_regenerate(arguments: list[str]) -> None:
    """`mtp-train regenerate`."""
    options = read_options(regenerate_parser(), arguments)
    console = Console(highlight=False, soft_wrap=True)
    _check(options)
    prompts = [] if options.prompts is None else read_prompts(options.prompts, options.limit)
    named = BaseOptions(
        name=options.base,
        revision=options.revision,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    # vLLM holds the weights itself; here they only tell what the base is, and leave it the accelerator.
    base = load_base(named, "cpu" if options.engine == "vllm" else options.device, console)
    if options.engine == "mtp":
        speed_up(base, None, "auto", default_home(os.environ), lambda said: console.print(said, highlight=False))
    if options.compare_generate is not None:
        _compare(base, prompts, options, console)
    else:
        _write(base, prompts, _engine(base, named, options), options, console)


def _check(options: Namespace) -> None:
    """UserError for options that do not go together, before anything is loaded."""
    if (options.prompts is None) == (options.own_prompts is None):
        given = "neither is given" if options.prompts is None else "both are given"
        raise UserError(f"--prompts and --own-prompts: {given}; give a file of prompts or a number of own ones.")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}; use at least 1, or leave it out for all prompts.")
    if options.compare_generate is None:
        if options.out is None:
            raise UserError("--out is missing; name a JSONL file to append answers to.")
    elif options.compare_generate < 1:
        raise UserError(f"--compare-generate is {options.compare_generate}; allowed is 1 or more rounds.")
    elif options.prompts is None or options.engine != "mtp" or len(options.temperature) != 1:
        raise UserError("--compare-generate needs --prompts, --engine mtp and one --temperature; change the others.")
    if options.engine == "vllm":
        require_vllm()


def _engine(base: FrozenBase, named: BaseOptions, options: Namespace) -> Engine:
    if options.engine == "mtp":
        return batch_engine(base, options.batch_size)
    home = default_home(os.environ)
    return vllm_engine(named, str(ensure_embedded(named.name, home)) if named.name in EMBEDDED else named.name)


def _write(base: FrozenBase, prompts: list[Prompt], engine: Engine, options: Namespace, console: Console) -> None:
    """Prompts, answers, and one line about both."""
    dropped, source = Counter[str](), SOURCE if options.prompts is None else options.prompts.name
    with Progress(*COLUMNS, console=console, disable=not interactive()) as progress:
        if options.own_prompts is not None:
            writing = progress.add_task("prompts", total=options.own_prompts)
            own = write_own_prompts(
                base,
                options.own_prompts,
                options.out,
                temperature=options.own_temperature,
                max_tokens=options.own_max_tokens,
                seed=options.seed,
                engine=engine,
                on_progress=lambda done, total: progress.update(writing, completed=done, total=total),
            )
            prompts, dropped = list(own.prompts[: options.limit]), own.dropped
        task = progress.add_task("answers", total=len(prompts))
        report = regenerate(
            base,
            to_conversations(prompts),
            options.out,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            source=source,
            engine=engine,
            on_progress=lambda done, total, tokens: progress.update(task, completed=done, total=total),
        )
    rate = report.tokens / max(1e-9, report.seconds)
    skipped = "".join(f", {n} skipped: {why}" for why, n in (dropped + report.skipped).items())
    console.print(
        f"{options.out}: {report.written} answers written, {report.found} already there{skipped}; "
        f"{report.tokens} tokens, {rate:.0f} tokens/s",
        markup=False,
    )


def _compare(base: FrozenBase, prompts: list[Prompt], options: Namespace, console: Console) -> None:
    """A line for each round, and one with the medians."""
    limit, skipped = options.max_new_tokens, Counter[str]()
    check_settings(base, limit, options.temperature, options.seed)
    batch_engine(base, options.batch_size)
    conversations = to_conversations(prompts)
    tasks = list(prompt_tasks(base, conversations, options.temperature, options.seed, limit, set(), skipped))
    if not tasks:
        raise UserError(f"--prompts {options.prompts} has no prompt that the base can answer; give another file.")
    rounds = []
    ordered = in_order(tasks, options.batch_size)
    for turn in compare(
        base, tasks, ordered, max_new_tokens=limit, slots=options.batch_size, rounds=options.compare_generate
    ):
        rounds.append(turn)
        console.print(
            f"{turn.rate:.1f} tokens/s ({turn.tokens} tokens), "
            f"generate() {turn.generate_rate:.1f} ({turn.generate_tokens})"
        )
    result = Comparison(rounds)
    console.print(
        f"{len(tasks)} prompts, {len(rounds)} rounds: {result.rate:.1f} tokens/s with --batch-size "
        f"{options.batch_size}, {result.generate_rate:.1f} by generate() in batches of {GENERATE_BATCH}; "
        f"ratio {result.ratio:.2f} (medians)"
    )
