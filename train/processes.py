"""The processes of one run: started together before anything is prepared, and ended together when one is lost.

Knows: Lightning's launcher and signals, how long to wait for whom, and how a lost process shows. Refuses to know: what
is trained.

Processes are started by this program on one node (`trainer.devices`), or by torchrun or Slurm on one or several; see
configs/one-node-8-gpus.yaml and configs/fsdp-70b-several-nodes.yaml.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import lightning
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from mtp.errors import UserError
from train.interrupt import ToldToEnd
from train.sharded import ShardedStrategy

PREPARING = timedelta(days=2)  # that processes wait for others which tokenise, download or run the base
LOOK, GRACE = 0.5, 15.0  # seconds between looks at the others, and for one that lost another to end by itself
LOST = 2  # exit code
_SIGNS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL", "Socket Timeout", "TCPStore")


def chosen_strategy(value: Any) -> Any:
    """What `trainer.strategy` says, where `fsdp` means this project's: base and heads are sharded, on a CPU too."""
    name = value if isinstance(value, str) else type(value).__name__
    start = name if isinstance(value, str) else str(getattr(value, "_start_method", "popen"))
    if any(word in start for word in ("spawn", "fork", "notebook")):  # they copy a process that is not prepared yet
        how = "" if isinstance(value, str) else f" with start_method {start}"
        raise UserError(
            f"trainer.strategy is {name}{how}; the processes of a run are started from its command line: allowed is "
            "ddp, fsdp or auto; use ddp."
        )
    if isinstance(value, str) and value.split("_")[0] in ("fsdp", "fsdp2"):
        if value not in ("fsdp", "fsdp2"):
            raise UserError(f"trainer.strategy is {value}; allowed is fsdp, without variants, ddp or auto.")
        return ShardedStrategy()
    if isinstance(value, Strategy) and type(value).__name__ in ("FSDPStrategy", "ModelParallelStrategy"):
        raise UserError(
            f"trainer.strategy is {type(value).__name__}, which would leave the base whole on every device; use fsdp."
        )
    return value


