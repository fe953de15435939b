"""The decoding application: heads draft, the base verifies, and the text follows the base exactly."""

from decode.decoder import Decoder
from decode.request import Request
from decode.stream import Piece, Result, Stream

__all__ = ["Decoder", "Piece", "Request", "Result", "Stream"]
