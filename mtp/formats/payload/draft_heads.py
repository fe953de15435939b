"""Multi-token-prediction heads by their saved weights: the proxy q, one draft position at a time.

Knows: five kinds of heads, and blocks of the types that common bases have. Needs torch and nothing else. Refuses to
know: the base, beside its input embedding and output matrix, which are lent; and how logits become probabilities.

Shapes: T position, K draft position, D hidden, F features, V vocabulary, Vd draft vocabulary, H query heads, J
key-value heads, E head size. There is one text, and no batch axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Weights:
    """The arithmetic of modules, by their names in the file."""

    def __init__(self, shape: dict[str, Any] | None, tensors: dict[str, Tensor]) -> None:
        self.shape = shape or {}
        self.tensors = tensors

    def linear(self, name: str, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """[..., D], by RMS or with mean and bias."""
        weight, eps = self.tensors[f"{name}.weight"], self.shape["rms_norm_eps"]
        bias = self.tensors.get(f"{name}.bias")
        if bias is not None:
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def residual(self, name: str, layers: int, x: Tensor) -> Tensor:
        """Residual layers `name`.layers.0 and so on: x + SiLU(W x + b), [..., D]."""
        for layer in range(layers):
            x = x + F.silu(self.linear(f"{name}.layers.{layer}", x))
        return x

    def heads(self, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """Queries, keys or values: x [T, any] to [T, heads, E], normed and rotated where `positions` [T] is given."""
        made = self.linear(name, x).view(len(x), -1, self.shape["head_dim"])
        if positions is None:
            return made
        if self.shape["qk_norm"]:
            norm = self.tensors[f"{name.removesuffix('proj')}norm.weight"]
            made = F.rms_norm(made, norm.shape, norm, self.shape["rms_norm_eps"])
        return self.rotate(made, positions)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [T, heads, E] at positions [T]: pairs (i, i + n) of the first 2n entries."""
        given, half = self.shape["rope_frequencies"], self.shape["head_dim"] // 2
        exponents = torch.arange(half, dtype=torch.float32, device=x.device) / half
        turns = self.shape["rope_theta"] ** -exponents if given is None else torch.tensor(given, device=x.device)
        if not len(turns):
            return x
        angles = (positions.float()[:, None] * turns)[:, None]
        cos, sin = (self.shape["rope_scale"] * wave.to(x.dtype) for wave in (angles.cos(), angles.sin()))
        first, second, rest = x.tensor_split((len(turns), 2 * len(turns)), dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """[..., D], gated or not."""
        up = self.linear(f"{name}.up_proj", x)
        risen = ACTIVATIONS[self.shape["activation"]](
            self.linear(f"{name}.gate_proj", x) if self.shape["gated"] else up
        )
        return self.linear(f"{name}.down_proj", risen * up if self.shape["gated"] else risen)


class Past:
    """Keys and values [T, J, E] of one block. `keep` says how many of them a draft may not overwrite."""

    def __init__(self, weights: Weights, name: str) -> None:
        self.weights, self.name, self.kept = weights, name, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, inputs: Tensor, start: int) -> None:
        """Put keys and values of inputs [T, any] at `start`, and forget what is behind them."""
        keys = self.weights.heads(
            f"{self.name}.k_proj", inputs, torch.arange(len(inputs), device=inputs.device) + start
        )
        values = self.weights.heads(f"{self.name}.v_proj", inputs, None)
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys[:start], keys]), torch.cat([self.values[:start], values])
        self.keys, self.values = keys, values

    def attend(self, inputs: Tensor, start: int) -> Tensor:
        """Attention of inputs [N, any] at the places from `start` on, each over all keys up to its own: [N, D]."""
        assert self.keys is not None
        assert self.values is not None
        places = torch.arange(len(inputs), device=inputs.device) + start
        queries = self.weights.heads(f"{self.name}.q_proj", inputs, places)
        visible = torch.arange(len(self.keys), device=inputs.device) <= places[:, None]
        q, k, v = (part.transpose(0, 1)[None] for part in (queries, self.keys, self.values))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self.weights.linear(f"{self.name}.o_proj", mixed[0].transpose(0, 1).flatten(1))


