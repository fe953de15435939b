"""One loop from prompts to answers, many at a time: a prompt takes the place of an answer as soon as that is done.

Knows: when to read new prompts, how to run all rows one token further, and how to draw so that a seed means the same in
every batch. Refuses to know: what the answers are for, text, heads. All of it goes through the base's own forward.

The uniform numbers of an answer come from its own seed, one for each token, so they depend neither on its neighbours
nor on when it was begun. The logits they are applied to are rounded differently in batches of other sizes; at a near
tie that can change a token, and all that follows it. At temperature 0 no random numbers are used.

Shapes: R rows in use, T tokens of the longest of some prompts, V vocabulary.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.ragged import RaggedAttention
from decode.skinny import fast_products
from decode.slots import SlotCache
from decode.target import PREFILL_CHUNK
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import RandomSource, SamplingConfig, finite_rows, to_probs

READ_AT_ONCE = 2048  # positions of new prompts in one go: enough to keep the processor busy, little enough memory
NEWCOMERS = 8  # of so many slots one is free on average: prompts are read several at a time, which is cheaper a token
BLOCK = 256  # tokens whose probabilities are summed first when one is drawn


@dataclass(frozen=True)
class Task:
    """A prompt to be answered: its ids, the temperature, and the seed of its draws. `index` is the caller's."""

    index: int
    ids: Sequence[int]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Progress:
    """What one forward brought: how many tokens, and the tasks that are done with the ids of their answers.

    The end-of-sequence id belongs to an answer; an answer without one was cut at the limit.
    """

    tokens: int
    finished: list[tuple[Task, list[int]]]


@dataclass
class _Row:
    task: Task
    uniforms: list[float]
    ids: list[int] = field(default_factory=list)


