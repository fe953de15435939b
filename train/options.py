"""What a config file may say about the base, the optimiser and decoding in validation.

Knows: keys, defaults and limits, and the learning-rate schedule they describe. Refuses to know: who uses them.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mtp.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """The base to train on.

    Args:
        name: an embedded base (`smollm2-135m`), a local transformers folder, a `.gguf` file, or a Hub id.
        revision: of a Hub id; null is its default branch.
        dtype: auto, float32, bfloat16 or float16; auto is float32 on a CPU and the checkpoint's own elsewhere.
        quantise: int8 or int4 round the matrices of the base's layers by torchao, for a base too large whole; null
            leaves them. The rounded base is p then: heads learn it, and are to be decoded with the same `--quantise`.
        trust_remote_code: run code that a Hub repository brings with it. Leave it off unless you have read that code.
    """

    name: str = "smollm2-135m"
    revision: str | None = None
    dtype: str = "auto"
    quantise: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimiser, with linear warm-up and a cosine to `final_lr_share` of the peak.

    Args:
        kind: `adamw`, or `muon`: steps orthogonalised for matrices, AdamW for the rest. Muon learns more per token.
        lr: peak learning rate. Small suits the closed-form start; from a random start 1e-3 is usual.
        betas: of AdamW.
        weight_decay: on matrices only.
        warmup: share of all optimiser steps that the warm-up takes.
        decay: share of all optimiser steps, at the end, over which the rate falls; before, it stays at its peak. With 1
            it falls from the warm-up on. A run of constant rate can be stopped, and resumed with `max_steps` set so
            that the fall begins there.
        final_lr_share: learning rate after the last step, as a share of `lr`.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.04
    decay: float = 1.0
    final_lr_share: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(OptimizerOptions.__annotations__["kind"]):
            raise UserError(f"optimizer.kind is {self.kind!r}; allowed are adamw and muon.")
        for name, good, allowed in (
            ("lr", 0 < self.lr < math.inf, "above 0 and finite"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more and finite"),
            ("warmup", 0 <= self.warmup < 1, "from 0 to below 1"),
            ("decay", 0 <= self.decay <= 1, "from 0 to 1"),
            ("final_lr_share", 0 <= self.final_lr_share <= 1, "from 0 to 1"),
        ):
            if not good:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}; it must be {allowed}.")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Really decoding a few prompts at every validation.

    Args:
        prompts: JSONL with `prompt`, `messages` or `turns`; null turns this off.
        limit: how many of them.
        max_new_tokens: per prompt.
        temperature: 0 is greedy.
        seed: of the draws.
    """

    prompts: str | None = None
    limit: int = 4
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("limit", self.limit >= 1, "1 or more"),
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more and finite"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not good:
                raise UserError(f"decode.{name} is {getattr(self, name)}; it must be {allowed}.")


def learning_rate_share(step: int, total: int, options: OptimizerOptions) -> float:
    """Learning rate after `step` of `total` optimiser steps, as a share of its peak."""
    warmup = math.ceil(options.warmup * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    falling = max(warmup, total - math.ceil(options.decay * total))
    progress = min(1.0, max(0.0, (step - falling) / max(1, total - falling)))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return options.final_lr_share + (1 - options.final_lr_share) * cosine
