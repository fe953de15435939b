"""Several architectures, trained on the same: which configs may be compared, and their runs.

Knows: what must be alike, and how a half-done comparison goes on. Refuses to know: command lines, decoding, tables and
pictures. Runs that were not made alike are refused: other data, tokens, base or K are an error that names the keys.
"""

import gc
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp.errors import UserError
from train.fit import fit, parse, plain, quiet_lightning
from train.inspect_cli import InspectCLI
from train.run import read_record

BY_DESIGN = ("model.heads.", "model.optimizer.", "model.start_positions")
ALIKE = "model.heads.draft_length"
_ELSEWHERE = ("run.", "config", "ckpt_path", "count", "json", "data.cache_dir", "model.features.dir")
_LEFTOVERS = {"config.yaml", "run.json", "csv", "wandb", "checkpoints", "heads", ".heads.replaced"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """One config of a comparison: what to train, and where."""

    path: Path
    arguments: list[str]
    """Of `train.fit.fit`."""
    folder: Path
    """Of its run."""
    keys: dict[str, Any]
    """Every key that bears on the result, dotted, as resolved."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def draft_length(self) -> int:
        return int(self.keys[ALIKE])

    @property
    def heads(self) -> Path:
        return self.folder / "heads"

    @property
    def record(self) -> dict[str, Any]:
        return read_record(self.folder)

    @property
    def finished(self) -> bool:
        return "tokens_trained" in self.record


# ---- what is compared ------------------------------------------------------------------------------------------------


def read_plans(configs: Path, out: Path, changes: Sequence[str] = ()) -> list[Plan]:
    """The configs of a folder, in the order of their names, with `changes` (key=value) applied to each of them.

    UserError for a folder without configs, a change that cannot be made, and configs that are not alike.
    """
    paths = sorted(configs.glob("*.yaml"))
    if not paths:
        raise UserError(f"--configs {configs} holds no .yaml file; name a folder such as configs/compare.")
    options = [_as_option(change) for change in changes]
    plans = [_plan(path, out, options) for path in paths]
    check_alike(plans)
    for plan in plans:
        _check_same_run(plan)
    return plans


def _as_option(change: str) -> str:
    key, found, _ = change.partition("=")
    if not found or not key or key.startswith("-"):
        raise UserError(f"--set is {change!r}; give key=value, such as trainer.max_steps=20.")
    if key in ("run", "run.name", "run.dir", "ckpt_path"):
        raise UserError(f"--set is {change!r}, which a comparison decides itself; leave it out and use --out.")
    return f"--{change}"


def _plan(path: Path, out: Path, options: list[str]) -> Plan:
    where = [*options, "--run.dir", str(out), "--run.name", path.stem]
    arguments = ["--config", str(path), *where]
    return Plan(path, arguments, out / path.stem, _resolved(arguments))


def _resolved(arguments: list[str]) -> dict[str, Any]:
    """The keys of a command line that bear on the result. Model and data are made from it, so bad values show here."""
    quiet_lightning()
    keys = flatten(plain(parse(arguments, InspectCLI).config))
    return {key: value for key, value in keys.items() if not key.startswith(_ELSEWHERE)}


def flatten(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    if not isinstance(nested, dict) or not nested:
        return {prefix: nested}
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys whose values differ, in order."""
    return [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]


def check_alike(plans: Sequence[Plan]) -> None:
    """UserError where configs differ in more than the architecture and how it is best optimised."""
    first = plans[0]
    for plan in plans[1:]:
        keys = differing(first.keys, plan.keys)
        wrong = [key for key in keys if key == ALIKE or not key.startswith(BY_DESIGN)]
        if wrong:
            values = "; ".join(f"{key}: {first.keys.get(key)} and {plan.keys.get(key)}" for key in wrong)
            raise UserError(
                f"{first.path} and {plan.path} differ in {values}. A comparison needs the same base, data, tokens, "
                f"loss and draft_length: set them alike, in the files or with --set {wrong[0]}=…. Only model.heads.* "
                "(but draft_length), model.optimizer.* and model.start_positions may differ."
            )
    limit = first.keys.get("trainer.max_time")
    if limit is not None:
        raise UserError(
            f"trainer.max_time is {limit}, which gives a slow architecture fewer tokens; a comparison needs the same "
            "number for each: remove it and use trainer.max_steps."
        )
    devices = first.keys.get("trainer.devices")
    if devices not in (None, "auto", 1, "1"):
        raise UserError(
            f"trainer.devices is {devices}, and a comparison trains and measures in one process; set it to 1, or train "
            "each config on its own."
        )


def _check_same_run(plan: Plan) -> None:
    """UserError where the run's folder holds a run of another configuration."""
    saved = plan.folder / "config.yaml"
    if not saved.is_file():
        return
    before = _resolved(["--config", str(saved)])
    keys = differing(before, plan.keys)
    if keys:
        values = "; ".join(f"{key}: {before.get(key)}, now {plan.keys.get(key)}" for key in keys)
        raise UserError(
            f"{plan.folder} was trained with another configuration than {plan.path} asks for ({values}); name another "
            "--out, or remove that folder to train it anew."
        )


# ---- training --------------------------------------------------------------------------------------------------------


def train_all(plans: Sequence[Plan], say: Say) -> None:
    """Train what is not trained yet; an interrupted run goes on from its checkpoint."""
    for plan in plans:
        if plan.finished:
            say(f"{plan.name}: trained already, in {plan.folder}")
            continue
        checkpoint = plan.folder / "checkpoints" / "last.ckpt"
        if checkpoint.is_file():
            say(f"{plan.name}: goes on from {checkpoint}")
            fit([*plan.arguments, "--ckpt_path", str(checkpoint)])
        else:
            _clear(plan)
            fit(plan.arguments)
        gc.collect()  # a trainer refers to itself, and holds a base
    check_same_tokens(plans)


def _clear(plan: Plan) -> None:
    """Remove what is left of a run that ended before its first checkpoint."""
    if not plan.folder.exists():
        return
    foreign = {path.name for path in plan.folder.iterdir()} - _LEFTOVERS
    if foreign:
        raise UserError(
            f"--out: {plan.folder} is no run of mtp-train, it holds {min(foreign)}; name another folder as --out."
        )
    shutil.rmtree(plan.folder)


def check_same_tokens(plans: Sequence[Plan]) -> None:
    """UserError unless all runs saw as many tokens: they differ where a data file has changed in between."""
    seen = {plan.name: plan.record["tokens_trained"] for plan in plans}
    if len(set(seen.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in seen.items())
        raise UserError(
            f"the runs in {plans[0].folder.parent} saw different numbers of tokens ({counts}); a comparison needs the "
            "same: remove the folders of those trained on an earlier state of the data, and repeat the command."
        )