def decode_many(
    base: FrozenBase, tasks: Sequence[Task], *, max_new_tokens: int, slots: int, ends: Sequence[int] | None = None
) -> Iterator[Progress]:
    """Answer all tasks, at most `slots` at a time; they are begun in the order given and done in any.

    An answer ends with one of `ends` (the base's own end-of-sequence ids when None) or at `max_new_tokens`. Every
    prompt has a token, and its answer fits the context of the base. Raises UserError if the base gives logits that are
    not finite, or keeps its past in another form than keys and values.
    """
    slots = max(1, min(slots, len(tasks)))
    batch = _Batch(base, max_new_tokens, slots, frozenset(base.eos_token_ids if ends is None else ends))
    waiting = deque(tasks)
    while waiting or batch.rows:
        free = slots - len(batch.rows)
        if waiting and (not batch.rows or free >= min(max(1, slots // NEWCOMERS), len(waiting))):
            yield batch.read(_next(waiting, free))
        else:
            yield batch.step()


def _next(waiting: deque[Task], free: int) -> list[Task]:
    """The tasks to read together."""
    taken, longest = [waiting.popleft()], 0
    while waiting and len(taken) < free:
        longest = max(longest, len(taken[-1].ids), len(waiting[0].ids))
        if longest * (len(taken) + 1) > READ_AT_ONCE:
            break
        taken.append(waiting.popleft())
    return taken


class _Batch:
    """The answers in progress; row r of the cache is `rows[r]`."""

    def __init__(self, base: FrozenBase, max_new_tokens: int, slots: int, ends: frozenset[int]) -> None:
        self.base, self.max_new_tokens, self.ends = base, max_new_tokens, ends
        self.cache = SlotCache(base.new_cache(), slots)
        self.rows: list[_Row] = []

    @torch.no_grad()
    def read(self, tasks: Sequence[Task]) -> Progress:
        """Read new prompts and draw the first token of each.

        What all of them begin with, such as a system message, is read once. They are padded at the end: what is causal
        never sees that, so neither mask nor positions are needed.
        """
        device, lengths = self.base.device, [len(task.ids) for task in tasks]
        tokens_RT = torch.zeros(len(tasks), max(lengths), dtype=torch.long)
        for row, task in enumerate(tasks):
            tokens_RT[row, : lengths[row]] = torch.tensor(task.ids)
        cache, shared = self.base.new_cache(), _shared([task.ids for task in tasks])
        if shared > 0:
            for chunk in torch.split(tokens_RT[:1, :shared].to(device), PREFILL_CHUNK, dim=1):
                self.base.forward(chunk, cache=cache)
            cache.select(torch.zeros(len(tasks), dtype=torch.long, device=device))
        chunks = torch.split(tokens_RT[:, shared:].to(device), PREFILL_CHUNK, dim=1)
        hidden = torch.cat([self.base.forward(chunk, cache=cache).hidden for chunk in chunks], dim=1)
        last = torch.tensor(lengths, device=device) - 1 - shared
        rows = [_Row(task, RandomSource(task.seed).uniform([self.max_new_tokens]).tolist()) for task in tasks]
        self._sort()
        self.cache.take(cache, lengths)
        self.rows += rows
        return self._commit(rows, hidden[torch.arange(len(rows), device=device), last])

    @torch.no_grad()
    def step(self) -> Progress:
        """One more token for every row."""
        tokens = torch.tensor([row.ids[-1] for row in self.rows], device=self.base.device)
        if self.base.several is not None and self.base.takes_at_once(len(tokens)):
            states = self.base.several(tokens, self.cache.past(), ()).hidden
            self.cache.advance(1)
            return self._commit(self.rows, states)
        mask = self.cache.mask(tokens.device)
        with fast_products(tokens), self._attention():
            hidden = self.base.forward(tokens[:, None], cache=self.cache, attention_mask=mask).hidden
        return self._commit(self.rows, hidden[:, -1])

    def _attention(self) -> AbstractContextManager[object]:
        """On a CPU, short texts among longer ones are spared the columns that they do not have."""
        if self.base.device.type != "cpu":
            return nullcontext()
        ragged = RaggedAttention([length + 1 for length in self.cache.lengths], self.cache.length + 1)
        return ragged if ragged.worthwhile else nullcontext()

    def _sort(self) -> None:
        """Longest text first, so that neighbours are of like length; newcomers follow."""
        order = sorted(range(len(self.rows)), key=lambda row: -self.cache.lengths[row])
        self.cache.reorder(order)
        self.rows = [self.rows[row] for row in order]

    def _commit(self, rows: Sequence[_Row], hidden: Tensor) -> Progress:
        """Draw a token for each of `rows` from its state [R, D]; the rows that are done leave."""
        drawn = draw(
            self.base.logits(hidden),
            [row.task.temperature for row in rows],
            torch.tensor([row.uniforms[len(row.ids)] for row in rows], dtype=torch.float64),
        )
        for row, token in zip(rows, drawn.tolist(), strict=True):
            row.ids.append(token)
        count = len(rows)
        return Progress(count, self._release())

    def _release(self) -> list[tuple[Task, list[int]]]:
        """Take out the rows that are done. The last row takes the place of one, hence backwards."""
        done = []
        for place in reversed(range(len(self.rows))):
            row = self.rows[place]
            if row.ids[-1] in self.ends or len(row.ids) >= self.max_new_tokens:
                self.cache.drop(place)
                self.rows[place] = self.rows[-1]
                self.rows.pop()
                done.append((row.task, row.ids))
        return done


def _shared(texts: Sequence[Sequence[int]]) -> int:
    """How many ids several texts have in common at their beginning, leaving one at least to each."""
    if len(texts) < 2:
        return 0
    first, last = min(map(tuple, texts)), max(map(tuple, texts))  # what these two share, all between them do
    most = min(map(len, texts)) - 1
    return next((i for i in range(most) if first[i] != last[i]), most)


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Tensor) -> Tensor:
    """A token for each row of logits [R, V] at its own temperature, from its own uniform number [R]. Long [R]."""
    if not bool(finite_rows(logits).all()):
        raise UserError("the base gives logits that are not finite; use --dtype bfloat16 or float32.")
    drawn = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    for temperature in sorted(set(temperatures)):
        rows = torch.tensor([i for i, t in enumerate(temperatures) if t == temperature], device=logits.device)
        part = logits if len(rows) == len(logits) else logits[rows]
        if temperature == 0:
            drawn[rows] = part.argmax(dim=-1)
        else:
            probs = to_probs(part, SamplingConfig(temperature=temperature))
            drawn[rows] = pick(probs, uniforms.to(logits.device)[rows])
    return drawn


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token of each row of probs [R, V] at which the distribution function passes its uniform number [R].

    First among the sums of blocks, then inside one: two short rows of float64 in place of one of V. Never a token of
    probability 0.
    """
    vocab = probs.shape[-1]
    whole = vocab - vocab % BLOCK
    blocks = probs[:, :whole].reshape(len(probs), -1, BLOCK).sum(dim=-1)
    mass = torch.cat([blocks, probs[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    block, rest = _pass(mass.double(), uniforms)
    places = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(-1, places.clamp_max(vocab - 1)).double().masked_fill_(places >= vocab, 0.0)
    return block * BLOCK + _pass(inside, rest)[0]


def _pass(mass: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of mass [R, n] passes the share `uniforms` [R] of its total, and how far into that place.

    A sum may rise by rounding where nothing is added; an impossible place must not profit.
    """
    sums = mass.cumsum(dim=-1).masked_fill_(~(mass > 0), 0.0)
    threshold = uniforms[:, None] * sums.amax(dim=-1, keepdim=True)
    place = (sums > threshold).to(torch.uint8).argmax(dim=-1, keepdim=True)
    share = 1.0 - (sums.gather(-1, place) - threshold) / mass.gather(-1, place)
    return place.squeeze(-1), share.squeeze(-1).clamp_(0.0, 1.0 - 2.0**-53)
