"""Architectures of heads behind one interface. Each file holds one; none holds the base. README.md: how to add one."""

from importlib import import_module

from mtp.config import HeadsConfig
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


def build_heads(config: HeadsConfig) -> Heads:
    """Heads of the kind that `config` names, freshly initialised and unbound (see `Heads.bind`).

    Kind `x` is the class `XHeads` of the module `mtp.heads.x`; README.md in this folder shows how to add one.
    """
    kind: type[Heads] = getattr(import_module(f"mtp.heads.{config.kind}"), f"{config.kind.capitalize()}Heads")
    return kind(config)
