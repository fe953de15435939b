"""Steps of a stack over buffers that stay where they are, so that each is recorded once and replayed: CUDA graphs.

Launching the kernels of a step of a few rows one by one takes a GPU's host longer than the GPU needs to run them.

Knows: which cache has the buffers at the moment, and that all that a step depends on must be numbers in tensors, whose
addresses a recording keeps. Refuses to know: the blocks (`mtp.stack`), and how a device records.

Shapes: R new rows, C places of the buffers, L blocks, D hidden.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtp.base import BaseOutput
from mtp.cache import BaseCache, Buffers
from mtp.stack import Stack
from mtp.tree_mask import TreeMask

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Takes a function of tensors and gives one that does the same again with what is then in these very tensors. The
function is run on the way, any number of times; the result may be the same tensor each time."""
_LEAST_PLACES = 1024


@dataclass(frozen=True)
class Step:
    """A recorded step of R rows, and the tensors it reads: tokens [1, R], start [], visible [R, R], depths [R].
    `chain`: what the latter two are without branches."""

    chain: TreeMask
    tokens: Tensor
    start: Tensor
    visible: Tensor
    depths: Tensor
    replay: Callable[[], Tensor]


class FixedSteps:
    """The steps of a stack, recorded for every number of rows when it first occurs, and anew when a text outgrows the
    buffers. One cache at a time has these; another that comes takes them over, and the one before goes on in a copy."""

    def __init__(self, stack: Stack, record: Record) -> None:
        self._stack, self._record = stack, record
        self._buffers: list[Buffers] = []
        self._owner: Callable[[], BaseCache | None] = lambda: None
        self._steps: dict[int, Step] = {}

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, cache: BaseCache, feature_layers: Sequence[int] = (), tree: TreeMask | None = None
    ) -> BaseOutput:
        """As `Stack.forward`."""
        rows, past = tokens.shape[1], cache.length
        self._hold(cache, past + rows)
        if rows not in self._steps:
            self._steps[rows] = self._recorded(rows, past)
        step = self._steps[rows]
        step.tokens.copy_(tokens)
        step.start.fill_(past)
        tree = step.chain if tree is None else tree
        step.visible.copy_(tree.visible)
        step.depths.copy_(tree.depths)
        states = step.replay()
        for layer, (keys, _) in zip(cache.layers, self._buffers, strict=True):
            layer.extend(rows, keys)
        cache.advance(rows)
        return self._stack.output(list(states.clone()), feature_layers)  # the next replay writes over them

    @torch.inference_mode(False)  # else only this mode could write to them later
    @torch.no_grad()
    def _hold(self, cache: BaseCache, places: int) -> None:
        """Let the cache have the buffers, with so many places."""
        if not self._buffers or places > self._buffers[0][0].shape[2]:
            self._buffers, self._steps = self._stack.buffers(max(_LEAST_PLACES, 1 << (places - 1).bit_length())), {}
            self._owner = lambda: None  # what had the smaller ones keeps them
        if cache.holds(self._buffers):
            return
        before = self._owner()
        if before is not None and before.holds(self._buffers):
            before.relocate([(keys.clone(), values.clone()) for keys, values in self._buffers])
        cache.relocate(self._buffers)
        self._owner = weakref.ref(cache)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _recorded(self, rows: int, past: int) -> Step:
        """At a place where the runs that recording takes write over nothing."""
        device = self._stack.base.device
        chain = _chain(rows, device)
        tokens, start = torch.zeros(1, rows, dtype=torch.long, device=device), torch.tensor(past, device=device)
        reads = tokens, start, chain.visible.clone(), chain.depths.clone()
        return Step(chain, *reads, self._record(partial(self._stack.fixed, *reads, self._buffers)))


def _chain(rows: int, device: torch.device) -> TreeMask:
    """Rows that each see those before: a tree without branches."""
    visible = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return TreeMask(visible, torch.arange(rows, device=device))


class CudaGraphs:
    """`Record` on a GPU. Each recording has its own results; they share the memory they work in."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries set themselves up in first calls, which must not be recorded
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