def add_mlp(weights: Weights, before: Tensor, attended: Tensor, norm: str, mlp: str) -> Tensor:
    """The state after a block: what was before it [N, D], and what attention made of it [N, D]."""
    after = before + attended
    read = before if weights.shape["parallel_residual"] else after
    return after + weights.mlp(mlp, weights.norm(norm, read))


class DraftHeads:
    """One text's heads. `ingest` takes verified positions, `draft` gives the logits of the next draft position."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor, output_matrix: Tensor
    ) -> None:
        """config and tensors as saved; the base's input embedding and output matrix, each [V, D]."""
        tensors = dict(tensors)
        self.draft_ids = tensors.pop("draft_ids", None)
        self.config, self.kind, self.size = config, str(config["kind"]), int(config["hidden_size"])
        self.weights = Weights(config["block"], tensors)
        self.embedding = embedding
        rows = output_matrix if self.draft_ids is None else output_matrix[self.draft_ids]
        self.output_rows = tensors.pop("output_rows", rows)  # [Vd, D], or [K, Vd, D] with one per draft position
        self.features = embedding.new_zeros(0, self.size * len(config["feature_layers"]))
        self.tokens = torch.zeros(0, dtype=torch.long, device=embedding.device)  # the token after each anchor
        depths = int(config["draft_length"])
        names = {"recurrent": ["attention"], "sequential": [f"depths.{k}.block.attention" for k in range(depths)]}
        names["parallel"] = [f"blocks.{k}.attention" for k in range(depths)]
        self.pasts = [Past(self.weights, name) for name in names.get(self.kind, [])]
        self.states = [embedding.new_zeros(0, self.size) for _ in range(depths)]  # sequential: final states per depth
        self.latest = self.features  # recurrent: the state to go on from
        self.fresh = self.features  # sequential: states of the depth asked last, behind its final ones

    def ingest(self, features: Tensor, tokens: Tensor) -> None:
        """Verified anchors, in order: features [T, F] and the token after each [T]. Forgets all drafts."""
        features = features.to(self.embedding.dtype)
        start = len(self.tokens)
        self.tokens = torch.cat([self.tokens, tokens])
        if self.kind == "sequential" or not start:
            self.features = torch.cat([self.features, features]) if start else features
        else:
            self.features = features[-1:]  # the other kinds look at the last anchor, and at keys
        if self.kind == "recurrent":
            fused = self.weights.linear("fc", self._read(features))
            self.first = self._recur(tokens, fused, start)
        elif self.kind == "parallel":
            for k, past in enumerate(self.pasts):
                past.write(self.weights.norm(f"blocks.{k}.attention_norm", features), start)
        elif self.kind == "sequential":
            for k in range(1, len(self.pasts) + 1):
                begin, end = len(self.states[k - 1]), max(0, len(self.tokens) + 1 - k)
                if end > begin:
                    below = (self.features if k == 1 else self.states[k - 2])[begin:end]
                    states = self._advance(k, below, self.tokens[begin + k - 1 : end + k - 1], begin)
                    self.states[k - 1] = torch.cat([self.states[k - 1], states])

    def draft(self, k: int, drafts: Tensor) -> Tensor:
        """Logits [Vd] of draft position k = 1, 2, …, asked in order; drafts [k - 1] are those of this draft."""
        after = {"medusa": self._medusa, "hydra": self._hydra, "parallel": self._parallel}
        after |= {"recurrent": self._recurrent, "sequential": self._sequential}
        rows = self.output_rows if self.output_rows.dim() == 2 else self.output_rows[k - 1]
        return F.linear(after[self.kind](k, drafts), rows)

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def _medusa(self, k: int, drafts: Tensor) -> Tensor:
        return self.weights.residual(f"heads.{k - 1}", self.config["num_layers"], self.features[-1])

    def _hydra(self, k: int, drafts: Tensor) -> Tensor:
        read = torch.cat([self.tokens[-1:], drafts])
        inputs, name = torch.cat([self.features[-1], self._embed(read).flatten()]), f"heads.{k - 1}"
        hidden = self.weights.linear(f"{name}.shortcut", inputs) + F.silu(self.weights.linear(f"{name}.first", inputs))
        return self.weights.residual(f"{name}.rest", self.config["num_layers"] - 1, hidden)

    def _parallel(self, k: int, drafts: Tensor) -> Tensor:
        name, before = f"blocks.{k - 1}", self.features[-1:]
        attended = self.pasts[k - 1].attend(self.weights.norm(f"{name}.attention_norm", before), len(self.tokens) - 1)
        after = add_mlp(self.weights, before, attended, f"{name}.mlp_norm", f"{name}.mlp")
        return self.weights.norm("norm", after)[0]

    def _read(self, features: Tensor) -> Tensor:
        """What fc reads: the features [T, F], or each layer normed."""
        if not self.config["eagle31_norms"]:
            return features
        layers = features.chunk(len(self.config["feature_layers"]), dim=-1)
        return torch.cat([self.weights.norm(f"feature_norms.{i}", layer) for i, layer in enumerate(layers)], dim=-1)

    def _recur(self, tokens: Tensor, hidden: Tensor, start: int) -> Tensor:
        """g [1, D] of the last of tokens [T] on states [T, D], whose keys are written at `start`."""
        embedded = self.weights.norm("embed_norm", self._embed(tokens))
        inputs = torch.cat([embedded, self.weights.norm("hidden_norm", hidden)], dim=-1)
        self.pasts[0].write(inputs, start)
        attended = self.pasts[0].attend(inputs[-1:], start + len(inputs) - 1)
        after = add_mlp(self.weights, hidden[-1:], attended, "mlp_norm", "mlp")
        return self.weights.norm("norm", after) if self.config["eagle31_norms"] else after

    def _recurrent(self, k: int, drafts: Tensor) -> Tensor:
        self.latest = self.first if k == 1 else self._recur(drafts[-1:], self.latest, len(self.tokens) + k - 2)
        return (self.latest if self.config["eagle31_norms"] else self.weights.norm("norm", self.latest))[0]

    def _sequential(self, k: int, drafts: Tensor) -> Tensor:
        start = max(0, len(self.tokens) + 1 - k)  # anchors from here on read a draft at this depth
        if k == 1:
            states = self.states[0][-1:]
            self.fresh = states[:0]
        else:
            below = torch.cat([self.states[k - 2][start:], self.fresh])
            read = torch.cat([self.tokens, drafts])[start + k - 1 :]
            states = self.fresh = self._advance(k, below, read, start)
        return self.weights.norm(f"depths.{k - 1}.norm", states[-1])

    def _advance(self, k: int, below: Tensor, tokens: Tensor, start: int) -> Tensor:
        """States [N, D] of depth k at the anchors from `start` on: states below [N, D], and their tokens [N]."""
        name, weights = f"depths.{k - 1}", self.weights
        embedded = weights.norm(f"{name}.embed_norm", self._embed(tokens))
        both = [embedded, weights.norm(f"{name}.hidden_norm", below)]
        if self.config["concat_order"] == "hidden_embed":
            both.reverse()
        joined = weights.linear(f"{name}.projection", torch.cat(both, dim=-1))
        inputs = weights.norm(f"{name}.block.attention_norm", joined)
        self.pasts[k - 1].write(inputs, start)
        attended = self.pasts[k - 1].attend(inputs, start)
        return add_mlp(weights, joined, attended, f"{name}.block.mlp_norm", f"{name}.block.mlp")