class Processes:
    """This process among those of its run. Alone, there is nothing to start, to wait for or to look after."""

    def __init__(self, trainer: lightning.Trainer) -> None:
        self.trainer = trainer
        self.rank, self.count = trainer.global_rank, trainer.world_size
        self.fault: str | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._waiting: Any = None
        self._done = threading.Event()
        self._ending = False  # and a signal can tell nothing new
        self._signals = -1  # a pipe's end with the numbers of those that came

    @property
    def several(self) -> bool:
        return self.count > 1 or isinstance(self.trainer.strategy, ShardedStrategy)

    def join(self, model: lightning.LightningModule, tell: Callable[[str], None]) -> None:
        """Start the other processes of this node, where that is up to this one, and meet all of them. From here on this
        process ends within seconds of a lost one, and `tell` gets the reason where nobody else can say it."""
        if not self.several:
            return
        strategy: Any = self.trainer.strategy
        strategy.connect(model)
        launcher = strategy.launcher
        if launcher is not None and not strategy.cluster_environment.creates_processes_externally:
            if not isinstance(launcher, _SubprocessScriptLauncher):  # what auto means in a notebook
                raise UserError(
                    "trainer.strategy is auto, which has no processes of its own in a notebook; start mtp-train from a "
                    "command line, or set trainer.devices 1."
                )
            launcher._call_children_scripts()  # what launch() would do at fit; it sees that they are there
            self._children = launcher.procs
        self._note_signals()
        parent = os.getppid()
        threading.Thread(target=self._watch, args=(parent, tell), daemon=True, name="watch the others").start()
        strategy.setup_environment()
        self.rank = self.trainer.global_rank
        self._waiting = dist.new_group(backend="gloo", timeout=PREPARING)

    def wait(self) -> None:
        """Until all are here, however long they prepare. A process that died meanwhile is a RuntimeError at once."""
        if self.several:
            dist.barrier(group=self._waiting)

    @contextlib.contextmanager
    def together(self, resume: Callable[[], str]) -> Iterator[None]:
        """UserError, which tells by `resume` how to go on, where a process is lost inside or this one gets SIGTERM.
        What this one started ends with it."""
        before = self._answer_sigterm()
        try:
            yield
        except ToldToEnd:
            self._ending = True
            raise UserError(f"{self.fault or self._told()}; {resume()}") from None
        except RuntimeError as error:
            self._ending = True  # whoever started the processes of a lost one sends SIGTERM while this is told
            if not self.several or not _of_others(error):
                raise
            self._done.wait(3 * LOOK)  # the watch may know which it was
            reason = self.fault or f"another process of this run ended ({_short(error)})"
            raise UserError(f"{reason}; {resume()}") from error
        finally:
            self._ending = True
            self._done.set()
            self._end_children()
            if self._signals >= 0:
                signal.set_wakeup_fd(-1)
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def share(self, value: str) -> str:
        """What the first process calls with; all call it, after `join`."""
        if not self.several:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self._waiting)
        return told[0]

    def _answer_sigterm(self) -> Any:
        """From here on SIGTERM is ToldToEnd; the handler that was there before, None where there cannot be another."""
        if threading.current_thread() is not threading.main_thread():
            return None
        # Lightning's own handler meets the other processes, which are elsewhere: neither would come on. Without it
        # only this one is left, and what Slurm sends before a job is requeued is answered as before.
        self.trainer._signal_connector._sigterm_notifier_fn = lambda number, frame: None  # type: ignore[method-assign]
        return signal.signal(signal.SIGTERM, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._ending:
            self._ending = True
            self.fault = self.fault or self._told()
            raise ToldToEnd

    def _told(self) -> str:
        who = f"process {self.rank} of {self.count} (PID {os.getpid()})" if self.several else "the run"
        return f"{who} was told to end by SIGTERM"

    def _note_signals(self) -> None:
        """Let the watch see signals that the main thread does not, while it waits for the others in foreign code."""
        if threading.current_thread() is threading.main_thread():
            self._signals, writing = os.pipe()  # open as long as the process: the watch may be reading
            for end in (self._signals, writing):
                os.set_blocking(end, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def _terminated(self) -> bool:
        """Whether SIGTERM came since the last look."""
        with contextlib.suppress(BlockingIOError):
            return self._signals >= 0 and signal.SIGTERM in os.read(self._signals, 512)
        return False

    def _watch(self, parent: int, tell: Callable[[str], None]) -> None:
        """Look after the others until done. Stuck in a product of many devices, no Python code of the main thread would
        run, so this thread ends the process after a while."""
        while self.fault is None and not self._done.wait(LOOK):
            self.fault = self.fault or self._lost(parent) or (self._told() if self._terminated() else None)
        if self.fault is None or self._done.wait(GRACE):
            return
        tell(self.fault)
        self._end_children()
        os._exit(LOST)

    def _lost(self, parent: int) -> str | None:
        for number, child in enumerate(self._children, 1):
            code = child.poll()
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                return f"process {number} of {self.count} (PID {child.pid}) {how}"
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        started_here = isinstance(environment, LightningEnvironment) and self.rank > 0
        return "the process that started this one is gone" if started_here and os.getppid() != parent else None

    def _end_children(self) -> None:
        """Nothing that this process started outlives it."""
        until = time.monotonic() + (GRACE if self.fault is None else 4 * LOOK)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, until - time.monotonic()))
            if child.poll() is None:
                child.kill()
                child.wait()


def _of_others(error: RuntimeError) -> bool:
    """Whether it says that another process does not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def _short(error: RuntimeError) -> str:
    """What it says, without the places in other people's code."""
    told = " ".join(str(error).split())
    return next((sign for sign in _SIGNS if sign in told and " " in sign), told[:100])
