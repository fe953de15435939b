"""Speed with and without drafting, measured side by side.

Knows: three ways to decode the same prompts with the same settings: `mtp` (heads draft), `plain` (same engine, K = 0)
and `transformers` (`model.generate()`). Refuses to time one side differently: every side gets the same token ids, is
warmed up once, takes its turn on every prompt, and its wall time includes the prefill.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from decode.decoder import Decoder
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import room
from decode.text import Prompt, encode
from mtp.base import FrozenBase
from mtp.errors import UserError

RIVALS = ("plain", "transformers")
_NOT_SETTINGS = {"max_new_tokens", "draft_length", "verify", "tree", "chat"}
_WARM_UP_TOKENS = 8


@dataclass
class Side:
    """One way to decode, and what it has done so far."""

    name: str
    run: Callable[[list[int], int], tuple[int, DecodeStats | None]]
    """(prompt ids, max_new_tokens) to the number of generated tokens and, from our engine, its statistics."""
    tokens: int = 0
    wall: float = 0.0
    stats: DecodeStats | None = None
    by_category: dict[str, DecodeStats] = field(default_factory=dict)

    def measure(self, ids: list[int], max_new_tokens: int, category: str | None = None) -> None:
        started = time.perf_counter()
        tokens, stats = self.run(ids, max_new_tokens)  # ends with the ids on the CPU, hence after the device
        self.wall += time.perf_counter() - started
        self.tokens += tokens
        if stats is None:
            return
        self.stats = self.stats or stats.empty()
        self.stats.merge(stats)
        if category is not None:
            self.by_category.setdefault(category, stats.empty()).merge(stats)

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per wall second, prefill included."""
        return self.tokens / self.wall if self.wall else 0.0

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {"name": self.name}
        if self.stats:
            seconds = dict(self.stats.seconds)
            seconds["other"] = self.wall - sum(spent for phase, spent in seconds.items() if phase != "other")
            report |= {
                "accept_len": self.stats.accept_len,
                "steps": self.stats.steps,
                "accepted_per_position": self.stats.accepted_per_position,
                "alpha": self.stats.alpha,
                "seconds": seconds,
                "rule_share": seconds["rule"] / max(self.wall - seconds["prefill"], 1e-9),
            }
        if self.by_category:
            lengths = {name: stats.accept_len for name, stats in sorted(self.by_category.items())}
            report |= {"accept_len_by_category": lengths, "accept_len_category_mean": fmean(lengths.values())}
        return report | {"tok_per_s": self.tok_per_s, "tokens": self.tokens, "wall_seconds": self.wall}


def bench(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    request: Request,
    heads_name: str,
    against: Sequence[str] = RIVALS,
    on_prompt: Callable[[], None] = lambda: None,
    categories: Sequence[str | None] | None = None,
) -> dict[str, Any]:
    """Run all sides over all prompts and report as JSON; `on_prompt` is called after each prompt. With `categories`,
    one for each prompt, the acceptance length is told for each of them too, and as their mean.

    Raises UserError on settings that cannot be met, before anything is timed.
    """
    sides = _sides(decoder, request, against)
    encoded = [encode(decoder.base.tokenizer, prompt, request.chat) for prompt in prompts]
    budgets = [room(len(ids), decoder.base.context_length, request.max_new_tokens).tokens for ids in encoded]
    for side in sides:
        side.run(encoded[0], min(budgets[0], _WARM_UP_TOKENS))
    named = [None] * len(encoded) if categories is None else categories
    for index, (ids, budget, category) in enumerate(zip(encoded, budgets, named, strict=True)):
        turn = index % len(sides)  # nobody is always first
        for side in sides[turn:] + sides[:turn]:
            side.measure(ids, budget, category)
        on_prompt()
    return _report(decoder.base, request, sides, len(encoded), heads_name)


def _sides(decoder: Decoder, request: Request, against: Sequence[str]) -> list[Side]:
    unknown = [name for name in against if name not in RIVALS]
    if unknown:
        raise UserError(f"--against has {unknown[0]!r}; use any of {','.join(RIVALS)}.")
    runners: dict[str, Callable[[], Callable[[list[int], int], tuple[int, DecodeStats | None]]]] = {
        "plain": lambda: _engine_runner(decoder, replace(request, draft_length=0, tree=None)),
        "transformers": lambda: _transformers_runner(decoder.base, request),
    }
    rivals = [Side(name, runners[name]()) for name in dict.fromkeys(against)]
    return [Side("mtp", _engine_runner(decoder, request)), *rivals]


