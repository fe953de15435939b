"""The decoding application: heads draft, the base verifies, and the text follows the base exactly."""

from decode.decoder import Decoder, Piece, Result, Stream
from decode.request import Request

__all__ = ["Decoder", "Piece", "Request", "Result", "Stream"]
