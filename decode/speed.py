"""`--compile`: what makes decoding on this machine faster than torch and transformers do by themselves.

Knows: what there is for which device and precision, and what to say where it cannot be had. Refuses to change what is
computed: results differ from the plain way by rounding only.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.fixed_steps import CudaGraphs, FixedSteps, Record
from mtp.heads import Heads
from mtp.kernels import NoKernels, load
from mtp.last_block import Unreadable
from mtp.layers import use_kernels
from mtp.stack import Stack
from mtp.suggest import did_you_mean

Compile = Literal["auto", "on", "off"]


def check_compile(mode: str) -> None:
    """UserError for a word that is none."""
    if mode not in get_args(Compile):
        raise UserError(f"--compile is {mode!r}; {did_you_mean(mode, get_args(Compile))}")


def speed_up(base: FrozenBase, heads: Heads | None, mode: Compile, home: Path, say: Callable[[str], None]) -> None:
    """Give base and heads the kernels of `mtp.kernels`, kept in `home`, and the base a `Stack` for its steps.

    With `auto`, what cannot be had is told in a sentence through `say` and left out; with `on` it is a UserError.
    On a GPU its steps are CUDA graphs instead. Nothing happens with `off`, and, with `auto`, for devices and precisions
    that there is nothing for.
    """
    check_compile(mode)
    if mode != "off" and base.device.type == "cuda":
        _record_steps(base, mode, say, CudaGraphs())
        return
    fits = base.device.type == "cpu" and base.dtype == torch.float32
    if mode == "off" or (mode == "auto" and not fits):
        return
    try:
        if not fits:
            raise NoKernels(f"there are only kernels for float32 on a CPU, not for {base.dtype} on {base.device}")
        kernels = load(home / "kernels")
    except NoKernels as fault:
        _without(mode, f"steps run at torch's own speed: {fault}", say)
        return
    base.kernels = kernels
    if heads is not None:
        use_kernels(heads, kernels, compacted=True)
    try:
        stack = Stack.of(base, kernels)
    except Unreadable as fault:
        _without(mode, f"steps of base {base.name!r} run in transformers: {fault}", say)
        return
    base.steps = stack.forward
    if stack.one_call is not None:
        base.several = stack.several


def _record_steps(base: FrozenBase, mode: Compile, say: Callable[[str], None], record: Record) -> None:
    """Give the base steps that are recorded and replayed, unless they are not its own."""
    try:
        if base.quantised or base.sharded:
            raise Unreadable("its weights are rounded" if base.quantised else "it is spread over several devices")
        stack = Stack.of(base)
        steps = FixedSteps(stack, record).forward
        stack.compare(steps)
    except (Unreadable, RuntimeError) as fault:  # the latter is what CUDA raises
        told = next(iter(str(fault).splitlines()), "")
        _without(mode, f"steps of base {base.name!r} are not recorded as CUDA graphs: {told}", say)
        return
    base.steps = steps


def _without(mode: Compile, what: str, say: Callable[[str], None]) -> None:
    if mode == "on":
        raise UserError(f"--compile is on, but {what}; use --compile auto or off.")
    say(f"{what} (--compile off says nothing)")
