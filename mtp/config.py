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

Kind = Literal["medusa", "recurrent"]
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """What a user chooses.

    Args:
        kind: `recurrent` (one block applied K times on its own hidden state) or `medusa` (independent residual heads).
        draft_length: K, how many draft positions are trained. Decoding may use fewer, never more.
        draft_vocab_size: Vd, how many tokens the heads can propose; null is the whole vocabulary.
        feature_layers: which hidden states of the base the heads read. Id i below the number of layers L is the input
            of decoder layer i (0 is the embedding); L is the state after the final norm. null picks the usual ones.
        num_layers: residual layers per head (`medusa` only).
    """

    kind: Kind = "recurrent"
    draft_length: int = 4
    draft_vocab_size: int | None = None
    feature_layers: tuple[int, ...] | None = None
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"heads.kind is {self.kind!r}; allowed are {', '.join(get_args(Kind))}.")
        for name, low in (("draft_length", 1), ("num_layers", 1), ("draft_vocab_size", 2)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"heads.{name} is {value}; it must be at least {low}.")
        if self.kind == "recurrent" and self.num_layers != 1:
            raise UserError(
                f"heads.num_layers is {self.num_layers}, but recurrent heads have one block; remove the key or use "
                "heads.kind: medusa."
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
    """Sizes of the transformer block of recurrent heads; read off the base."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(HeadsOptions):
    """A complete description: `HeadsOptions` plus what was read off the base. This is `config.json`.

    Args:
        hidden_size: D of the base.
        vocab_size: V, the rows of the base's output matrix.
        draft_vocab_hash: SHA-256 of the draft vocabulary's ids; null when the heads propose from the whole vocabulary.
        block: sizes of the block (`recurrent` only).
        base: the base the heads belong to.
        format_version: of this file format.
    """

    hidden_size: int
    vocab_size: int
    base: BaseRef
    draft_vocab_hash: str | None = None
    block: BlockShape | None = None
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
        if (self.kind == "recurrent") != (self.block is not None):
            raise UserError(f"kind is {self.kind}, which goes with {'a' if self.block is None else 'no'} block.")
        if self.kind == "medusa" and len(self.feature_layers) != 1:
            raise UserError(f"feature_layers is {list(self.feature_layers)}; medusa heads read one layer.")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft_vocab_size is {self.draft_vocab_size}, more than the base's vocabulary of {self.vocab_size}; "
                "use a smaller number, or null for the whole vocabulary."
            )
        if self.format_version != FORMAT_VERSION:
            raise UserError(
                f"format_version is {self.format_version}; this version of mtp reads {FORMAT_VERSION}. "
                "Use the mtp version that wrote the heads, or save them again with this one."
            )

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
        return from_mapping(cls, data, where)


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
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where} is {value!r}; {kind.__name__} is needed.")
    return value
