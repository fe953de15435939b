"""`mtp-train compare`: train every config of a folder, decode with each, and show table and picture.

Knows: the options, the console, and the files in --out. Refuses to know: how anything is trained, measured or drawn.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from decode.prompts import read_prompts
from decode.report import Screen, as_json
from decode.request import Request
from decode.speed import speed_up
from decode.text import Prompt
from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from train.compare import Plan, read_plans, train_all
from train.compare_measure import SEED, TEMPERATURES, Results, measure_all, settings, write_whole
from train.compare_picture import draw
from train.compare_table import console_tables, footer, markdown, row, with_block
from train.console import load_base
from train.help import command_parser, read_options
from train.options import BaseOptions

PICTURE = Path("train/pictures/compare.png")  # of a README, beside it


def compare_parser() -> ArgumentParser:
    """Options of `mtp-train compare`."""
    parser = command_parser(
        "compare",
        "Trains each config of a folder on the same data, decodes with each, and writes compare.md, .json and .png. "
        "Resumes where it stopped: what is trained or measured is not done again.",
        (
            "--prompts configs/prompts/demo_heldout.jsonl",
            "--configs configs/compare --out runs/compare --prompts P.jsonl --set trainer.max_steps=100",
        ),
    )
    add = parser.add_argument
    add("--configs", type=Path, default=Path("configs/compare"), help="folder of YAML files, one per architecture")
    add("--out", type=Path, default=Path("runs/compare"), help="folder for the runs, results.json and compare.*")
    add("--prompts", type=Path, required=True, help="JSONL with prompt, messages or turns, to decode")
    add("--limit", type=int | None, default=None, help="decode only the first so many prompts")
    add("--max-new-tokens", type=int, default=64, help="per prompt")
    add("--set", action="append", type=str, default=[], help="key=value for every config; may be repeated")
    add("--readme", type=Path | None, default=None, help=f"put the table between its markers, the picture in {PICTURE}")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")
    return parser


def run_compare(arguments: list[str]) -> None:
    """`mtp-train compare`."""
    options = read_options(compare_parser(), arguments)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True, markup=False)
    prompts = read_prompts(options.prompts, options.limit)
    request = Request(max_new_tokens=options.max_new_tokens, seed=SEED)
    readme = None if options.readme is None else _read_readme(options.readme)
    plans = read_plans(options.configs, options.out, options.set)
    with held(options.out):
        _compare(options, plans, prompts, request, console, readme)


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The folder of a comparison for this process alone. UserError while another one works in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"--out {out} is being written by another comparison; wait for it, or name another.") from None
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name a folder that can be written.") from None
    try:
        yield
    finally:
        lock.release()


def _compare(
    options: Namespace,
    plans: list[Plan],
    prompts: list[Prompt],
    request: Request,
    console: Console,
    readme: str | None,
) -> None:
    """Train, measure, and show."""
    results = Results(options.out / "results.json")
    train_all(plans, console.print)
    base = _load_base(plans[0], console)
    measured = measure_all(plans, base, prompts, request, results, console.print)
    about = {"base": base.name, "data": _data(plans[0]), "prompts": str(options.prompts)}
    document = make_document(plans, measured, {**about, **settings(base, prompts, request)})
    _write(document, options, readme)
    Screen(stderr=options.json, highlight=False).print(*console_tables(document))
    console.print(footer(document))
    console.print(f"written: {', '.join(str(options.out / f'compare.{kind}') for kind in ('md', 'json', 'png'))}")
    if options.json:
        print(as_json(document), flush=True)


def _load_base(plan: Plan, console: Console) -> FrozenBase:
    """The base of all configs, on the device that they train on."""
    prefix = "model.base."
    named = {key.removeprefix(prefix): value for key, value in plan.keys.items() if key.startswith(prefix)}
    device = "cpu" if plan.keys["trainer.accelerator"] == "cpu" else "auto"
    base = load_base(BaseOptions(**named), device, console)
    speed_up(base, None, "auto", default_home(os.environ), console.print)
    return base


def _data(plan: Plan) -> str:
    """`data.train` in a few words: its files, with weights where there are some."""
    train = plan.keys.get("data.train")
    if train is None:  # a mapping, which flattening took apart
        prefix = "data.train."
        return ", ".join(f"{k.removeprefix(prefix)} × {v}" for k, v in plan.keys.items() if k.startswith(prefix))
    return ", ".join(train) if isinstance(train, list) else str(train)


def make_document(
    plans: list[Plan], measured: dict[str, list[dict[str, Any]]], about: dict[str, Any]
) -> dict[str, Any]:
    """compare.json: a row for each config, decoding without heads, and what belongs to the figures."""
    return {
        "about": about,
        "draft_length": plans[0].draft_length,
        "temperatures": list(TEMPERATURES),
        "rules": {f"{one['temperature']:g}": one["verify"] for one in measured[plans[0].name]},
        "plain": measured[""],
        "rows": [row(plan.name, plan.record, plan.keys["model.heads.kind"], measured[plan.name]) for plan in plans],
    }


def _read_readme(path: Path) -> str:
    """The text of --readme, known to have a place for the table before anything is trained."""
    if not path.is_file():
        raise UserError(f"--readme {path} is not a file; name a Markdown file with the markers of a comparison.")
    text = path.read_text(encoding="utf-8")
    with_block(text, "", str(path))
    return text


def _write(document: dict[str, Any], options: Namespace, readme: str | None) -> None:
    table, picture = markdown(document), draw(document)
    write_whole(options.out / "compare.json", f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode())
    write_whole(options.out / "compare.md", table.encode())
    write_whole(options.out / "compare.png", picture)
    if readme is not None:
        write_whole(options.readme.parent / PICTURE, picture)
        block = f"{table}\n![Acceptance length over K, by architecture]({PICTURE.as_posix()})\n"
        write_whole(options.readme, with_block(readme, block, str(options.readme)).encode())
