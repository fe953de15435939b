"""`recurrent`: one transformer block applied K times, unrolled on its own hidden state.

At anchor t, draft position k reads token x_{t+k} and the state g^{k-1}; g^0 = fc(h_t) fuses the feature layers:

    a   = [norm_e(e(x_{t+k})) ; norm_h(g^{k-1})]                        (2D wide)
    z   = g^{k-1} + attention(a);   g^k = z + mlp(norm_m(z));   logits = U norm(g^k)

Attention at draft position k sees the first-position keys of anchors <= t and the anchor's own keys of positions 2…k,
in training as in decoding. Sources: EAGLE-3, arXiv 2503.01840 (block, feature fusion, training-time test) and FastMTP,
arXiv 2509.18362 (one block shared by all positions). With `eagle31_norms` each feature layer has a norm of its own
before fc, and the next position goes on from norm(g^k).

Shapes: B batch, T position, M anchors, K draft position, D hidden, H query heads, J key-value heads, G = H / J, E head
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtp.config import HeadsConfig
from mtp.heads.blocks import Attention, KeyValues, Mlp, add_mlp, make_norm
from mtp.heads.interface import Heads, Layout, State
from mtp.kernels import MOST_ROWS
from mtp.layers import Linear
from mtp.one_call import OneCall, Past, Text, fits
from mtp.targets import draft_inputs, take_anchors


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Softmax attention over shared keys and over the anchor's own earlier draft positions.

    queries [B,M,J,G,E]; keys, values [B,T,J,E]; visible [B,M,T]; own: (key, value) pairs, each [B,M,J,E]. Returns
    [B,M,J,G,E].
    """
    scaled = queries * queries.shape[-1] ** -0.5
    shared = torch.einsum("bmjge,btje->bmjgt", scaled, keys).masked_fill(~visible[:, :, None, None], float("-inf"))
    private = [(scaled * key.unsqueeze(3)).sum(-1, keepdim=True) for key, _ in own]
    scores = torch.cat([shared, *private], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    length = keys.shape[1]
    mixed = torch.einsum("bmjgt,btje->bmjge", weights[..., :length], values)
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., length + index, None] * value.unsqueeze(3)
    return mixed


@dataclass
class RecurrentState(State):
    """Keys and values of the `length` verified anchors, and the state drafts start from.

    `first` [B,1,D] is g^1 of the last verified anchor, `latest` that of the latest draft position; drafts write behind
    `length` and are overwritten by `ingest`.
    """

    cache: KeyValues = field(default_factory=KeyValues)
    length: int = 0
    first: Tensor | None = None
    latest: Tensor | None = None
    drafted: int = 0
    """How many places behind `length` hold drafts of this one text."""
    seen: Tensor | None = None
    """Of branches of one text, whose cache all share: which of the places behind `length` each sees, [B, any] bool."""

    def select(self, rows: Tensor) -> "RecurrentState":
        assert self.seen is None, "these are branches of one text"
        first, latest = (None if x is None else x[rows] for x in (self.first, self.latest))
        return RecurrentState(len(rows), self.cache.select(rows), self.length, first, latest)


