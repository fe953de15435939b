"""What the command lines of this package share: the look of a progress bar, and loading the base that options name.

Knows: the console. Refuses to know: what a command does with either.
"""

import os

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.distributed.device_mesh import DeviceMesh

from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from mtp.loading import load
from mtp.quantise import check_quantise, quantise
from mtp.sharding import shard_base
from train.options import BaseOptions

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def load_sharded(options: BaseOptions, mesh: DeviceMesh, console: Console) -> FrozenBase:
    """This process's share of the base that the options name. Every process reads the whole from disk, a layer at a
    time where the files allow."""
    if options.quantise is not None:
        raise UserError(
            f"model.base.quantise is {options.quantise}, and trainer.strategy fsdp spreads whole weights; use ddp, "
            "for which a rounded base may be small enough, or leave model.base.quantise out."
        )
    found = load(
        options.name,
        revision=options.revision,
        dtype=options.dtype,
        device=torch.device(mesh.device_type),
        trust_remote_code=options.trust_remote_code,
        home=default_home(os.environ),
        on_progress=lambda stage: console.print(stage, highlight=False),
    )
    return shard_base(found.model, found.tokenizer, options.name, options.revision or found.revision, mesh)


def load_base(options: BaseOptions, device: str, console: Console) -> FrozenBase:
    """The base that the options name, on `device`."""
    check_quantise(options.quantise, "model.base.quantise")
    base = FrozenBase.from_pretrained(
        options.name,
        revision=options.revision,
        dtype=options.dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
        home=default_home(os.environ),
        on_progress=lambda stage: console.print(stage, highlight=False),
    )
    if options.quantise is not None:
        quantise(base, options.quantise, "model.base.quantise")
    return base
