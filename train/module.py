"""The Lightning module: one training step of heads on a frozen base, validation, and the real acceptance length.

Knows: how base, heads, losses and decoding engine meet in a step, and which numbers come out under which key.
Refuses to know: where data come from, where a run is stored, and which loggers listen (`train.fit`, `train.run`), but
that one of them shows decoded texts.

Metric keys: `train/…`, `val/…` (teacher-forced), `decode/…` (measured by decoding); `…/1` to `…/K` by draft position.
Shapes: B batch, T position, M anchors, K draft position, D hidden, F features.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from decode import Decoder
from decode.prompts import read_categorised
from decode.stats import DecodeStats
from decode.telemetry import decode_metrics
from decode.trace import TracedText
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, RecurrentHeads
from mtp.initialise import new_heads
from mtp.losses import LossOptions, LossWeights
from mtp.objective import DraftSums, draft_sums, to_draft
from mtp.sharding import gathered, whole
from mtp.targets import TargetPlan, pad_for_drafts, plan_targets
from mtp.vocab import build_draft_vocab, coverage
from train.checkpoint import check_heads, check_optimizer, take_extras, write_extras
from train.cost import count_flops
from train.data import ChatDataModule
from train.decoding import decode_share
from train.feature_store import FeatureOptions, FeatureStore
from train.loader import Batch
from train.meter import Meter
from train.optimizer import make_optimizer
from train.options import BaseOptions, DecodeOptions, OptimizerOptions, learning_rate_share
from train.run import RunRecords
from train.sharded import ShardedStrategy, whole_heads
from train.start import earlier_heads, start_heads
from train.summary import summarise
from train.teaching import Lesson, from_base, from_store

RUNNING_SHARE = 0.1  # of an optimiser step in the running acceptance that the `lk` loss goes by


class HeadsModule(lightning.LightningModule):
    """Trains heads; the base is attached, frozen, and never part of a checkpoint.

    Call `attach` with the loaded base before `fit`. Heads are built in `setup`, when the data for the draft vocabulary
    are there.

    Args:
        base: The base to train on.
        heads: The heads to train.
        loss: The objective.
        optimizer: The optimiser and its schedule.
        decode: Decoding at every validation.
        features: Keeping the base's features on disk.
        start_positions: How many positions the closed-form start of recurrent heads is fitted on; 0 starts at random.
        start_from: Heads to train further: a folder, or the name of those that come with the package. They keep their
            draft vocabulary, and `heads` must describe them, but for the K of recurrent ones; null makes new ones.
    """

    running_alpha: Tensor

    def __init__(
        self,
        base: BaseOptions = BaseOptions(),
        heads: HeadsOptions = HeadsOptions(),
        loss: LossOptions = LossOptions(),
        optimizer: OptimizerOptions = OptimizerOptions(),
        decode: DecodeOptions = DecodeOptions(),
        features: FeatureOptions = FeatureOptions(),
        start_positions: int = 16384,
        start_from: str | None = None,
    ) -> None:
        super().__init__()
        if start_positions < 0:
            raise UserError(f"model.start_positions is {start_positions}; it must be 0 or more.")
        self.base_options, self.heads_options = base, heads
        self.loss_options, self.optimizer_options, self.decode_options = loss, optimizer, decode
        self.feature_options, self.start_positions, self.start_from = features, start_positions, start_from
        self.resuming = False  # a checkpoint will bring the weights, so none need be fitted
        self.register_buffer("running_alpha", torch.zeros(heads.draft_length))
        self.heads: Heads | None = None
        self._base: FrozenBase | None = None
        self._prompts = read_categorised(Path(decode.prompts), decode.limit) if decode.prompts else []
        self.decoded: DecodeStats | None = None  # what the last validation counted in decoding
        self.traces: list[TracedText] = []  # its texts, with special tokens
        self.store: FeatureStore | None = None  # of the training examples; None runs the base in every step
        self.on_start: Callable[[int, int], None] | None = None
        self.vocab_coverage = 1.0
        self.latest: dict[str, float] = {}
        self.meter = Meter()
        self._step: DraftSums | None = None
        self._validation: DraftSums | None = None
        self._grad_norm = 0.0
        self.guessed_step: float | None = None  # seconds
        self.memory_told = ""  # the estimate, in words

    # ---- set up ------------------------------------------------------------------------------------------------------

    def attach(self, base: FrozenBase) -> None:
        """Give the module its base. It is not a submodule: checkpoints and optimiser never see it."""
        self._base = base

    @property
    def base(self) -> FrozenBase:
        assert self._base is not None, "attach() a base first"
        return self._base

    @property
    def trained(self) -> Heads:
        assert self.heads is not None, "setup() builds the heads"
        return self.heads

    def setup(self, stage: str) -> None:
        self.base.to(self.trainer.strategy.root_device)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.heads is None:
            self.build(data)
        fresh = self.heads_options.init == "random" and self.start_from is None and not self.resuming
        if isinstance(self.heads, RecurrentHeads) and fresh and self.start_positions:
            start_heads(self.heads, self.base, data.all_batches(), self.start_positions, self.on_start)

    def build(self, data: ChatDataModule) -> None:
        """Make the heads for the attached base and a data module that is set up. UserError where they do not fit."""
        if self.start_from is None:
            vocab = self._draft_vocab(data)
            with gathered(self.base.last_block):  # which heads may start as a copy of
                self.heads = new_heads(self.heads_options, self.base, vocab)
            return
        self.heads = earlier_heads(self.start_from, self.heads_options, self.base)
        if self.heads.draft_ids is not None:
            self.vocab_coverage = coverage(data.supervised_counts(self.base.vocab_size), self.heads.draft_ids)

    def configure_model(self) -> None:
        """Spread the heads over all devices where the strategy is to."""
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.trainer.strategy.shard(self.trained)

    def whole_heads(self) -> Heads:
        """The heads to save or decode with; a copy of all of them on every process where they are spread."""
        return whole_heads(self.trained, self.base)

    def _draft_vocab(self, data: ChatDataModule) -> Tensor | None:
        size = self.heads_options.draft_vocab_size
        if size is None:
            return None
        counts = data.supervised_counts(self.base.vocab_size)
        keep = {*self.base.eos_token_ids, *getattr(self.base.tokenizer, "all_special_ids", [])}
        ids = build_draft_vocab(counts, size, keep)
        self.vocab_coverage = coverage(counts, ids)
        return ids

    def configure_optimizers(self) -> Any:
        options, total = self.optimizer_options, int(self.trainer.estimated_stepping_batches)
        optimizer = make_optimizer(self.trained.parameters(), options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, total, options))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- training ----------------------------------------------------------------------------------------------------

    def draft_sums(self, batch: Batch) -> DraftSums:
        """Objective and acceptance statistics of one batch, as sums over its supervised positions."""
        heads, tokens = self.trained, batch["tokens"]
        segments = batch.get("segments")
        plan = plan_targets(tokens, batch["supervised"], heads.config.draft_length, segments)
        lesson = self._lesson(batch, plan)
        padded = pad_for_drafts(tokens, heads.config.draft_length)
        hidden = heads.unroll(lesson.features, padded, plan.anchors, segments=segments)
        self.meter.watch(hidden)
        return draft_sums(
            hidden,
            plan,
            heads.project,
            lesson.teach,
            to_draft(plan.tokens, heads.draft_ids, self.base.vocab_size),
            self.loss_options,
            self.loss_weights(),
            self.running_alpha,
        )

    def _lesson(self, batch: Batch, plan: TargetPlan) -> Lesson:
        heads = self.trained
        if self.store is not None and "examples" in batch:
            return from_store(self.store, batch, heads.draft_ids, self.base.vocab_size)
        return from_base(self.base, heads.config.feature_layers, batch, plan, heads.draft_ids)

    def loss_weights(self) -> LossWeights:
        """The weights of the losses at this moment of training."""
        steps = self.trainer.estimated_stepping_batches if self.loss_options.final else 1
        return self.loss_options.at(self.global_step / steps)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The objective as a sum. `on_before_optimizer_step` divides the gradient by the positions of all batches that
        went into the step, so that batch size, padding, accumulation and ranks do not change it."""
        sums = self.draft_sums(batch)
        seen = sums.detached()
        self._step = seen if self._step is None else self._step + seen
        self.meter.add(seen, batch)
        return sums.total * self.trainer.accumulate_grad_batches  # Lightning divides by it

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._step is not None, "a step follows a batch"
        seen, self._step = self._reduced(self._step), None
        scale = float(self.trainer.world_size / seen.positions.clamp(min=1))  # ranks average gradients
        for parameter in self.trained.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        slopes = [p.grad for p in self.trained.parameters() if p.grad is not None]
        self._grad_norm = float(whole(torch.nn.utils.get_total_norm(slopes)))
        if not math.isfinite(self._grad_norm):
            raise UserError(
                f"training diverged at step {self.global_step}: the gradient's norm is {self._grad_norm}. Lower "
                f"model.optimizer.lr, which is {self.optimizer_options.lr:g}, and go on with --ckpt_path from the last "
                "checkpoint or start anew; the best heads so far are kept."
            )
        alpha = (seen.alpha / seen.count.clamp(min=1)).to(self.running_alpha)
        known = torch.where(seen.count > 0, alpha, self.running_alpha)  # no answer may have been long enough
        self.running_alpha.lerp_(known, RUNNING_SHARE)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch
        if not stepped:  # the time may be up: what is accumulated is in no checkpoint, and callbacks ask again soon
            self.trainer.should_stop = False
        if self.meter.sums is None or not stepped or self.trainer.global_step % self.trainer.log_every_n_steps:
            return
        metrics = summarise(self._reduced(self.meter.sums), "train") | self.meter.metrics(self._over_ranks)
        metrics["train/lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        metrics["train/grad_norm"] = self._grad_norm
        self._report(metrics)
        self.log("loss", metrics["train/loss"], prog_bar=True, logger=False)
        self.log("tok/s", metrics["train/tokens_per_s"], prog_bar=True, logger=False)
        self.meter.restart()

    # ---- validation --------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        sums = self.draft_sums(batch).detached()
        self._validation = sums if self._validation is None else self._validation + sums

    def on_validation_epoch_end(self) -> None:
        if self._validation is None:
            return
        metrics = summarise(self._reduced(self._validation), "val")
        metrics["val/draft_vocab_coverage"] = self.vocab_coverage
        self._validation = None
        if self._prompts:
            decoded = self.decode()
            if decoded is not None:
                metrics |= decode_metrics(decoded)
        self._report(metrics)
        for logger in self.loggers:
            if self.decoded is not None and isinstance(logger, RunRecords):
                logger.log_decoded(self.decoded, self.traces, self.trainer.global_step)
        for key in ("val/accept_len_implied", "val/loss", "decode/accept_len"):
            if key in metrics:
                self.log(key, metrics[key], logger=False)
        self.meter.restart_clock()

    def decode(self) -> DecodeStats | None:
        """Decode the validation prompts, and keep counts and texts; see `decode_share`."""
        decoder = Decoder(self.base, self.whole_heads())
        ranks = (self.global_rank, self.trainer.world_size)
        self.decoded, self.traces = decode_share(decoder, self._prompts, self.decode_options, ranks)
        return self.decoded

    def _over_ranks(self, value: Tensor) -> Tensor:
        """The sum over all processes. What is given stays as it is: reducing happens in place."""
        own = value.to(self.base.device, copy=True)
        return torch.as_tensor(self.trainer.strategy.reduce(own, reduce_op="sum"))

    def _reduced(self, sums: DraftSums) -> DraftSums:
        return DraftSums(*(self._over_ranks(value) for value in vars(sums).values()))

    def _report(self, metrics: dict[str, float]) -> None:
        """Send metrics to every logger at the current optimiser step, and keep them for callbacks."""
        self.latest |= metrics
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        write_extras(checkpoint, self.trained, self.trainer.world_size)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the draft vocabulary of the checkpoint; refuse heads of another shape or another base."""
        check_heads(checkpoint, self.trained)
        check_optimizer(checkpoint, self.optimizer_options.kind)
        take_extras(checkpoint, self.trained, self.trainer.world_size)

    def on_train_start(self) -> None:
        # A checkpoint may have brought another draft vocabulary, and Lightning may have moved the heads.
        self.trained.bind(self.base.embedding, self.base.output_matrix)
        if self.meter.peak is not None:
            self.meter.flops_per_token = self._first_pass()
        self.meter.restart()

    def _first_pass(self) -> float:
        """Operations per token of the first batch, which is thrown away: counting changes how gradients round. What it
        took is a first guess at a step's time."""
        batch = next(iter(self.trainer.datamodule.all_batches()))  # type: ignore[attr-defined]
        batch = {name: tensor.to(self.base.device) for name, tensor in batch.items()}
        began = time.monotonic()
        flops = count_flops(lambda: self.draft_sums(batch).total.backward())
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        self.guessed_step = (time.monotonic() - began) * self.trainer.accumulate_grad_batches
        self.zero_grad()
        return flops / float(batch["attention_mask"].sum())
