"""Several texts at once: each drafts, judges and stops by itself, and one forward of the base serves all of them.

Knows: how the blocks of several texts become one forward, which of its rows are whose, and that a new text takes the
place of one that is done. Nothing that decides a token is shared: every text has its own drafts, laws, rule, draws and
stop rules, so it is the one that it would be alone, but for the rounding of larger products.
Refuses to know: requests, where texts come from and what becomes of their steps. Chains only: a mask with a number for
each column has no trees.

Shapes: N texts, R_i rows of a text's block, R the most of them, V vocabulary, F features.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decode.chain import Chain
from decode.engine import Decoding, Step, run_alone
from decode.pooled import propose_together
from decode.skinny import fast_products
from decode.stage import StageCache
from decode.stats import DecodeStats, Phase, Stopwatch
from decode.target import BaseTarget, TargetOutput
from mtp.base import BaseOutput, FrozenBase
from mtp.errors import UserError

Begin = Callable[[], Decoding]
"""Reads a prompt. The text's target must be a `BaseTarget` over the base of the batch."""
News = tuple[int, Step | UserError]
"""The number of a text, and its next step or what ended it."""


def run_together(base: FrozenBase, texts: Iterable[tuple[int, Begin]], slots: int) -> Iterator[News]:
    """Decode all texts, at most `slots` at a time; yields the steps of each with the number that it came with.

    They are begun in the order given, as soon as there is room, and every forward of the base is a step of each; the
    last one left goes on alone. A text that cannot go on, such as one that reaches a row of p that is no distribution,
    ends with its UserError; the others do not notice. The base must be one of which `batch_fault` has nothing to say.
    """
    waiting, batch = iter(texts), _Batch(base, slots)
    while True:
        while len(batch.rows) < slots and (entry := next(waiting, None)) is not None:
            yield from batch.admit(*entry)
        if not batch.rows:
            return
        yield from batch.alone() if len(batch.rows) == 1 else batch.step()


class _Row:
    """A text of the batch, and what its latest step has come to."""

    def __init__(self, number: int, text: Decoding) -> None:
        self.number, self.text = number, text
        self.chain: Chain | None = None
        self.stays = 0  # rows of its block
        self.over = False

    def take(self, proposal: Chain | UserError) -> list[News]:
        """Its next chain; tells only what went wrong."""
        if isinstance(proposal, UserError):
            self.over = True
            return [(self.number, proposal)]
        self.chain = proposal
        return []

    def decide(self, output: TargetOutput) -> News:
        assert self.chain is not None
        try:
            step, path = self.text.decide(self.chain, output)
        except UserError as error:
            self.over, self.stays = True, 0
            return self.number, error
        self.over = step.finish_reason is not None
        self.stays = 0 if self.over else 1 + len(path)
        return self.number, step


class _Batch:
    """The texts that are being decoded; `rows[i]` has row i of the cache."""

    def __init__(self, base: FrozenBase, slots: int) -> None:
        self.base = base
        self.cache = StageCache(base.new_cache(), slots)
        self.rows: list[_Row] = []

    @torch.inference_mode()
    def admit(self, number: int, begin: Begin) -> list[News]:
        """Read a text alone and give it a row; tells only what goes wrong."""
        try:
            text = begin()
        except UserError as error:
            return [(number, error)]
        assert isinstance(text.target, BaseTarget)
        with text.watch.phase("prefill"):
            self.cache.take(text.target.hand_over())
        self.rows.append(_Row(number, text))
        return []

    @torch.inference_mode()
    def step(self) -> list[News]:
        """One step of every text; those that are done leave."""
        with self._shared("draft"):
            proposals = propose_together([row.text for row in self.rows])
        news = [one for row, proposal in zip(self.rows, proposals, strict=True) for one in row.take(proposal)]
        self._release()
        if not self.rows:
            return news
        layers = max((row.text.feature_layers for row in self.rows), key=len)  # a text without drafts needs none
        with self._shared("verify"):
            blocks = [row.chain.block for row in self.rows if row.chain is not None]
            outputs = run_blocks(self.base, self.cache, blocks, layers)
        news += [row.decide(output) for row, output in zip(self.rows, outputs, strict=True)]
        with self._shared("other"):
            self.cache.keep_first([row.stays for row in self.rows])
            self._release()
        return news

    def alone(self) -> Iterator[News]:
        """All steps of the only text there is: without company, single texts are faster."""
        row = self._leave()
        try:
            for step in run_alone(lambda: row.text):
                yield row.number, step
        except UserError as error:
            yield row.number, error

    @torch.inference_mode()
    def _leave(self) -> _Row:
        row = self.rows.pop()
        assert isinstance(row.text.target, BaseTarget)
        row.text.target.take_over(self.cache.give(0, self.base.new_cache()))
        self.cache.drop(0)
        return row

    def _release(self) -> None:
        """Take out the rows that are over. The last row takes the place of one, hence backwards."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place].over:
                self.cache.drop(place)
                self.rows[place] = self.rows[-1]
                self.rows.pop()

    @contextmanager
    def _shared(self, phase: Phase) -> Iterator[None]:
        """Wall seconds, charged to all texts in equal parts."""
        texts, spent = [row.text for row in self.rows], DecodeStats("", 0)
        with Stopwatch(spent, self.base.device).phase(phase):
            yield
        for text in texts:
            text.stats.seconds[phase] += spent.seconds[phase] / len(texts)


def run_blocks(
    base: FrozenBase, cache: StageCache, blocks: Sequence[Tensor], feature_layers: Sequence[int] = ()
) -> list[TargetOutput]:
    """One forward over blocks [1, R_i], one for each row of the cache; logits [1, R_i, V] and features [1, R_i, F].

    They are padded at the end, which no token of theirs sees; `StageCache.keep_first` must follow.
    """
    counts = [block.shape[1] for block in blocks]
    output = _at_once(base, cache, blocks, feature_layers)
    if output is None:
        output = _padded_forward(base, cache, blocks, feature_layers)
    logits, features = torch.split(base.logits(output.hidden), counts), torch.split(output.features, counts)
    return [TargetOutput(one[None], those[None]) for one, those in zip(logits, features, strict=True)]


def _at_once(
    base: FrozenBase, cache: StageCache, blocks: Sequence[Tensor], feature_layers: Sequence[int]
) -> BaseOutput | None:
    """States of all rows [sum of R_i, D], in one call of the kernels; None where that cannot be."""
    tokens = torch.cat([block[0] for block in blocks])
    if base.several is None or not base.takes_at_once(len(tokens)):
        return None
    past = cache.past([block.shape[1] for block in blocks])
    return None if past is None else base.several(tokens, past, feature_layers)


def _padded_forward(
    base: FrozenBase, cache: StageCache, blocks: Sequence[Tensor], feature_layers: Sequence[int]
) -> BaseOutput:
    """The same by the model itself, over blocks that are padded."""
    counts, tokens = [block.shape[1] for block in blocks], _padded(blocks)
    mask = cache.prepare(counts, tokens.device)
    with fast_products(tokens, base.kernels):
        output = base.forward(tokens, cache=cache, attention_mask=mask, feature_layers=feature_layers)
    real = [row * tokens.shape[1] + place for row, count in enumerate(counts) for place in range(count)]
    rows = torch.tensor(real, device=tokens.device)
    return BaseOutput(hidden=output.hidden.flatten(0, 1)[rows], features=output.features.flatten(0, 1)[rows])


def _padded(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks [1, R_i] as [N, R], the last token of each repeated: one that the base may read here anyway. Any other
    could give a state that is not finite, and masked ones count with weight 0, which does not help against a NaN."""
    width = max(block.shape[1] for block in blocks)
    rows = [torch.cat([block, block[:, -1:].expand(-1, width - block.shape[1])], dim=1) for block in blocks]
    return torch.cat(rows)


