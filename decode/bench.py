"""Speed with and without drafting, measured side by side.

Knows: three ways to decode the same prompts with the same settings: `mtp` (heads draft), `plain` (same engine, K = 0)
and `transformers` (`model.generate()`). Refuses to time one side differently: every side gets the same token ids, is
warmed up once, takes its turn on every prompt, and its wall time includes the prefill.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from decode.decoder import Decoder
from decode.engine import effective_rule
from decode.stats import DecodeStats
from decode.stopping import room
from decode.text import Prompt, encode
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import SamplingConfig

RIVALS = ("plain", "transformers")
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What every side is given."""

    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    draft_length: int | None = None
    seed: int = 0
    against: Sequence[str] = RIVALS
    chat: bool = True


@dataclass
class Side:
    """One way to decode, and what it has done so far."""

    name: str
    run: Callable[[list[int], int, int], tuple[int, DecodeStats | None]]
    """(prompt ids, max_new_tokens, seed) to the number of generated tokens and, from our engine, its statistics."""
    tokens: int = 0
    wall: float = 0.0
    stats: DecodeStats | None = None

    def measure(self, ids: list[int], max_new_tokens: int, seed: int) -> None:
        started = time.perf_counter()
        tokens, stats = self.run(ids, max_new_tokens, seed)  # ends with the ids on the CPU, hence after the device
        self.wall += time.perf_counter() - started
        self.tokens += tokens
        if stats and self.stats:
            self.stats.merge(stats)
        else:
            self.stats = stats

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per wall second, prefill included."""
        return self.tokens / self.wall if self.wall else 0.0

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {"name": self.name}
        if self.stats:
            seconds = dict(self.stats.seconds)
            seconds["other"] = self.wall - sum(seconds[phase] for phase in ("prefill", "draft", "verify"))
            report |= {
                "accept_len": self.stats.accept_len,
                "steps": self.stats.steps,
                "accepted_per_position": self.stats.accepted_per_position,
                "alpha": self.stats.alpha,
                "seconds": seconds,
            }
        return report | {"tok_per_s": self.tok_per_s, "tokens": self.tokens, "wall_seconds": self.wall}


def bench(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    heads_name: str,
    on_prompt: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run all sides over all prompts and report as JSON; `on_prompt` is called after each prompt.

    Raises UserError on settings that cannot be met, before anything is timed.
    """
    draft_length = decoder.engine.check_draft_length(settings.draft_length)
    sides = _sides(decoder, settings, draft_length)
    encoded = [encode(decoder.base.tokenizer, prompt, settings.chat) for prompt in prompts]
    budgets = [room(len(ids), decoder.base.context_length, settings.max_new_tokens).tokens for ids in encoded]
    for side in sides:
        side.run(encoded[0], min(budgets[0], _WARM_UP_TOKENS), settings.seed)
    for index, (ids, budget) in enumerate(zip(encoded, budgets, strict=True)):
        turn = index % len(sides)  # nobody is always first
        for side in sides[turn:] + sides[:turn]:
            side.measure(ids, budget, settings.seed)
        on_prompt()
    return _report(decoder.base, settings, sides, draft_length, len(encoded), heads_name)


def _sides(decoder: Decoder, settings: BenchSettings, draft_length: int) -> list[Side]:
    unknown = [name for name in settings.against if name not in RIVALS]
    if unknown:
        raise UserError(f"--against has {unknown[0]!r}; use any of {','.join(RIVALS)}.")
    runners = {
        "plain": _engine_runner(decoder, settings, 0),
        "transformers": _transformers_runner(decoder.base, settings),
    }
    rivals = [Side(name, runners[name]) for name in dict.fromkeys(settings.against)]
    return [Side("mtp", _engine_runner(decoder, settings, draft_length)), *rivals]


def _engine_runner(
    decoder: Decoder, settings: BenchSettings, draft_length: int
) -> Callable[[list[int], int, int], tuple[int, DecodeStats]]:
    def run(ids: list[int], max_new_tokens: int, seed: int) -> tuple[int, DecodeStats]:
        stream = decoder.open(
            ids, settings.sampling, max_new_tokens=max_new_tokens, seed=seed, draft_length=draft_length
        )
        for _ in stream:
            pass
        return len(stream.result.token_ids), stream.stats

    return run


def _transformers_runner(
    base: FrozenBase, settings: BenchSettings
) -> Callable[[list[int], int, int], tuple[int, None]]:
    def run(ids: list[int], max_new_tokens: int, seed: int) -> tuple[int, None]:
        tokens = torch.tensor([ids], device=base.device)
        with _generation_config(base, settings.sampling, max_new_tokens), torch.random.fork_rng():
            torch.manual_seed(seed)
            output = base.model.generate(tokens, attention_mask=torch.ones_like(tokens))
        return len(output[0].tolist()) - len(ids), None

    return run


@contextmanager
def _generation_config(base: FrozenBase, sampling: SamplingConfig, max_new_tokens: int) -> Iterator[None]:
    """Give `generate()` our settings and nothing of the base's own (penalties and the like) for a moment."""
    eos = list(base.eos_token_ids)
    choices: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        choices = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    before = base.model.generation_config
    base.model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, **choices
    )
    try:
        yield
    finally:
        base.model.generation_config = before


def _report(
    base: FrozenBase, settings: BenchSettings, sides: list[Side], draft_length: int, count: int, heads_name: str
) -> dict[str, Any]:
    ours = sides[0]
    return {
        **describe(base, heads_name),
        "draft_length": draft_length,
        "temperature": settings.sampling.temperature,
        "top_k": settings.sampling.top_k,
        "top_p": settings.sampling.top_p,
        "min_p": settings.sampling.min_p,
        "max_new_tokens": settings.max_new_tokens,
        "verify": effective_rule(settings.sampling),
        "num_prompts": count,
        "results": [side.to_json() for side in sides],
        "ratios": {side.name: ours.tok_per_s / side.tok_per_s if side.tok_per_s else 0.0 for side in sides[1:]},
    }


def describe(base: FrozenBase, heads_name: str | None) -> dict[str, Any]:
    """Where a number was measured: models, hardware, precision, versions."""
    return {
        "base": base.name,
        "heads": heads_name,
        "device": str(base.device),
        "hardware": torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else "cpu",
        "dtype": str(base.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
    }


def _versions() -> Mapping[str, str]:
    try:
        own = version("mtp-heads")
    except PackageNotFoundError:  # run from a checkout that was never installed
        own = "unknown"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "mtp": own}
