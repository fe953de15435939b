"""What training heads for a large base takes, on paper: operations, memory, hours and traffic, from sizes alone.

Knows: the arithmetic of a training step, checked against counts and estimates of real models in the tests. Refuses to
know: any model or machine; speeds are what the caller says they are.

Sizes: D hidden, I intermediate, L layers, V vocabulary, Vd draft vocabulary, K draft length; B bytes, s seconds.
"""

from dataclasses import dataclass, replace
from typing import Literal

from train.cost import Devices, heads_bytes

MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A base of Llama's type, in 16 bits, and recurrent heads with features of three layers for it."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    queries: int  # width of all query heads
    keys: int  # width of all key heads
    vocab: int
    draft_vocab: int = 32_768
    draft_length: int = 4
    bits: int = 16  # of the layers' weights

    @property
    def layer(self) -> int:
        """Parameters of a decoder layer, norms included."""
        width = self.hidden
        return 2 * width * (self.queries + self.keys) + 3 * width * self.intermediate + 2 * width

    @property
    def outside(self) -> int:
        """Parameters of embedding, output matrix and final norm."""
        return 2 * self.vocab * self.hidden + self.hidden

    @property
    def base(self) -> int:
        """All parameters of the base."""
        return self.layers * self.layer + self.outside

    @property
    def heads(self) -> int:
        """Parameters of the heads: one block that reads [e ; g], the matrix from features, four norms."""
        width = self.hidden
        attention = 2 * width * (self.queries + 2 * self.keys) + width * self.queries
        return attention + 3 * width * self.intermediate + 3 * width * width + 4 * width

    def flops(self, length: int) -> float:
        """Operations of a step per supervised token in rows of `length`: the base forward, the heads three times
        (forward, and backward to weights and to states), or twice where states need no gradient."""
        width, k, seen = self.hidden, self.draft_length, length / 2
        base = self.layers * (self.layer + 2 * seen * self.queries) + self.vocab * width
        own = k * width * (4 * self.keys + 3 * self.queries + 3 * self.intermediate)
        scores = 2 * k * length * self.queries  # not halved: heads compute the masked half too
        return MULTIPLY_ADD * (base + 3 * (own + scores) + 2 * (3 * width * width + k * width * self.draft_vocab))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices that work together: dense operations per second in bfloat16, as published; bytes per second of a link to
    the others, one way; how much of the peak a step reaches."""

    name: str
    peak: float
    memory: float
    link: float
    count: int
    share: float = 0.35


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What comes of it."""

    memory: float
    """Bytes on each device."""
    step: float
    """Seconds of a step, traffic that is not hidden included."""
    traffic: float
    """Bytes that each device receives in a step."""
    hours: float


def plan(
    sizes: Sizes, machine: Machine, strategy: Literal["ddp", "fsdp"], tokens: float, batch: int, length: int
) -> Plan:
    """Train on so many tokens, `batch` rows of `length` on each device in a step."""
    devices = Devices(machine.count, strategy == "fsdp")
    others = (machine.count - 1) / machine.count
    layers = sizes.layers * sizes.layer * sizes.bits / 8
    compute = sizes.flops(length) * batch * length / (machine.peak * machine.share)
    gradients = 2 * others * 4 * sizes.heads  # summed and given back; spread: scattered, and weights gathered
    gathered = others * layers if devices.sharded else 0.0
    traffic = gradients + gathered
    step = max(compute, traffic / machine.link)  # both at once, as far as they go
    return Plan(
        memory=memory(sizes, devices, batch, length),
        step=step,
        traffic=traffic,
        hours=tokens / (machine.count * batch * length) * step / 3600,
    )


def memory(sizes: Sizes, devices: Devices, batch: int, length: int, chunk: int = 256) -> float:
    """Bytes on each device, as `train.cost` estimates them for a model that is there."""
    per_layer, rest = sizes.layer * sizes.bits / 8, 2 * sizes.outside
    weights = sizes.layers * per_layer
    if devices.sharded:
        weights = weights / devices.count + 2 * per_layer
    k, width = sizes.draft_length, sizes.hidden
    scores = sizes.queries // 128 * length
    per_token = 4 * (k * (8 * width + 5 * sizes.intermediate + scores) + 5 * scores + (3 * 3 + 12) * width)
    loss = chunk * (5 * k * sizes.draft_vocab + 3 * sizes.vocab) * 4
    copied = 4 * sizes.draft_vocab * width
    fixed = 600 * 2**20 + weights + rest + heads_bytes(sizes.heads, 2, devices) + copied + loss
    return fixed + per_token * batch * length


LLAMA_8B = Sizes(name="8 B", layers=32, hidden=4096, intermediate=14336, queries=4096, keys=1024, vocab=128256)
LLAMA_70B = Sizes(name="70 B", layers=80, hidden=8192, intermediate=28672, queries=8192, keys=1024, vocab=128256)
# Published: dense bfloat16, without sparsity; memory; NVLink in one direction, or one 400 Gb/s port where several nodes
# take part.
H100 = Machine(name="H100 80 GB", peak=989e12, memory=80e9, link=450e9, count=1)
H200 = Machine(name="H200 141 GB", peak=989e12, memory=141e9, link=450e9, count=1)
SEVERAL_NODES = 50e9

Row = tuple[Sizes, Machine, Literal["ddp", "fsdp"], int, int]
ROWS: tuple[Row, ...] = (
    (LLAMA_8B, H100, "ddp", 4, 2048),
    (LLAMA_8B, replace(H100, count=8), "ddp", 4, 2048),
    (replace(LLAMA_8B, name="8 B, int4", bits=4), replace(H100, count=8), "ddp", 4, 2048),
    (LLAMA_70B, replace(H200, count=8), "fsdp", 4, 2048),
    (LLAMA_70B, replace(H100, count=16, link=SEVERAL_NODES), "fsdp", 2, 2048),
    (LLAMA_70B, replace(H100, count=64, link=SEVERAL_NODES), "fsdp", 2, 2048),
)


def table(tokens: float, rows: tuple[Row, ...] = ROWS) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| base | devices | strategy | rows × tokens a step, each | GB on each | GFLOP a token | s a step | "
        "GB received a step | hours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for sizes, machine, strategy, batch, length in rows:
        found = plan(sizes, machine, strategy, tokens, batch, length)
        cells = [sizes.name, f"{machine.count} × {machine.name}", strategy, f"{batch} × {length}"]
        cells += [f"{found.memory / 1e9:.0f}", f"{sizes.flops(length) / 1e9:.0f}", f"{found.step:.2f}"]
        cells += [f"{found.traffic / 1e9:.1f}", f"{found.hours:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
