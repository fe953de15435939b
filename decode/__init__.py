"""The decoding application: heads draft, the base verifies, and the text follows the base exactly."""

from decode.decoder import Decoder, Piece, Result, Stream

__all__ = ["Decoder", "Piece", "Result", "Stream"]
