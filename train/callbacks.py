"""Callbacks of a run: the best heads on disk, a line per validation on the console, the page, and what training took.

Knows: what a trained run leaves for people. Refuses to know: how anything is trained or measured.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from mtp.hub import save_heads
from train.card import card_of_run
from train.interrupt import Patience
from train.module import HeadsModule
from train.pace import in_words
from train.progress import TrainingProgress
from train.run import read_record, write_outcome
from train.run_page import NAME as REPORT
from train.run_page import write_page
from train.samples import Samples, write_samples
from train.summary import DECODED, MONITOR, best_line, doubt


class LastCheckpoint(ModelCheckpoint):
    """`checkpoints/last.ckpt`, replaced as a whole every so many optimiser steps and at the end of training."""

    def __init__(self, folder: Path, every: int) -> None:
        self.path, self.every = folder / "checkpoints" / "last.ckpt", every
        super().__init__(
            dirpath=self.path.parent,
            filename=self.path.stem,
            every_n_train_steps=every,
            save_top_k=1,
            enable_version_counter=False,
            save_on_train_epoch_end=False,
        )

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        trainer.save_checkpoint(self.path)  # the steps since the last interval count too


def _fitting(trainer: lightning.Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


class StopBetweenSteps(lightning.Callback):
    """The first Ctrl-C or SIGTERM in training lets the step end and saves it; the second, and one in validation, stops
    at once.

    Before a validation, which may take long, the steps are saved too, unless it comes in the middle of a step: what is
    accumulated is in no checkpoint. Several processes stop at once always: they would not all be in the same step.
    `last`: whose file is written.
    """

    def __init__(self, last: LastCheckpoint, say: Callable[[str], None]) -> None:
        self.last, self._step, self._between, self._saved = last, 0, True, False
        self.patience = Patience(
            lambda name: say(f"{name}: this step is finished and saved first; again: stop at once")
        )

    def _hold(self, trainer: lightning.Trainer) -> None:
        if trainer.world_size == 1:
            self.patience.hold()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._step = trainer.global_step
        self._hold(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._between = trainer.global_step > self._step
        if self._between and self.patience.asked is not None:
            trainer.save_checkpoint(self.last.path)
            self._saved = True
        self._step = trainer.global_step

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_if_saved()

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._stop_if_saved()
        if _fitting(trainer) and self._between and trainer.global_step % self.last.every:
            trainer.save_checkpoint(self.last.path)
        self.patience.release()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if _fitting(trainer):
            self._hold(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.patience.release()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self.patience.release()

    def _stop_if_saved(self) -> None:
        if self._saved:
            self.patience.end()


class ExportHeads(lightning.Callback):
    """Saves the heads to `folder` whenever validation implies the longest acceptance so far, and without validation at
    the end. What is on disk is always whole, so a killed run leaves usable heads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = 0.0
        self.metrics: dict[str, float] = {}
        """Step, and `val/` and `decode/` metrics, of the heads on disk; empty without validation."""
        self.longest: dict[str, float] = {}
        """Step and decoded acceptance length of the validation whose decoding committed most; may be another."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "metrics": self.metrics, "longest": self.longest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What is on disk may be newer than the checkpoint, and is kept unless something better comes."""
        self.best, self.metrics = state_dict["best"], state_dict.get("metrics", {})
        self.longest = state_dict.get("longest", {})
        saved = read_record(self.folder.parent).get("best") or {}
        if saved.get(MONITOR, 0.0) > self.best and self.folder.is_dir():
            self.best, self.metrics = saved[MONITOR], saved

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, HeadsModule)
        if not _fitting(trainer):
            return
        decoded = pl_module.latest.get(DECODED, 0.0)
        if decoded > self.longest.get(DECODED, 0.0):
            self.longest = {"step": trainer.global_step, DECODED: decoded}
        value = float(trainer.callback_metrics.get(MONITOR, 0.0))
        if not trainer.strategy.broadcast(value > self.best):  # nor is a NaN; all save, or none
            return
        self.best = value
        measured = {key: x for key, x in pl_module.latest.items() if key.startswith(("val/", "decode/"))}
        self.metrics = {"step": trainer.global_step, **measured, MONITOR: value}
        self._save(trainer, pl_module)
        write_outcome(self.folder.parent, {"best": self.metrics})

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if not self.best:
            self._save(trainer, pl_module)

    def verdict(self) -> list[str]:
        """What was measured of the heads on disk, and a warning where decoding does not bear out their choice."""
        return [line for line in (best_line(self.metrics), doubt(self.metrics, self.longest)) if line]

    def _save(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        assert isinstance(module, HeadsModule)
        heads = module.whole_heads()  # of all processes
        if trainer.is_global_zero:
            save_heads(heads, self.folder, card_of_run(heads.config, self.folder.parent, self.metrics))


class ConsoleReport(lightning.Callback):
    """One line per validation: step, losses, alpha by position, implied and decoded acceptance length."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, HeadsModule)
        latest = pl_module.latest
        if "val/loss" not in latest or not trainer.is_global_zero:
            return
        count = pl_module.trained.config.draft_length
        alpha = " ".join(f"{latest[f'val/alpha/{k}']:.3f}" for k in range(1, count + 1))
        decoded = f", decoded {latest['decode/accept_len']:.2f}" if "decode/accept_len" in latest else ""
        self.console.print(
            f"step {trainer.global_step}: loss {latest.get('train/loss', float('nan')):.3f} "
            f"(val {latest['val/loss']:.3f}), α {alpha}, acceptance length implied {latest[MONITOR]:.2f}{decoded}, "
            f"{latest.get('train/tokens_per_s', 0):.0f} tokens/s{_left(trainer)}",
            highlight=False,
            soft_wrap=True,
        )
        for export in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(export, ExportHeads) and export.metrics.get("step") == trainer.global_step:
                for line in export.verdict()[1:]:
                    self.console.print(line, highlight=False, soft_wrap=True)


class RunPage(lightning.Callback):
    """Keeps what the heads on disk decoded, and writes the run's page at every validation. Comes after `ExportHeads`.

    What goes wrong in here stops no training: `warn` is told once."""

    def __init__(self, folder: Path, export: ExportHeads, warn: Callable[[str], None]) -> None:
        self.folder, self.export, self.warn = folder, export, warn
        self._warned = False

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, HeadsModule)
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        with self._forgiven():
            stats = pl_module.decoded
            if stats is not None and self.export.metrics.get("step") == trainer.global_step:
                write_samples(self.folder, Samples(trainer.global_step, stats.to_json(), pl_module.traces))
            write_page(self.folder, pictures=False)

    def conclude(self) -> None:
        """The page of the finished run, with pictures."""
        with self._forgiven():
            write_page(self.folder)

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a page is never worth a run
            if not self._warned:
                said = f"{type(error).__name__}: {error}"
                self.warn(f"warning: {REPORT} could not be written ({said}); training goes on.")
            self._warned = True


def _left(trainer: lightning.Trainer) -> str:
    """How long the rest of training takes, where that is known."""
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(one, TrainingProgress) and trainer.state.fn == "fit":
            left = one.seconds_left(trainer)
            return "" if left is None else f", {in_words(left)} left"
    return ""


class Tally(lightning.Callback):
    """Tokens and seconds of training so far, in all sittings of a run. The closed-form start counts, validation and
    what a killed run lost do not."""

    def __init__(self) -> None:
        self.tokens = 0
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)

    def _stop(self) -> None:
        self._before, self._since = self.seconds, None

    def _start(self) -> None:
        self._since = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self._before = state_dict["tokens"], state_dict["seconds"]

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens += int(torch.as_tensor(trainer.strategy.reduce(batch["attention_mask"].sum(), reduce_op="sum")))

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._stop()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._start()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._stop()
