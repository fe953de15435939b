"""Prompt lookup: where the text's last tokens stood before, what followed them there may follow again.

Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding).

Knows: token ids, and the latest place of every few tokens in a row that something followed. Refuses to know models,
probabilities, and whether what it finds comes true.
"""

from collections.abc import Iterable

SIZES = (3, 2)
"""How many last tokens to look for: what more of them lead to is likelier to come, so more are tried first."""
MOST_DRAFTS = 16


class NgramIndex:
    """The committed text, prompt included, searched in time that does not grow with it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in committed tokens. What they follow is entered only now, so the text's own end is never found."""
        text, behind = self._tokens, self._behind
        for token in tokens:
            place = len(text)
            for size in SIZES:
                if place >= size:
                    behind[tuple(text[-size:])] = place
            text.append(token)

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the latest earlier place of the last 3 tokens, or else of the last 2.

        Fewer where the text ends before; none where neither stood there before.
        """
        for size in SIZES:
            # Of a text that is shorter, the slice is a smaller n-gram: found or not, it is what the next size asks for.
            place = self._behind.get(tuple(self._tokens[-size:]))
            if place is not None:
                return self._tokens[place : place + most]
        return []