class Copies:
    """`Target` that runs several copies of one text in a batch: for measuring what a forward costs there."""

    def __init__(self, base: FrozenBase, count: int) -> None:
        self.base, self.count = base, count
        self.context_length, self.vocab_size, self.device = base.context_length, base.vocab_size, base.device
        self.start(())

    def start(self, feature_layers: tuple[int, ...]) -> None:
        self._layers, self._reader = feature_layers, BaseTarget(self.base)
        self._reader.start(feature_layers)
        self._cache: StageCache | None = None

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        """The first call reads the prompt."""
        if self._cache is None:
            output = self._reader.forward(tokens, num_logits)
            read, self._cache = self._reader.hand_over(), StageCache(self.base.new_cache(), self.count)
            for _ in range(self.count):
                self._cache.take(read)
            return output
        return run_blocks(self.base, self._cache, [tokens] * self.count, self._layers)[0]

    def rollback(self, length: int) -> None:
        """To the end of the prompt, wherever that is."""
        if self._cache is not None:
            self._cache.keep_first([0] * self.count)

    def forward_tree(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> TargetOutput:
        raise NotImplementedError("trees are for single texts")

    def keep(self, length: int, positions: Sequence[int]) -> None:
        raise NotImplementedError("trees are for single texts")


# What attention that takes no such mask raises.
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, UserError)


@torch.inference_mode()
def batch_fault(base: FrozenBase) -> str | None:
    """Why a base cannot run over texts of different lengths at once, or None. Two texts are compared with each alone.

    A sliding window is counted in columns, of which there are more than tokens between a shorter text and its block.
    """
    cache = base.new_cache()
    if cache.slides or "local" in (getattr(base.model.config, "attention_layers", None) or ()):  # the latter: GPT-Neo
        return "some of its layers see a sliding window only"
    texts = torch.tensor([[0, 1, 2, 3, 4, 1, 2], [3, 2, 4, 0, 1, 3, 4]], device=base.device)
    try:
        found = _ragged_states(base, texts)
    except _REFUSALS as error:
        return f"its attention takes no mask of a batch ({type(error).__name__})"
    for text, states in zip(texts, found, strict=True):
        expected = base.logits(base.forward(text[None]).hidden[0, len(text) - len(states) :])
        tolerance = 1e-4 if base.dtype.itemsize >= 4 else 32 * torch.finfo(base.dtype).eps
        if not bool((states - expected).abs().max() <= tolerance * expected.abs().max()):
            return "a text of a batch gets other states than alone"
    return None


def _ragged_states(base: FrozenBase, texts: Tensor) -> list[Tensor]:
    """Logits of the last tokens of each of two texts [2, 7], which go on by one and three tokens, then by two."""
    cache = StageCache(base.new_cache(), 2)
    for text, length in zip(texts, (4, 2), strict=True):
        read = base.new_cache()
        base.forward(text[None, :length], cache=read)
        cache.take(read)
    run_blocks(base, cache, [texts[:1, 4:6], texts[1:, 2:5]])
    cache.keep_first([1, 3])
    return [output.logits[0] for output in run_blocks(base, cache, [texts[:1, 5:], texts[1:, 5:]])]
