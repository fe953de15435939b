"""What a set of heads is: the choices a user makes and the facts read off the base, as one schema.

Knows: the fields, their meaning, their limits, and the JSON they travel in. `HeadsOptions` is what a YAML file may say
under `heads:`; `HeadsConfig` adds what was read off the base, and is what `config.json` beside the weights holds.

Refuses to know: how heads compute, where files lie, and anything about training. An unknown key is an error, because a
misspelt option that is silently ignored costs a night of training.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mtp.errors import UserError

Kind = Literal["medusa", "recurrent", "sequential", "parallel", "hydra"]
Order = Literal["embed_hidden", "hidden_embed"]
Init = Literal["random", "base", "shipped"]
OwnOutput = Literal["none", "one", "each"]
FORMAT_VERSION = 1

WITH_BLOCK: tuple[Kind, ...] = ("recurrent", "sequential", "parallel")
_APPLIES_TO: dict[str, tuple[Kind, ...]] = {
    "num_layers": ("medusa", "hydra"),
    "concat_order": ("sequential",),
    "eagle31_norms": ("recurrent",),
    "init": WITH_BLOCK,
}


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """What a user chooses.

    Args:
        kind: `recurrent` (one block applied K times on its own hidden state), `sequential` (K blocks in a chain, each
            with its own projection of token and state), `parallel` (K blocks side by side on one state), `hydra`
            (residual heads that read the drafted tokens) or `medusa` (independent residual heads).
        draft_length: K, how many draft positions are trained. Decoding may use fewer, never more.
        draft_vocab_size: Vd, how many tokens the heads can propose; null is the whole vocabulary.
        feature_layers: which hidden states of the base the heads read. Id i below the number of layers L is the input
            of decoder layer i (0 is the embedding); L is the state after the final norm. null picks the usual ones.
            Kinds other than `recurrent` read one.
        num_layers: residual layers per head (`medusa` and `hydra` only).
        concat_order: what comes first in the input of a projection (`sequential` only): `embed_hidden` as in
            DeepSeek-V3 and Qwen3-Next, `hidden_embed` as in MiMo.
        eagle31_norms: the two norms of EAGLE-3.1 (`recurrent` only): one per feature layer before they are fused, and
            the normalised state is what the next draft position goes on from.
        init: `random`, or `base`: blocks and norms start as copies of the base's last block and final norm, so that
            heads begin near the base's own prediction (kinds with a block only). `base` is refused where a copy of the
            block does not compute what the block does. `shipped` (`sequential` only) takes the modules that the base's
            checkpoint brings with it, as DeepSeek-V3's and MiMo's do. Training's closed-form start of recurrent heads
            replaces `random` only.
    """

    kind: Kind = "recurrent"
    draft_length: int = 4
    draft_vocab_size: int | None = None
    feature_layers: tuple[int, ...] | None = None
    num_layers: int = 1
    concat_order: Order = "embed_hidden"
    eagle31_norms: bool = False
    init: Init = "random"

    def __post_init__(self) -> None:
        for name, choices in (("kind", Kind), ("concat_order", Order), ("init", Init)):
            if getattr(self, name) not in get_args(choices):
                raise UserError(f"heads.{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(choices))}.")
        for name, low in (("draft_length", 1), ("num_layers", 1), ("draft_vocab_size", 2)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"heads.{name} is {value}; it must be at least {low}.")
        if self.init == "shipped" and self.kind != "sequential":
            raise UserError(
                f"heads.init is shipped, which {self.kind} heads cannot take; use kind: sequential, or init: base."
            )
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, kinds in _APPLIES_TO.items():
            if self.kind not in kinds and getattr(self, name) != defaults[name]:
                raise UserError(
                    f"heads.{name} is {getattr(self, name)}, which {self.kind} heads do not have; remove the key or "
                    f"use heads.kind: {' or '.join(kinds)}."
                )


@dataclass(frozen=True, kw_only=True)
class BaseRef:
    """The base that heads were trained on: enough to find it again and to refuse another one.

    `fingerprint` and `tokenizer_fingerprint` are those of `mtp.base.FrozenBase`.
    """

    name: str
    revision: str | None = None
    fingerprint: str = ""
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes and type of a transformer block of heads; read off the base. The defaults are Llama's type.

    Args:
        intermediate_size: I, rows of the MLP.
        num_attention_heads: H query heads.
        num_key_value_heads: J key-value heads; a divisor of H.
        head_dim: E, size of a head; even.
        rms_norm_eps: of every norm, whichever its type.
        rope_theta: of the rotary frequencies theta^(-2i/E), unless `rope_frequencies` holds others.
        norm: `rms`, or `layer` (mean removed, with bias).
        gated: the MLP is down(act(gate x) * up x); otherwise down(act(up x)).
        activation: act; `gelu_tanh` is its usual approximation.
        qkv_bias: whether queries, keys and values have a bias.
        output_bias: whether attention's output has one.
        mlp_bias: whether the matrices of the MLP have one.
        qk_norm: RMS norms over each head's queries and keys, before they are rotated.
        parallel_residual: the MLP reads the block's input instead of what attention made of it.
        rope_frequencies: one per rotated pair, fastest first; fewer than E/2 leave the rest of a head as it is, and an
            empty list rotates nothing. null is the formula.
        rope_scale: factor on rotated queries and keys.
    """

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    rope_frequencies: tuple[float, ...] | None = None
    rope_scale: float = 1.0

    def __post_init__(self) -> None:
        if min(self.intermediate_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim) < 1:
            raise UserError(f"block has a size below 1: {self}.")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise UserError(
                f"block has {self.num_attention_heads} query heads, {self.num_key_value_heads} key-value heads and "
                f"head_dim {self.head_dim}; the second must divide the first and the third be even."
            )
        if self.rope_frequencies is not None and 2 * len(self.rope_frequencies) > self.head_dim:
            raise UserError(
                f"block.rope_frequencies has {len(self.rope_frequencies)} entries, more than half of head_dim "
                f"{self.head_dim}; give at most one per pair."
            )


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(HeadsOptions):
    """A complete description: `HeadsOptions` plus what was read off the base. This is `config.json`.

    Args:
        hidden_size: D of the base.
        vocab_size: V, the rows of the base's output matrix.
        draft_vocab_hash: SHA-256 of the draft vocabulary's ids; null when the heads propose from the whole vocabulary.
        block: sizes and type of the block (kinds with a block only).
        base: the base the heads belong to.
        own_output: whether heads bring output rows of their own in place of the base's, as imported ones may: `one`
            matrix for all draft positions, or one for `each` (`medusa` only). They are not trained.
        format_version: of this file format.
    """

    hidden_size: int
    vocab_size: int
    base: BaseRef
    draft_vocab_hash: str | None = None
    block: BlockShape | None = None
    own_output: OwnOutput = "none"
    format_version: int = FORMAT_VERSION
    feature_layers: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.feature_layers:
            raise UserError("feature_layers is empty; name at least one hidden state of the base.")
        if min(self.hidden_size, self.vocab_size) < 1 or max(self.hidden_size, self.vocab_size) > 2**24:
            raise UserError(
                f"hidden_size is {self.hidden_size} and vocab_size is {self.vocab_size}; both must be from 1 to 2**24."
            )
        if (self.kind in WITH_BLOCK) != (self.block is not None):
            raise UserError(f"kind is {self.kind}, which goes with {'a' if self.block is None else 'no'} block.")
        if self.kind != "recurrent" and len(self.feature_layers) != 1:
            raise UserError(f"feature_layers is {list(self.feature_layers)}; {self.kind} heads read one layer.")
        if self.own_output == "each" and self.kind != "medusa":
            raise UserError(f"own_output is each, which {self.kind} heads do not have; only medusa heads do.")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft_vocab_size is {self.draft_vocab_size}, more than the base's vocabulary of {self.vocab_size}; "
                "use a smaller number, or null for the whole vocabulary."
            )
        _check_version(self.format_version)

    @property
    def feature_size(self) -> int:
        """F: width of the features the heads read."""
        return self.hidden_size * len(self.feature_layers)

    @property
    def proposals(self) -> int:
        """Vd: how many tokens the heads can propose."""
        return self.draft_vocab_size or self.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, every field present."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "config.json") -> "HeadsConfig":
        """The inverse of `to_json`. `where` names the file in errors."""
        if isinstance(data, Mapping) and isinstance(version := data.get("format_version"), int):
            _check_version(version)  # before its keys, which a newer one may have more of
        return from_mapping(cls, data, where)


