"""`samples.json` of a run: the texts that the heads on disk decoded in validation, token by token.

Knows: the file. Refuses to know: how texts are decoded and shown.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.png import put
from decode.report import as_json
from decode.trace import TracedText

NAME = "samples.json"


@dataclass(frozen=True)
class Samples:
    """What one validation decoded."""

    step: int
    """Optimiser steps taken by then."""
    stats: dict[str, Any]
    """As `DecodeStats.to_json` gives them."""
    texts: list[TracedText]


def write_samples(folder: Path, samples: Samples) -> None:
    """The whole file, or what was there before and an OSError."""
    document = {"step": samples.step, "stats": samples.stats, "texts": [text.to_json() for text in samples.texts]}
    put(as_json(document).encode("utf-8", "backslashreplace"), folder / NAME)


def read_samples(folder: Path) -> Samples | None:
    """None where there are none that can be read: runs without decoding, and those of earlier versions."""
    try:
        document = json.loads((folder / NAME).read_text(encoding="utf-8"))
        texts = [TracedText.from_json(text) for text in document["texts"]]
        return Samples(int(document["step"]), dict(document["stats"]), texts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
