"""What a run writes: bytes on disk, before they are written.

Knows: the sizes of checkpoints, heads, kept features and records. Refuses to know: what is in them.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from mtp.errors import UserError

ROW, COLUMN = 900, 60  # bytes that a row of metrics takes in CSV and wandb: of its own, and per draft position
SPARE = 2**26  # bytes left free besides


@dataclass(frozen=True)
class Disk:
    """Bytes of each part. Checkpoint and heads are replaced as a whole, so for a moment there are two of one."""

    checkpoint: int
    heads: int
    features: int
    records: int

    @property
    def kept(self) -> int:
        """What is there in the end."""
        return self.checkpoint + self.heads + self.features + self.records

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return self.kept + max(self.checkpoint, self.heads)


def estimate_disk(parameters: int, buffers: int, states: int, rows: int, draft_length: int, features: int = 0) -> Disk:
    """From counts: float32 parameters, bytes of buffers, numbers an optimiser keeps per parameter, rows of metrics."""
    weights = 4 * parameters + buffers
    records = rows * (ROW + COLUMN * draft_length)
    return Disk(weights + 4 * states * parameters, weights, features, records)


def check_disk(disk: Disk, folder: Path) -> str:
    """The estimate in words; UserError where the folder has no room for it."""
    free = shutil.disk_usage(_existing(folder)).free
    needed = disk.peak - disk.features  # features have a folder, and a check, of their own
    if needed + SPARE > free:
        raise UserError(
            f"run.dir: {folder} has {size(free)} free and this run needs {size(needed)} for checkpoint, heads and "
            "records; make room there, or name another run.dir."
        )
    return f"about {size(disk.kept)} of {size(free)} free"


def size(count: float) -> str:
    """Bytes in words: `3.2 GB`, `45 MB`."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    for path in (folder, *folder.resolve().parents):
        if path.is_dir():
            return path
    return Path()
