"""Whether imported heads read what they should: how well they draft a text that the base writes, as they are and with
one thing exchanged.

Shapes alone do not tell [embedding ; state] from [state ; embedding], one feature layer from another, or the norm of
the one half from that of the other. Heads that draft well do: each of these exchanges costs them accepted drafts.

Knows: the exchanges that EAGLE-3 folders are known for, and when one of them is clearly better. Refuses to know: files.

Shapes: B texts, T position, N positions in all texts, D hidden, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats.eagle3_reader import AUX_LAYERS
from mtp.heads import Heads, build_heads

_State = dict[str, Tensor]
_TEXTS, _LENGTH = 8, 17
_LEAST_GAIN, _ERRORS = 0.01, 3.0
MARGIN = f"more than {_LEAST_GAIN} and {_ERRORS:g} standard errors"
"""How much better an exchange must do to be believed."""


class Fit:
    """Heads on a text that the base writes.

    `overlap` [N] is sum_x min(p, q) at the first draft position, the share of drafts that sampling keeps.
    """

    @torch.no_grad()
    def __init__(self, heads: Heads, base: FrozenBase) -> None:
        self._tokens = _written(base)
        output = base.forward(self._tokens, feature_layers=heads.config.feature_layers)
        self._features = output.features.float().cpu()
        p = base.logits(output.hidden)[:, 1:].softmax(-1).cpu().flatten(0, 1)
        self._p = p if heads.draft_ids is None else p[:, heads.draft_ids]
        self._heads, self._base = heads, base
        self.overlap, self._skill = self._of(heads)

    @torch.no_grad()
    def _of(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Overlap [N], and how far it is above that with p of the same place in another text: random heads have an
        overlap by chance, which an exchange changes by chance, and this alone does not."""
        padded = torch.nn.functional.pad(self._tokens.cpu(), (0, heads.config.draft_length))
        q = heads.project(heads.unroll(self._features, padded)[:, :-1, 0], k=1).softmax(-1).flatten(0, 1)
        length = len(q) // len(self._tokens)
        here, elsewhere = (torch.minimum(p, q).sum(-1) for p in (self._p, self._p.roll(length, 0)))
        return here, here - elsewhere

    @torch.no_grad()
    def better(self) -> tuple[str, Tensor] | None:
        """The exchange that recurrent heads evidently need and their overlap [N] with it; None where none is clearly
        better than the heads as they are."""
        found = {name: self._of(heads) for name, heads in self._exchanged()}
        name = max(found, key=lambda one: float(found[one][1].mean()))
        overlap, skill = found[name]
        gain = skill - self._skill
        error = float(gain.std()) / len(gain) ** 0.5
        return (name, overlap) if float(gain.mean()) > max(_LEAST_GAIN, _ERRORS * error) else None

    def _exchanged(self) -> Iterator[tuple[str, Heads]]:
        """Copies of the heads, for one draft position, each with another exchange."""
        for name, exchange in EXCHANGES.items():
            heads = build_heads(replace(self._heads.config, draft_length=1)).eval()
            state = {name: tensor.clone() for name, tensor in self._heads.state_dict().items()}
            heads.load_state_dict(state | exchange(state))
            yield name, heads.bind(self._base.embedding.cpu().float(), self._base.output_matrix.cpu().float())


def check_arrangement(heads: Heads, base: FrozenBase, where: str) -> str:
    """How recurrent or other heads, bound on the CPU in float32, fit a base, in words.

    UserError, naming `where` they come from, if recurrent ones draft clearly better with one thing exchanged.
    """
    fit = Fit(heads, base)
    given = float(fit.overlap.mean())
    better = fit.better() if heads.config.kind == "recurrent" else None
    if better is not None:
        name, overlap = better
        raise UserError(
            f"{where}: {name}: first drafts overlap with base {base.name!r} by {given:.2f} as they are and by "
            f"{float(overlap.mean()):.2f} once that is exchanged ({MARGIN} better on {len(overlap)} tokens that it "
            "writes). Exchange it in the folder, or have it written again; nothing was imported."
        )
    return (
        f"first drafts overlap with the base's distribution by {given:.2f} on {len(fit.overlap)} tokens that it writes "
        "(1 is the same distribution, 0 nothing in common)"
    )


def _halves(*names: str) -> Callable[[_State], _State]:
    """The two halves of the columns of projections exchanged."""
    keys = [f"attention.{name}_proj.weight" for name in names]
    return lambda state: {key: torch.cat(state[key].chunk(2, dim=1)[::-1], dim=1) for key in keys}


def _blocks(order: tuple[int, ...]) -> Callable[[_State], _State]:
    """The blocks of fc, one per feature layer, in another order."""

    def exchange(state: _State) -> _State:
        blocks = state["fc.weight"].chunk(AUX_LAYERS, dim=1)
        return {"fc.weight": torch.cat([blocks[block] for block in order], dim=1)}

    return exchange


def _norms(state: _State) -> _State:
    return {"embed_norm.weight": state["hidden_norm.weight"], "hidden_norm.weight": state["embed_norm.weight"]}


def _exchanges() -> dict[str, Callable[[_State], _State]]:
    reads = "[state ; embedding], and [embedding ; state] is expected"
    found = {f"self_attn.{name}_proj.weight reads {reads}": _halves(name) for name in "qkv"}
    found[f"self_attn.q_proj.weight, k_proj.weight and v_proj.weight read {reads}"] = _halves(*"qkv")
    found["input_layernorm.weight and hidden_norm.weight stand in each other's place"] = _norms
    for order in permutations(range(AUX_LAYERS)):
        if order != tuple(range(AUX_LAYERS)):
            place = (
                f"fc.weight has the blocks of the feature layers in another order (blocks {list(order)} are expected)"
            )
            found[place] = _blocks(order)
    return found


EXCHANGES = _exchanges()
"""What is known to be mixed up, in words, and how it is put right."""


@torch.no_grad()
def _written(base: FrozenBase) -> Tensor:
    """Texts [B,T] that the base writes by itself, drawn from its own distribution, the same each time."""
    start, generator = getattr(base.tokenizer, "bos_token_id", None), torch.Generator().manual_seed(0)
    text = torch.full((_TEXTS, 1), 0 if start is None else start, device=base.device)
    try:
        cache = base.new_cache()
    except UserError:  # a base whose cache cannot be rolled back is read anew for each token
        cache = None
    for _ in range(min(_LENGTH, base.context_length - 1) - 1):
        output = base.forward(text if cache is None else text[:, -1:], cache=cache)
        p = base.logits(output.hidden[:, -1]).softmax(-1).double().cpu()
        text = torch.cat([text, torch.multinomial(p, 1, generator=generator).to(text.device)], dim=1)
    return text
