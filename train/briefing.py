"""The words before the first step and after the last: what is trained, on what, how long, how large; what came of it.

Knows: how to say it within 60 columns. Refuses to know: how any of it is measured.
"""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from decode.failures import counted
from mtp.base import FrozenBase
from mtp.formats.catalogue import FORMATS
from mtp.heads import Heads
from train.disk import Disk, size
from train.pace import Pace, in_words
from train.report import DataReport

WIDTH, INDENT = 60, " " * 10
HELD_OUT = Path("configs/prompts/demo_heldout.jsonl")


def briefing(heads: Heads, base: FrozenBase, report: DataReport, plan: str, memory: str, disk: str) -> list[str]:
    """What is about to be trained, a fact per line."""
    config = heads.config
    count = sum(p.numel() for p in heads.parameters())
    vocabulary = f"{config.proposals:,} of {config.vocab_size:,} tokens"
    return [
        "before the first step",
        f"  heads   {config.kind}, K = {config.draft_length}, {count / 1e6:.1f} M parameters",
        f"          drafting {vocabulary}",
        f"  base    {base.name}",
        f"          {base.num_layers} layers, {str(base.dtype).removeprefix('torch.')}, {base.device}, frozen",
        f"  data    {report.kept:,} records, {report.supervised_tokens:,} supervised tokens",
        f"  steps   {plan}",
        f"  memory  {memory.removeprefix('memory: ')}",
        f"  disk    {disk}",
    ]


def steps_in_words(steps: float, done: int, rows: int, epoch: float) -> str:
    """steps: of the whole run; rows: in a step; epoch: steps in one."""
    first = "no end" if steps == float("inf") else f"{steps:,.0f}"
    rest = f", {done:,} done" if done else ""
    told = f" = {epochs_in_words(steps / epoch)}" if 0 < epoch < float("inf") and steps < float("inf") else ""
    return f"{first} of {rows} rows{told}{rest}"


def epochs_in_words(epochs: float) -> str:
    """Of a large source a run may see a small part."""
    return f"{epochs:,.1f} epochs" if epochs >= 0.1 else f"{epochs:.1g} epochs"


def disk_in_words(disk: Disk, told: str) -> str:
    """The whole, and its parts on a line below."""
    parts = {"checkpoint": disk.checkpoint, "heads": disk.heads, "features": disk.features, "records": disk.records}
    listed = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
    return f"{told}\n{textwrap.fill(listed, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)}"


def time_in_words(pace: Pace, steps: float, validations: float, limit: float | None) -> str:
    """How long the rest takes. limit: seconds after which training ends in any case."""
    left, step = pace.left(steps, validations), pace.per_step
    if left is None or step is None:
        return "  time    known after the first steps"
    how = "measured" if pace.sure else "guessed"  # from one pass, a cold one
    until = left if limit is None else min(left, limit)
    lines = [f"  time    about {in_words(until)} left: {in_words(step)} a step, {how}"]
    if limit is not None and limit < left:
        lines.append(f"          trainer.max_time ends it before {steps:,.0f} more steps")
    if validations >= 1 and pace.per_validation is None:
        lines.append(f"          and {counted(round(validations), 'validation')}, not yet measured")
    return "\n".join(lines)


# ---- after the last step -----------------------------------------------------------------------------------------


def acceptance_table(metrics: Mapping[str, float], draft_length: int) -> list[str]:
    """Per draft position: alpha, how often drafts 1 to k are all kept, and what decoding kept. Empty without
    validation."""
    if "val/alpha/1" not in metrics:
        return []
    lines = [f"{'draft':>5}  {'alpha':>6}  {'1..k kept':>9}  {'decoded':>7}"]
    for k in range(1, draft_length + 1):
        values = [metrics.get(f"{name}/{k}") for name in ("val/alpha", "val/cumulative", "decode/accepted")]
        alpha, product, decoded = ("-" if value is None or value != value else f"{value:.3f}" for value in values)
        lines.append(f"{k:>5}  {alpha:>6}  {product:>9}  {decoded:>7}")
    return lines


def next_commands(folder: Path, heads: Heads, base: FrozenBase, prompts: str | None) -> list[str]:
    """What to do with the heads in `folder`: decode, bench, check, export and push, a command per line."""
    name = shlex.quote(str(folder))
    prompts = prompts or (str(HELD_OUT) if HELD_OUT.is_file() else None)
    commands = [f'mtp-decode generate --heads {name} --prompt "Why is the sky blue?"']
    if prompts is not None:
        commands.append(f"mtp-decode bench --heads {name} --prompts {shlex.quote(prompts)} --limit 8")
    commands.append(f"mtp-decode check --heads {name}")
    fitting = formats(heads, base)
    if fitting:
        out = shlex.quote(str(folder.parent / fitting[0]))
        commands.append(f"mtp-decode export --heads {name} --format {fitting[0]} --output {out}")
    return [*commands, f"mtp-decode push --heads {name} --repo you/{shlex.quote(folder.parent.name)} --license LICENCE"]


def formats(heads: Heads, base: FrozenBase) -> Sequence[str]:
    """Names of the formats that can express these heads."""
    return [name for name, one in FORMATS.items() if one.fault(heads, base) is None]
