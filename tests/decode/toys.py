"""A table-driven base and drafter, and a random source that visits every outcome."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode.engine import Engine
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.target import BaseTarget, TargetOutput
from mtp.base import FrozenBase
from mtp.processors import TextProcessors
from mtp.sampling import RandomSource

PLAIN = Request(temperature=1.0, verify="token")
BLOCK = Request(temperature=1.0)
Conditional = Callable[[list[int]], Tensor]
"""From a whole text, prompt included, to the probabilities [V] of what follows it."""
REFUSED = (-1,)
"""Stands for all texts that end in a UserError."""


def table(seed: int, vocab: int = 3, sharpness: float = 1.0) -> Tensor:
    """float64 logits [V, V, V] of an order-2 Markov chain: row [a, b] is the law of the token after a, b."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64) * sharpness


class TableTarget:
    """`Target` whose logits come from a table; its cache is the list of tokens it was fed."""

    def __init__(self, logits: Tensor, context_length: int = 10_000) -> None:
        self.logits = logits
        self.context_length = context_length
        self.vocab_size = logits.shape[-1]
        self.device = torch.device("cpu")
        self.tokens: list[int] = []
        self.forwards: list[int] = []

    def start(self, feature_layers: tuple[int, ...]) -> None:
        self.tokens = []
        self.forwards = []

    def row(self, length: int) -> Tensor:
        """Logits after the first `length` tokens; position 0 counts as following a 0."""
        return self.logits[([0, *self.tokens])[length - 1], self.tokens[length - 1]]

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        seen = len(self.tokens)
        self.tokens += tokens[0].tolist()
        self.forwards.append(tokens.shape[1])
        assert len(self.tokens) <= self.context_length
        rows = [self.row(length) for length in range(len(self.tokens) - num_logits + 1, len(self.tokens) + 1)]
        logits = torch.stack(rows)[None] if rows else self.logits.new_zeros(1, 0, self.logits.shape[-1])
        features = torch.arange(seen, len(self.tokens), dtype=torch.float64)[None, :, None]
        return TargetOutput(logits, features)

    def forward_tree(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> TargetOutput:
        """Each row's text is the committed one and the rows it sees."""
        seen = list(self.tokens)
        rows, features = [], []
        for row in range(tokens.shape[1]):
            path = [int(tokens[0, other]) for other in range(tokens.shape[1]) if visible[row, other]]
            assert len(path) == int(depths[row]) + 1
            text = [0, *seen, *path]
            rows.append(self.logits[text[-2], text[-1]])
            features.append(len(seen) + len(path) - 1)
        self.tokens = seen + tokens[0].tolist()
        self.forwards.append(tokens.shape[1])
        return TargetOutput(torch.stack(rows)[None], torch.tensor(features, dtype=torch.float64)[None, :, None])

    def rollback(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]

    def keep(self, length: int, positions: Sequence[int]) -> None:
        self.tokens = self.tokens[:length] + [self.tokens[place] for place in positions]


class TableDrafter:
    """`Drafter` over a table; checks that every anchor is ingested once and in order."""

    def __init__(self, logits: Tensor, max_draft_length: int = 3, draft_ids: Tensor | None = None) -> None:
        self.logits = logits
        self.max_draft_length = max_draft_length
        self.feature_layers = (0,)
        self.draft_ids = draft_ids
        self.committed: list[int] = []
        self.drafts: list[list[int]] = [[]]

    def start(self, prompt: Tensor) -> None:
        self.committed = prompt[0, :1].tolist()
        self.drafts = [[]]

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        first = len(self.committed) - 1
        assert features[0, :, 0].tolist() == list(range(first, first + next_tokens.shape[1]))
        self.committed += next_tokens[0].tolist()
        self.drafts = [[]]

    def fork(self, origins: Tensor) -> None:
        self.drafts = [list(self.drafts[origin]) for origin in origins.tolist()]

    def draft(self, k: int, previous: Tensor) -> Tensor:
        rows = []
        for drafts, token in zip(self.drafts, previous.tolist(), strict=True):
            if k > 1:
                drafts.append(token)
            assert len(drafts) == k - 1
            context = [0, *self.committed, *drafts]
            assert context[-1] == token
            row = self.logits[context[-2], context[-1]]
            rows.append(row if self.draft_ids is None else row[self.draft_ids])
        return torch.stack(rows)


class Draws(RandomSource):
    """The given number for every uniform."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def uniform(self, shape: object) -> Tensor:
        return torch.full(tuple(shape), self.value, dtype=torch.float64)  # type: ignore[call-overload]


def decode(
    engine: Engine,
    prompt: list[int],
    new_tokens: int,
    draft_length: int,
    *,
    request: Request = PLAIN,
    random: RandomSource | None = None,
    eos: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], DecodeStats]:
    """The engine's tokens and statistics."""
    stats = DecodeStats(request.reported_rule, draft_length, request.tree, request.lookup)
    stopping = Stopping(room(len(prompt), engine.target.context_length, new_tokens), eos)
    processors = TextProcessors(
        request,
        prompt_length=len(prompt),
        eos_token_ids=eos,
        vocab_size=engine.target.vocab_size,
        device=engine.target.device,
    )
    steps = engine.run(
        prompt,
        request=request,
        stopping=stopping,
        random=random or RandomSource(0),
        stats=stats,
        processors=processors,
    )
    return tuple(token for step in steps for token in step.tokens), stats


def true_law(
    p: Tensor | Conditional, prompt: list[int], new_tokens: int, eos: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """Texts and their probability as products of p, cut after an end-of-sequence id.

    p is a table of probabilities [V, V, V] or a function of the text. A text that meets a row of NaN is REFUSED.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def grow(tokens: tuple[int, ...], chance: float) -> None:
        if len(tokens) == new_tokens or (tokens and tokens[-1] in eos):
            law[tokens] += chance
            return
        context = [0, *prompt, *tokens]
        row = p[context[-2], context[-1]] if isinstance(p, Tensor) else p(context[1:])
        if bool(row.isnan().any()):
            law[REFUSED] += chance
            return
        for token, share in enumerate(row.tolist()):
            if share > 0:
                grow((*tokens, token), chance * share)

    grow((), 1.0)
    return law


def total_variation(law: dict[tuple[int, ...], float], truth: dict[tuple[int, ...], float]) -> float:
    keys = law.keys() | truth.keys()
    return 0.5 * sum(abs(law.get(key, 0.0) - truth.get(key, 0.0)) for key in keys)


class BaseDrafter:
    """A drafter that is the base itself, with a cache of its own. `disturb` changes its logits [1, V]."""

    draft_ids = None
    feature_layers: tuple[int, ...] = ()

    def __init__(
        self, base: FrozenBase, max_draft_length: int = 3, disturb: Callable[[Tensor], Tensor] = lambda logits: logits
    ) -> None:
        self.max_draft_length = max_draft_length
        self.disturb = disturb
        self.target = BaseTarget(base)

    def start(self, prompt: Tensor) -> None:
        self.target.start(())
        self.seen = self.drafted = 0
        self.pending = prompt[:, :1]

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        self.target.rollback(self.seen)
        self.pending = torch.cat([self.pending, next_tokens], dim=1)
        self.drafted = 0

    def fork(self, origins: Tensor) -> None:
        raise NotImplementedError

    def draft(self, k: int, previous: Tensor) -> Tensor:
        if k == 1:
            output = self.target.forward(self.pending, 1)
            self.seen += self.pending.shape[1]
            self.pending = self.pending[:, :0]
        else:
            output = self.target.forward(previous[:, None], 1)
        self.drafted = k
        return self.disturb(output.logits[:, -1])
