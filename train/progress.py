"""A run tells how it gets on: a summary before the first step, the time left, and a bar where people watch.

Knows: Lightning's hooks, and the console. Refuses to know: what is said (`train.briefing`), and how long things take
(`train.pace`).
"""

import math
import time
from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch.callbacks import Timer
from rich.console import Console
from rich.progress import Progress

from train.briefing import time_in_words
from train.console import COLUMNS
from train.module import HeadsModule
from train.pace import Pace, in_words

Brief = Callable[[lightning.Trainer, HeadsModule], list[str]]


class TrainingProgress(lightning.Callback):
    """`brief`: the lines of the summary, asked for when the number of steps is known."""

    def __init__(self, console: Console, watched: bool) -> None:
        self.console, self.watched = console, watched
        self.brief: Brief | None = None
        self.pace = Pace()
        self._bar: Progress | None = None
        self._seen, self._validating, self._told = 0, 0.0, False

    def say(self, text: str) -> None:
        """A line for people who watch, above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    # ---- what is left ------------------------------------------------------------------------------------------------

    def left(self, trainer: lightning.Trainer) -> tuple[float, float]:
        """Optimiser steps and validations until the end; infinite where there is none."""
        total = float(trainer.estimated_stepping_batches)
        steps = max(0.0, total - trainer.global_step)
        every = float(trainer.val_check_batch) if trainer.enable_validation else math.inf  # type: ignore[attr-defined]
        batches = steps * trainer.accumulate_grad_batches
        return steps, math.floor(batches / every) if math.isfinite(batches) and every < math.inf else 0.0

    def seconds_left(self, trainer: lightning.Trainer) -> float | None:
        """Until the end or `trainer.max_time`; None before a step is known."""
        left, limit = self.pace.left(*self.left(trainer)), self._limit(trainer)
        return left if left is None or limit is None else min(left, limit)

    def _limit(self, trainer: lightning.Trainer) -> float | None:
        timers = [one for one in trainer.callbacks if isinstance(one, Timer)]  # type: ignore[attr-defined]
        left = timers[0].time_remaining() if timers else None
        return None if left is None else max(0.0, left)

    def _tell_time(self, trainer: lightning.Trainer) -> None:
        told = time_in_words(self.pace, *self.left(trainer), self._limit(trainer))
        self.say(told)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before the first one, of a resumed run too: the module has measured a pass by now."""
        if self._told or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, HeadsModule)
        self._told, self._seen, self.pace.guess = True, trainer.global_step, pl_module.guessed_step
        if self.brief is not None:
            for line in self.brief(trainer, pl_module):
                self.say(line)
        self._tell_time(trainer)
        if self.watched:
            self._bar = Progress(*COLUMNS[:-1], console=self.console, transient=True)
            total = float(trainer.estimated_stepping_batches)
            self._task = self._bar.add_task("training", total=total if total < math.inf else None)
            self._bar.start()
        self.pace.begin()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen or not trainer.is_global_zero:
            return
        self._seen, sure = trainer.global_step, self.pace.sure
        self.pace.stepped()
        if self.pace.sure and not sure:
            self._tell_time(trainer)
        if self._bar is not None:
            left = self.seconds_left(trainer)
            said = f"training, {in_words(left)} left" if left is not None else "training"
            self._bar.update(self._task, completed=trainer.global_step, description=said)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._validating = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description="validating")

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.pace.validated(time.monotonic() - self._validating)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.close()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
