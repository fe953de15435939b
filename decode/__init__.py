"""The decoding application: heads draft, the base verifies, and the text follows the base exactly.

The names below are imported when they are first asked for: the command line shows its help without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.decoder import Decoder
    from decode.request import Request
    from decode.stream import Piece, Result, Stream

__all__ = ["Decoder", "Piece", "Request", "Result", "Stream"]

_WHERE = {"Decoder": "decoder", "Request": "request", "Piece": "stream", "Result": "stream", "Stream": "stream"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
