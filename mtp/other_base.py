"""Whether a base is the one that heads were trained on, as far as hashes tell.

Knows: fingerprints, and what another base means. Refuses to know: heads, files and options.
"""

from mtp.base import FrozenBase
from mtp.config import BaseRef

WEIGHTS = "other weights"
OTHER_BASE = "the text follows exactly the base that is given, and fewer drafts are accepted"
"""What it means to decode with heads of another base."""


def difference(base: FrozenBase, trained: BaseRef) -> str | None:
    """In what the base differs from the one that heads were trained on; None where no hash tells of anything."""
    if trained.fingerprint and trained.fingerprint != base.fingerprint():
        return WEIGHTS
    if (
        trained.tokenizer_fingerprint
        and base.tokenizer is not None
        and trained.tokenizer_fingerprint != base.tokenizer_fingerprint()
    ):
        return "another tokenizer or chat template"
    return None
