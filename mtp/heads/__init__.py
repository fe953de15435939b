"""Architectures of heads behind one interface. Each file holds one; none holds the base."""

from mtp.config import HeadsConfig, Kind
from mtp.heads.hydra import HydraHeads
from mtp.heads.interface import Heads, State
from mtp.heads.medusa import MedusaHeads
from mtp.heads.parallel import ParallelHeads
from mtp.heads.recurrent import RecurrentHeads
from mtp.heads.sequential import SequentialHeads

__all__ = [
    "Heads",
    "HydraHeads",
    "MedusaHeads",
    "ParallelHeads",
    "RecurrentHeads",
    "SequentialHeads",
    "State",
    "build_heads",
]

_KINDS: dict[Kind, type[Heads]] = {
    "medusa": MedusaHeads,
    "recurrent": RecurrentHeads,
    "sequential": SequentialHeads,
    "parallel": ParallelHeads,
    "hydra": HydraHeads,
}


def build_heads(config: HeadsConfig) -> Heads:
    """Heads of the kind that `config` names, freshly initialised and unbound (see `Heads.bind`)."""
    return _KINDS[config.kind](config)
