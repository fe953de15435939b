"""Architectures of heads behind one interface. Each file holds one; none holds the base."""

from mtp.config import HeadsConfig
from mtp.heads.interface import Heads, State
from mtp.heads.medusa import MedusaHeads
from mtp.heads.recurrent import RecurrentHeads

__all__ = ["Heads", "MedusaHeads", "RecurrentHeads", "State", "build_heads"]


def build_heads(config: HeadsConfig) -> Heads:
    """Heads of the kind that `config` names, freshly initialised and unbound (see `Heads.bind`)."""
    return MedusaHeads(config) if config.kind == "medusa" else RecurrentHeads(config)
