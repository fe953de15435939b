"""The interface of all heads: one road for training, one for decoding, both to the same logits.

Knows: the draft vocabulary, the frozen matrices that heads borrow from the base, and the shapes.
Refuses to know: which base they come from, how the features were computed, and how logits become probabilities.

Shapes: B batch, T position, M anchors that are asked for, K draft position, D hidden, F features, V vocabulary, Vd
draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp.config import HeadsConfig
from mtp.heads.saved import Saved
from mtp.layers import UsesKernels
from mtp.output import project
from mtp.packed import segment_positions
from mtp.targets import take_anchors


@dataclass(frozen=True)
class Layout:
    """Which positions of a batch are asked for, and which of them belong together.

    anchors [B,M]: indices into T. positions [B,T]: places in the own sequence, which rotary embeddings read. segments
    [B,T]: equal numbers are one sequence; None is one sequence per row.
    """

    anchors: Tensor
    positions: Tensor
    segments: Tensor | None

    def places(self) -> Tensor:
        """Positions [B,M] of the anchors in their own sequences."""
        return take_anchors(self.positions, self.anchors)

    def visible(self) -> Tensor:
        """[B,M,T] bool: whether an anchor sees a position, which is not after it and in its own sequence."""
        index = torch.arange(self.positions.shape[1], device=self.anchors.device)
        seen = index <= self.anchors.unsqueeze(2)
        if self.segments is not None:
            seen = seen & (take_anchors(self.segments, self.anchors).unsqueeze(2) == self.segments.unsqueeze(1))
        return seen

    def visible_everywhere(self) -> Tensor | None:
        """[B,T,T] bool, as `visible`, for all positions; None where each just sees those up to itself."""
        if self.segments is None:
            return None
        return (self.segments.unsqueeze(2) == self.segments.unsqueeze(1)).tril()


@dataclass
class State(ABC):
    """What an architecture must remember between steps of decoding. Each kind extends it."""

    batch_size: int

    @abstractmethod
    def select(self, rows: Tensor) -> "State":
        """A copy with the batch rows `rows` [B'] (long), in that order; a row may occur several times."""


class Heads(Saved, UsesKernels, nn.Module, ABC):
    """q: proposes K tokens from the base's features.

    Parameters are the trained part only. The base's input embedding and output matrix are lent by `bind` and are
    neither parameters nor part of the saved weights. `draft_ids` [Vd] maps draft ids to base ids; None is the whole
    vocabulary. `output_rows` [Vd,D], or [K,Vd,D] with one matrix per draft position, take the place of the base's where
    `config.own_output` says so; they are saved and not trained.
    """

    draft_ids: Tensor | None
    output_rows: Tensor | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        # -1 is no token: heads whose vocabulary was never loaded fail in bind() instead of proposing token 0.
        ids = None if config.draft_vocab_size is None else torch.full((config.draft_vocab_size,), -1)
        self.register_buffer("draft_ids", ids)
        shape = (config.draft_length,) * (config.own_output == "each") + (config.proposals, config.hidden_size)
        self.register_buffer("output_rows", None if config.own_output == "none" else torch.zeros(shape))
        self._embedding: Tensor | None = None
        self._output_rows: Tensor | None = None

    def bind(self, embedding: Tensor, output_matrix: Tensor) -> "Heads":
        """Lend the base's input embedding [V,D] and output matrix [V,D]; both stay the base's, unchanged.

        Call it after the heads and the base are on their device, and again after `draft_ids` changed.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, matrix in (("input embedding", embedding), ("output matrix", output_matrix)):
            if tuple(matrix.shape) != expected:
                raise ValueError(f"the base's {name} is {tuple(matrix.shape)}, but these heads need {expected}")
        if self.draft_ids is not None and bool(((self.draft_ids < 0) | (self.draft_ids >= expected[0])).any()):
            raise ValueError("the draft vocabulary is not set or has ids outside the base's vocabulary")
        self._embedding = embedding.detach()
        rows = output_matrix.detach()
        if self.draft_ids is not None:
            rows = rows[self.draft_ids.to(rows.device)].contiguous()
        self._output_rows = rows if self.output_rows is None else self.output_rows
        return self

    @property
    def proposal_rows(self) -> Tensor:
        """What logits are made with: output rows [Vd,D] for all draft positions, or [K,Vd,D]."""
        assert self._output_rows is not None, "bind() the heads to their base first"
        return self._output_rows

    def embed(self, tokens: Tensor) -> Tensor:
        """e(x): the base's input embedding of `tokens` [...], as [...,D] in the heads' precision."""
        assert self._embedding is not None, "bind() the heads to their base first"
        return nn.functional.embedding(tokens, self._embedding).to(self.precision)

    def project(self, hidden: Tensor, k: int | None = None) -> Tensor:
        """Logits [...,Vd] of hidden states [...,D], over the draft vocabulary only.

        Where each draft position has its own matrix, states are of position k = 1…K, or of all of them, [...,K,D].
        """
        rows = self.proposal_rows.to(hidden.dtype)
        if rows.dim() == 3:
            if k is None:
                return torch.einsum("...kd,kvd->...kv", hidden, rows)
            rows = rows[k - 1]
        if self.kernels is None:
            return nn.functional.linear(hidden, rows)
        return project(hidden, rows, None, self.kernels)

    @property
    def precision(self) -> torch.dtype:
        """The type of the parameters."""
        return next(self.parameters()).dtype

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Training road, whole: features [B,T,F] and tokens [B,T+K] to logits [B,T,K,Vd], teacher-forced.

        Entry [b,t,k-1] predicts token t+k+1. Large: training proper uses `unroll` and projects in chunks.
        """
        logits: Tensor = self.project(self.unroll(features, tokens))
        return logits

    def unroll(
        self, features: Tensor, tokens: Tensor, anchors: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B,M,K,D] before the projection, for `anchors` [B,M] (positions; None is all T of them).

        Draft position k of anchor t reads token t+k (`mtp.targets`), so `tokens` is [B,T+K]. `segments` [B,T] is for
        rows that hold several sequences, one after another: equal numbers are one sequence, which sees itself only and
        counts positions from its own start; None is one sequence per row. The last anchors of a sequence then read
        tokens of the next one; nothing that `mtp.targets` plans asks for those states.
        """
        features = features.to(self.precision)
        every = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        layout = Layout(
            anchors=every if anchors is None else anchors,
            positions=every if segments is None else segment_positions(segments),
            segments=segments,
        )
        return self._unroll(features, tokens, layout)

    @abstractmethod
    def _unroll(self, features: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        """features [B,T,F] and tokens [B,T+K] to states [B,M,K,D] of the layout's anchors."""

    def fork(self, state: State, rows: Tensor) -> State:
        """For trees: the branches that go on from drafts `rows` [B'] (long) of a state of one text. It may share the
        state's storage, so go on from the last one only, until `ingest`."""
        return state.select(rows)

    @abstractmethod
    def new_state(self, batch_size: int) -> State:
        """An empty state for `batch_size` sequences."""

    @abstractmethod
    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        """Take in verified anchors, in order: features [B,T,F] and the token that follows each, [B,T].

        Whatever earlier drafts left in the state is forgotten.
        """

    def ingest_several(
        self, states: Sequence[State], features: Sequence[Tensor], next_tokens: Sequence[Tensor]
    ) -> None:
        """`ingest` for several texts, each with a state of its own: [1,T_i,F] and [1,T_i] of each. Heads that can do it
        at once give each text the numbers that it would get alone."""
        for one in zip(states, features, next_tokens, strict=True):
            self.ingest(*one)

    def draft_several(self, states: Sequence[State], k: int, previous: Tensor) -> Tensor:
        """`draft` for N texts, each with a state of its own: `previous` [N] to logits [N,Vd]. Heads that can do it at
        once give each text the numbers that it would get alone."""
        return torch.cat([self.draft(state, k, previous[i : i + 1]) for i, state in enumerate(states)])

    @abstractmethod
    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        """Logits [B,Vd] of draft position k = 1, 2, …, asked in order after an `ingest`; k = 1 begins a draft anew.

        `previous` [B] is the token just drafted; at k = 1 it is already ingested and ignored.
        """
