"""Decoding the prompts of a comparison: what is measured of each architecture, and what of it is on disk already.

Knows: the grid of K and temperatures, and on what a number depends. Refuses to know: training, tables and pictures.
The numbers come one after another, not in turns as in `decode.bench`: a busy machine shows in tokens/s.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode import Decoder, Request
from decode.bench import describe
from decode.png import put
from decode.stats import DecodeStats
from decode.text import Prompt
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.hub import file_hash, load_heads
from mtp.layers import use_kernels
from train.compare import Plan, Say

TEMPERATURES = (0.0, 1.0)
SEED = 0
_WARM_UP_TOKENS = 8


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(content, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another place.") from error


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
    with contextlib.suppress(OSError, StopIteration):  # Linux on x86 tells more; elsewhere the name above stands
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
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
    common = settings(base, prompts, request)
    found: dict[str, list[dict[str, Any]]] = {}
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
    use_kernels(heads, base.kernels)
    return Decoder(base, heads)