def _check_version(version: int) -> None:
    if version != FORMAT_VERSION:
        remedy = "update mtp" if version > FORMAT_VERSION else "use the version that wrote the heads"
        raise UserError(
            f"format_version is {version}; this version of mtp reads {FORMAT_VERSION}: {remedy}, or save the heads "
            "again with this one."
        )


T = TypeVar("T")


def from_mapping(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a mapping, refusing unknown, missing and wrongly typed keys by name."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where} holds {type(data).__name__}; an object with keys is needed.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "allowed are " + ", ".join(fields) + "."
            raise UserError(f"{where} has the unknown key {key!r}; {hint}")
    missing = [
        name
        for name, f in fields.items()
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; the file is incomplete, save the heads again.")
    hints = get_type_hints(cls)
    return cls(**{key: _coerce(hints[key], value, f"{where}: {key}") for key, value in data.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """Check `value` against a type hint; JSON lists become tuples and objects become dataclasses."""
    options = get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,)
    if value is None:
        if type(None) in options:
            return None
        raise UserError(f"{where} is null; a value is needed.")
    (kind, *_) = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return from_mapping(kind, value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} is {value!r}; a list is needed.")
        return tuple(_coerce(get_args(kind)[0], item, where) for item in value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UserError(f"{where} is {value!r}; allowed are {', '.join(get_args(kind))}.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where} is {value!r}; {kind.__name__} is needed.")
    return value
