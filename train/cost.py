"""What training costs: floating-point operations against the machine's measured peak, and memory before it is used.

Knows: how to count and to measure. Refuses to know: what is trained, beyond its sizes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.heads import Heads

SIDE = 1536  # of the square matrices that the peak is measured with: large enough for every cache to matter
SPARE = 0.9  # of the free memory that an estimate may fill


def product_dtype(base: FrozenBase) -> torch.dtype:
    """What products run in: the base's own precision, or that of the autocast around this call."""
    kind = base.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.dtype


@torch.no_grad()
def matrix_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> float:
    """Floating-point operations per second of the best matrix product within some tenths of a second."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        _wait(device)
        began = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_flops(work: Callable[[], object]) -> int:
    """Operations of the matrix products in `work`, its backward passes included."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class Devices:
    """How many devices a run has, and whether base and heads are spread over them (`fsdp`) or whole on each (`ddp`)."""

    count: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class Memory:
    """An estimate in bytes, for one device: what stays, and what one token of a batch adds."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        """Bytes with so many tokens in a batch."""
        return self.fixed + self.per_token * tokens


def base_bytes(base: FrozenBase, devices: Devices) -> int:
    """Of the base's weights on each device. Sharded, that is an equal part of the decoder layers, two whole ones (one
    runs, the next arrives), and embedding, output matrix and norms."""
    layers = [sum(map(stored_bytes, layer.parameters())) for layer in base.layers]
    every = sum(map(stored_bytes, base.model.parameters()))
    if not devices.sharded:
        return every
    return every - sum(layers) + -(-sum(layers) // devices.count) + 2 * max(layers)


def read_bytes(base: FrozenBase, devices: Devices) -> int:
    """Of the whole base, which the first of several processes reads to spread it: not in an accelerator's memory."""
    return base_bytes(base, Devices()) if devices.sharded and base.device.type == "cpu" else 0


def stored_bytes(weight: Tensor) -> int:
    """Of a whole matrix: one that is quantised consists of several, and of one that is spread all parts count."""
    if isinstance(weight, DTensor) or not hasattr(weight, "__tensor_flatten__"):
        return weight.numel() * weight.element_size()
    parts: list[str] = weight.__tensor_flatten__()[0]
    return sum(stored_bytes(getattr(weight, part)) for part in parts)


def held_bytes(base: FrozenBase) -> int:
    """Of the base's weights that are on this device already."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in base.model.parameters()]
    return sum(map(stored_bytes, weights))


def heads_bytes(parameters: int, states: int, devices: Devices) -> int:
    """Of `parameters` of heads in float32 with gradients and the optimiser's `states`, on each device. Spread, a whole
    copy of weights and gradients is there while they are worked on; whole, gradients are averaged in a copy of them."""
    if devices.sharded:
        return 4 * (-(-parameters * (2 + states) // devices.count) + 2 * parameters)
    return 4 * parameters * (2 + states + (devices.count > 1))


def estimate_memory(
    base: FrozenBase, heads: Heads, length: int, chunk: int, states: int = 2, devices: Devices = Devices()
) -> Memory:
    """Memory on each device of training on rows of `length` tokens; `states`: numbers an optimiser keeps per parameter.

    Per token and draft position the heads keep what their backward pass needs: about 8 D + 5 I numbers. Recurrent ones
    also keep a score per query head and visible token, and hold some five more of these while they compute. The loss
    holds one chunk of logits, of q, of p and of their gradient. Checked against measured peaks in the tests: it is
    meant to err upwards.
    """
    config, size = heads.config, base.hidden_size
    parameters = sum(p.numel() for p in heads.parameters())
    weights = base_bytes(base, devices) + read_bytes(base, devices) + heads_bytes(parameters, states, devices)
    copied = 0 if config.draft_vocab_size is None else config.proposals * size * 4
    loss = chunk * (5 * config.draft_length * config.proposals + 3 * base.vocab_size) * 4
    block = config.block
    step = 18 * size if block is None else 8 * size + 5 * block.intermediate_size
    scores = block.num_attention_heads * length if block is not None and config.kind == "recurrent" else 0
    per_token = 4 * (config.draft_length * (step + scores) + 5 * scores + 3 * config.feature_size + 12 * size)
    runtime = 600 * 2**20  # interpreter, libraries, and buffers of the matrix products
    return Memory(runtime + weights + copied + loss, per_token)


def check_memory(memory: Memory, batch_size: int, length: int, free: int | None) -> str:
    """The estimate in words; UserError with a batch size that fits where it does not."""
    needed = memory.of(batch_size * length)
    if free is not None and needed > SPARE * free:
        fits = max(0, int((SPARE * free - memory.fixed) / (memory.per_token * length)))
        remedy = (
            f"set data.batch_size to {fits} (and trainer.accumulate_grad_batches to {-(-batch_size // fits)})"
            if fits
            else "lower data.max_length or use a smaller base"
        )
        raise UserError(
            f"data.batch_size {batch_size} × data.max_length {length} needs about {needed / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free; {remedy}."
        )
    return f"memory: about {needed / 1e9:.1f} GB at {batch_size} × {length} tokens"
