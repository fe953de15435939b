"""Several architectures, trained on the same and decoded with the same: what `mtp-train compare` measures.

Knows: which configs may be compared, how a half-done comparison goes on, and what is measured of each pair of heads.
Refuses to know: command lines, tables and pictures. One comparison refuses to hold numbers that were not made alike:
other data, tokens, base or K are an error that names the keys.

The numbers of a row come one after another, not in turns as in `decode.bench`: a busy machine shows in tokens/s.
"""

import gc
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decode import Decoder, Request
from decode.bench import describe
from decode.stats import DecodeStats
from decode.text import Prompt
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.hub import file_hash, load_heads
from train.cli import InspectCLI, fit, parse, plain, quiet_lightning
from train.run import read_record

TEMPERATURES = (0.0, 1.0)
SEED = 0
BY_DESIGN = ("model.heads.", "model.optimizer.", "model.start_positions")
ALIKE = "model.heads.draft_length"
_ELSEWHERE = ("run.", "config", "ckpt_path", "count", "json", "data.cache_dir", "model.features.dir")
_LEFTOVERS = {"config.yaml", "run.json", "csv", "wandb", "checkpoints", "heads", "heads.old"}
_WARM_UP_TOKENS = 8
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """One config of a comparison: what to train, and where."""

    path: Path
    arguments: list[str]
    """Of `train.cli.fit`."""
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
    if key == "ckpt_path" or f"{key}.".startswith("run."):
        raise UserError(f"--set is {change!r}, which a comparison decides itself; leave it out, --out names the folder.")
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
                f"loss and draft_length: set them alike, in the files or with --set {wrong[0]}=…. Allowed to differ are "
                "model.heads.* (but not draft_length), model.optimizer.* and model.start_positions."
            )
    limit = first.keys.get("trainer.max_time")
    if limit is not None:
        raise UserError(
            f"trainer.max_time is {limit}, which gives a slow architecture fewer tokens; a comparison needs the same "
            "number for each: remove it and use trainer.max_steps."
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


# ---- decoding --------------------------------------------------------------------------------------------------------


class Results:
    """Measurements on disk, each under everything it depends on. The file is whole after each `add`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        if path.exists():
            try:
                self.entries = [{"of": entry["of"], "measured": entry["measured"]} for entry in _read_list(path)]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path} cannot be read ({error}); remove it to measure again.") from None

    def find(self, of: dict[str, Any]) -> dict[str, Any] | None:
        return next((entry["measured"] for entry in self.entries if entry["of"] == of), None)

    def add(self, of: dict[str, Any], measured: dict[str, Any]) -> None:
        self.entries.append({"of": of, "measured": measured})
        write_whole(self.path, json.dumps(self.entries, indent=1).encode())


def _read_list(path: Path) -> list[Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise ValueError("no list")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """The whole file or nothing. UserError where it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another place.") from error
    finally:
        part.unlink(missing_ok=True)


def settings(base: FrozenBase, prompts: Sequence[Prompt], request: Request) -> dict[str, Any]:
    """What every number depends on, besides heads, K and temperature."""
    facts = {key: value for key, value in describe(base, None).items() if key not in ("base", "heads")}
    if facts["hardware"] == "cpu":
        facts["hardware"] = processor()
    return {
        **facts,
        "base_fingerprint": base.fingerprint(),
        "prompts_sha256": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16],
        "num_prompts": len(prompts),
        "max_new_tokens": request.max_new_tokens,
        "seed": request.seed,
    }


def processor() -> str:
    """The CPU's name and number of cores, as far as the system tells."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"


def measure(decoder: Decoder, prompts: Sequence[Prompt], request: Request) -> dict[str, Any]:
    """Decode all prompts. tokens/s is over wall time, prefill included; the first text is decoded before, untimed."""
    decoder.generate(prompts[0], replace(request, max_new_tokens=min(_WARM_UP_TOKENS, request.max_new_tokens)))
    total: DecodeStats | None = None
    started = time.perf_counter()
    for prompt in prompts:
        stats = decoder.generate(prompt, request).stats
        if total is None:
            total = stats
        else:
            total.merge(stats)
    wall = time.perf_counter() - started
    assert total is not None, "there are prompts"
    return {
        "draft_length": request.draft_length,
        "temperature": request.temperature,
        "verify": total.rule,
        "accept_len": total.accept_len,
        "accepted_per_position": total.accepted_per_position,
        "tok_per_s": total.committed / max(wall, 1e-9),
        "tokens": total.committed,
        "steps": total.steps,
        "wall_seconds": wall,
    }


def measure_all(
    plans: Sequence[Plan], base: FrozenBase, prompts: Sequence[Prompt], request: Request, results: Results, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Measurements by config, and "" for decoding without heads: every temperature, K from 1 to what was trained."""
    common, found = settings(base, prompts, request), {}
    for name, heads, lengths in [("", None, [0]), *((p.name, p.heads, range(1, p.draft_length + 1)) for p in plans)]:
        digest = None if heads is None else file_hash(heads / "model.safetensors")
        decoder: Decoder | None = None
        found[name] = []
        for temperature in TEMPERATURES:
            for length in lengths:
                of = {"name": name, "heads": digest, "draft_length": length, "temperature": temperature, **common}
                measured = results.find(of)
                if measured is None:
                    decoder = decoder or load_decoder(base, heads)
                    measured = measure(decoder, prompts, replace(request, draft_length=length, temperature=temperature))
                    results.add(of, measured)
                    say(
                        f"{name or 'no heads'}, T = {temperature:g}, K = {length}: "
                        f"acceptance length {measured['accept_len']:.2f}, {measured['tok_per_s']:.1f} tokens/s"
                    )
                found[name].append(measured)
    return found


def load_decoder(base: FrozenBase, folder: Path | None) -> Decoder:
    """Heads of a folder on a base that is loaded already."""
    if folder is None:
        return Decoder(base)
    heads = load_heads(folder)
    heads.to(device=base.device, dtype=base.dtype).eval()
    heads.bind(base.embedding, base.output_matrix)
    return Decoder(base, heads)