def _engine_runner(decoder: Decoder, request: Request) -> Callable[[list[int], int], tuple[int, DecodeStats | None]]:
    def run(ids: list[int], max_new_tokens: int) -> tuple[int, DecodeStats | None]:
        fewest = min(request.min_new_tokens, max_new_tokens)
        stream = decoder.stream(ids, replace(request, max_new_tokens=max_new_tokens, min_new_tokens=fewest))
        for _ in stream:
            pass
        return len(stream.result.token_ids), stream.stats

    return run


def _transformers_runner(
    base: FrozenBase, request: Request
) -> Callable[[list[int], int], tuple[int, DecodeStats | None]]:
    choices = _generation_choices(request)
    eos = list(base.eos_token_ids)

    def run(ids: list[int], max_new_tokens: int) -> tuple[int, DecodeStats | None]:
        tokens = torch.tensor([ids], device=base.device)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, **choices
        )
        with _generation_config(base, config), torch.random.fork_rng():
            torch.manual_seed(request.seed or 0)
            output = base.model.generate(tokens, attention_mask=torch.ones_like(tokens))
        return len(output[0].tolist()) - len(ids), None

    return run


# Settings of a request and their names in GenerationConfig; there None is off.
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "suppress_tokens": "suppress_tokens",
    "min_new_tokens": "min_new_tokens",
}
_OURS_ALONE = (
    *("presence_penalty", "frequency_penalty", "stop", "stop_ids", "stop_when", "ignore_eos", "logprobs"),
    *("bad_words", "bad_words_ids", "prefix_allowed_tokens_fn", "processors"),
)


def _generation_choices(request: Request) -> dict[str, Any]:
    """The request in the words of `generate()`. UserError for a setting that it has no word for."""
    default = Request()
    for name in _OURS_ALONE:
        if getattr(request, name) != getattr(default, name):
            option, value = f"--{name.replace('_', '-')}", getattr(request, name)
            raise UserError(f"{option} is {value}, which transformers is not given here; use --against plain.")
    used = [name for name in _SAMPLED if getattr(request, name) != getattr(default, name)]
    choices: dict[str, Any] = {"do_sample": not request.greedy}
    if not request.greedy:
        choices |= {"top_k": 0} | {name: getattr(request, name) for name in used}
    for name, theirs in _ALWAYS.items():
        value = getattr(request, name)
        if value != getattr(default, name):
            choices[theirs] = list(value) if isinstance(value, tuple) else value
    if request.logit_bias:
        choices["sequence_bias"] = [[[token], bias] for token, bias in request.logit_bias.items()]
    return choices


@contextmanager
def _generation_config(base: FrozenBase, config: GenerationConfig) -> Iterator[None]:
    """Give `generate()` our settings and nothing of the base's own (penalties and the like) for a moment."""
    before = base.model.generation_config
    base.model.generation_config = config
    try:
        yield
    finally:
        base.model.generation_config = before


def _report(base: FrozenBase, request: Request, sides: list[Side], count: int, heads_name: str) -> dict[str, Any]:
    ours = sides[0]
    assert ours.stats is not None
    return {
        **describe(base, heads_name),
        "draft_length": ours.stats.draft_length,
        **settings_report(request),
        "max_new_tokens": request.max_new_tokens,
        "verify": ours.stats.rule,
        "lossless": ours.stats.lossless,
        "tree": ours.stats.tree,
        "num_prompts": count,
        "results": [side.to_json() for side in sides],
        "ratios": {side.name: ours.tok_per_s / side.tok_per_s if side.tok_per_s else 0.0 for side in sides[1:]},
    }


def settings_report(request: Request) -> dict[str, Any]:
    """The settings that a number depends on: the four common ones, and any other that is not at its default."""
    default = Request()
    names = [
        item.name for item in fields(Request) if item.name not in _NOT_SETTINGS and not item.metadata.get("python_only")
    ]
    always = ("temperature", "top_k", "top_p", "min_p")
    return {
        name: getattr(request, name)
        for name in names
        if name in always or getattr(request, name) != getattr(default, name)
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
