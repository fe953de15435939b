"""What every format has: what it can express, a writer, and a reader that shares nothing with the writer.

Knows: the shape of these parts. Refuses to know: any one format, files, and the command line.

Shapes: T position, K draft position, D hidden, F features, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from mtp.base import FrozenBase
from mtp.heads import Heads


@dataclass(frozen=True)
class Lent:
    """What software takes from the base itself: input embedding and output matrix, each [V,D]."""

    embedding: Tensor
    output_matrix: Tensor

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [...] to [...,D]."""
        return F.embedding(tokens, self.embedding)


class Reader(Protocol):
    """A written folder as the software it is for would run it."""

    def logits(self, features: Tensor, tokens: Tensor, drafts: Tensor, lent: Lent) -> Tensor:
        """Logits [K,V] of all draft positions, -inf where nothing can be proposed.

        features [T,F] of the anchors 0…T-1, the token after each, tokens [T], and the tokens drafted before the last
        position, drafts [K-1].
        """


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is written: `config.json`, one safetensors file, and texts by their path in the folder."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A layout of other software."""

    name: str
    written_for: str
    """The software and its versions."""
    usage: str
    """How the folder is used there, as Markdown. `{folder}`, `{base}` and `{k}` are filled in."""
    fault: Callable[[Heads, FrozenBase], str | None]
    """What of these heads the format cannot express; None if it can."""
    content: Callable[[Heads, FrozenBase], Content]
    """The folder of heads without fault."""
    read: Callable[[Path], Reader]
    """Opens a folder strictly. UserError on anything that is not whole."""
    tested: str = "nothing but the reader that it is compared with: it has not been run in that software"
    """With which versions a folder of this layout really ran."""