class RecurrentHeads(Heads):
    """See the module. Trainable parameters: n_f D^2 + 2D (H + 2J) E + H E D + 3 D I + 4 D for a block of Llama's type;
    in general n_f D^2 + `block_parameters` with inputs of 2D + 2 norms, and n_f norms more with `eagle31_norms`."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.block is not None, "recurrent heads need the shape of their block"
        size, shape = config.hidden_size, config.block
        self.fc = Linear(config.feature_size, size, bias=False)
        self.embed_norm = make_norm(size, shape)
        self.hidden_norm = make_norm(size, shape)
        self.attention = Attention(2 * size, size, shape)
        self.mlp_norm = make_norm(size, shape)
        self.mlp = Mlp(size, shape)
        self.norm = make_norm(size, shape)
        if config.eagle31_norms:
            self.feature_norms = nn.ModuleList(make_norm(size, shape) for _ in config.feature_layers)
        self._one_call: OneCall | None = None

    def read(self, features: Tensor) -> Tensor:
        """What fc reads of features [...,F]: themselves, or each layer normalised."""
        if not self.config.eagle31_norms:
            return features
        layers = features.chunk(len(self.feature_norms), dim=-1)
        return torch.cat([norm(layer) for norm, layer in zip(self.feature_norms, layers, strict=True)], dim=-1)

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """a = [norm_e(e(x)) ; norm_h(g)], embedding first: tokens [...], hidden [...,D] to [...,2D]."""
        return torch.cat([self.embed_norm(self.embed(tokens)), self.hidden_norm(hidden)], dim=-1)

    def _finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The state to go on from, out of the one before [B,M,D] and the attention's mix [B,M,J,G,E]."""
        updated = add_mlp(hidden, self.attention.output(mixed), self.mlp_norm, self.mlp)
        return self._normalised(updated) if self.config.eagle31_norms else updated

    def _normalised(self, hidden: Tensor) -> Tensor:
        normalised: Tensor = self.norm(hidden)
        return normalised

    def _output(self, hidden: Tensor) -> Tensor:
        """What the output matrix reads of the state to go on from."""
        return hidden if self.config.eagle31_norms else self._normalised(hidden)

    def _unroll(self, features: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        fused, every = self.fc(self.read(features)), draft_inputs(tokens, self.config.draft_length)
        shared_inputs = self._inputs(every[:, :, 0], fused)
        keys, values = self.attention.keys_values(shared_inputs, layout.positions)
        visible, places = layout.visible(), layout.places()
        inputs = take_anchors(every, layout.anchors)
        hidden, current = take_anchors(fused, layout.anchors), take_anchors(shared_inputs, layout.anchors)
        own: list[tuple[Tensor, Tensor]] = []
        states = []
        for step in range(self.config.draft_length):
            if step:
                current = self._inputs(inputs[:, :, step], hidden)
                own.append(self.attention.keys_values(current, places + step))
            queries = self.attention.queries(current, places + step)
            hidden = self._finish(hidden, attend(queries, keys, values, visible, own))
            states.append(self._output(hidden))
        return torch.stack(states, dim=2)

    def new_state(self, batch_size: int) -> RecurrentState:
        return RecurrentState(batch_size)

    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        assert isinstance(state, RecurrentState)
        if not features.shape[1]:
            return
        fused = self.fc(self.read(features.to(self.precision)))
        inputs = self._inputs(next_tokens, fused)
        state.first = self._extend(state, inputs, fused, state.length)
        state.length += features.shape[1]

    def ingest_several(
        self, states: Sequence[State], features: Sequence[Tensor], next_tokens: Sequence[Tensor]
    ) -> None:
        counts = [len(tokens[0]) for tokens in next_tokens]
        half = len(states) // 2
        if half and sum(counts) > MOST_ROWS:
            for part in (slice(half), slice(half, None)):
                self.ingest_several(states[part], features[part], next_tokens[part])
            return
        texts = [state for state in states if isinstance(state, RecurrentState)]
        read = torch.cat([one[0] for one in features]).to(self.precision)
        if not half or not all(counts) or not self._at_once(read):
            super().ingest_several(states, features, next_tokens)
            return
        fused = self.fc(self.read(read))
        inputs = self._inputs(torch.cat([one[0] for one in next_tokens]), fused)
        after = self._rows_of_several(texts, counts, inputs, fused, 0)
        for state, rows in zip(texts, torch.split(after, counts), strict=True):
            state.first, state.length = rows[None, -1:], state.length + len(rows)

    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        assert isinstance(state, RecurrentState)
        assert state.first is not None, "ingest() at least one anchor before drafting"
        state.drafted = k - 1
        if k == 1:
            state.latest = state.first
        else:
            assert state.latest is not None, "draft positions are asked in order, from 1"
            inputs = self._inputs(previous.unsqueeze(1), state.latest)
            go_on = self._extend if state.seen is None else self._extend_branches
            state.latest = go_on(state, inputs, state.latest, state.length + k - 2)
        return self.project(self._output(state.latest[:, 0]))

    def draft_several(self, states: Sequence[State], k: int, previous: Tensor) -> Tensor:
        if len(states) > MOST_ROWS:
            parts = (slice(start, start + MOST_ROWS) for start in range(0, len(states), MOST_ROWS))
            return torch.cat([self.draft_several(states[part], k, previous[part]) for part in parts])
        texts = [state for state in states if isinstance(state, RecurrentState)]
        latest = [state.first if k == 1 else state.latest for state in texts]
        hidden = torch.cat([one[0] for one in latest if one is not None])
        if not self._at_once(hidden):
            return super().draft_several(states, k, previous)
        if k > 1:
            hidden = self._rows_of_several(texts, [1] * len(texts), self._inputs(previous, hidden), hidden, k - 2)
        for state, one in zip(texts, hidden[:, None, None], strict=True):
            state.drafted, state.latest = k - 1, one
        return self.project(self._output(hidden))

    def fork(self, state: State, rows: Tensor) -> State:
        assert isinstance(state, RecurrentState)
        assert state.latest is not None, "draft() before branching"
        if state.seen is None and not self._at_once(state.latest):
            return state.select(rows)
        seen = state.latest.new_ones(1, state.drafted, dtype=torch.bool) if state.seen is None else state.seen
        return RecurrentState(
            len(rows), state.cache, state.length, state.first, state.latest[rows], state.drafted, seen[rows]
        )

    def _extend(self, state: RecurrentState, inputs: Tensor, hidden: Tensor, start: int) -> Tensor:
        """Write keys of inputs [B,T,2D] at `start`, and return g [B,1,D] of the last one, out of the states [B,T,D]
        before; only it needs a query."""
        batch, length = inputs.shape[:2]
        positions = torch.arange(start, start + length, device=inputs.device).expand(batch, length)
        if batch == 1 and self._at_once(inputs):
            return self._rows(state, inputs[0], hidden[0], positions, start)[None, -1:]
        keys, values = state.cache.write(*self.attention.keys_values(inputs, positions), start)
        queries = self.attention.queries(inputs[:, -1:], positions[:, -1:])
        # The G queries of a key-value head stand where SDPA expects positions, so that keys need no repeating.
        mixed = nn.functional.scaled_dot_product_attention(queries[:, 0], keys.transpose(1, 2), values.transpose(1, 2))
        return self._finish(hidden[:, -1:], mixed.unsqueeze(1))

    def _extend_branches(self, state: RecurrentState, inputs: Tensor, hidden: Tensor, place: int) -> Tensor:
        """g [B,1,D] of branches that share a cache, at position `place`: inputs [B,1,2D], hidden [B,1,D]. Their keys
        stand one behind the other, and each branch sees its own and those it goes on from."""
        assert state.seen is not None
        after, seen = [], state.seen
        for rows in torch.arange(len(inputs), device=inputs.device).split(MOST_ROWS):  # type: ignore[no-untyped-call]
            own = torch.arange(len(inputs), device=inputs.device)[:, None] == rows
            start, seen = state.length + seen.shape[1], torch.cat([seen, own], dim=1)
            positions = torch.full((1, len(rows)), place, device=inputs.device)
            after.append(self._rows(state, inputs[rows, 0], hidden[rows, 0], positions, start, seen[rows]))
        state.seen = seen
        return torch.cat(after)[:, None]

    def _at_once(self, inputs: Tensor) -> bool:
        """Whether the block is to run over the rows of inputs [...,any] in one call of the kernels."""
        if self.kernels is None or not self.kernels.take(inputs, self.fc.weight):
            return False
        known = self._one_call
        if known is None or known.kernels is not self.kernels or not known.current():
            self._one_call = OneCall(self.kernels, [self], self.config.hidden_size) if fits(self) else None
        return self._one_call is not None

    def _rows(
        self,
        state: RecurrentState,
        inputs: Tensor,
        hidden: Tensor,
        positions: Tensor,
        start: int,
        visible: Tensor | None = None,
    ) -> Tensor:
        """g [n,D] of all rows at positions [1,n], in one call: inputs [n,2D], hidden [n,D], keys written at `start`."""
        return self._run([self._text(state, len(inputs), start)], inputs, hidden, positions, visible)

    def _rows_of_several(
        self, states: list[RecurrentState], counts: list[int], inputs: Tensor, hidden: Tensor, drafts: int
    ) -> Tensor:
        """g [n,D] of so many rows of each text, behind its anchors and drafts: inputs [n,2D], hidden [n,D]."""
        texts = [self._text(state, count, state.length + drafts) for state, count in zip(states, counts, strict=True)]
        places = [text.length + row for text in texts for row in range(text.rows)]
        return self._run(texts, inputs, hidden, torch.tensor([places], device=inputs.device))

    def _text(self, state: RecurrentState, rows: int, start: int) -> Text:
        shape = self.attention.shape
        like = torch.empty(1, 0, shape.num_key_value_heads, shape.head_dim)
        return Text(rows, start, buffers=state.cache.reserve(rows, start, like))

    def _run(
        self, texts: list[Text], inputs: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor | None = None
    ) -> Tensor:
        assert self._one_call is not None
        assert texts[0].buffers is not None
        shape = self.attention.shape
        past = Past([texts[0].buffers], (shape.head_dim, shape.num_key_value_heads * shape.head_dim), texts)
        after = self._one_call.run(hidden, self.attention.turn(positions, inputs.dtype), past, visible, inputs)[-1]
        return self._normalised(after) if self.config.eagle31_norms else after
