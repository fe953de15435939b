"""The Lightning module: one training step of heads on a frozen base, validation, and the real acceptance length.

Knows: how base, heads, losses and decoding engine meet in a step, and which numbers come out under which key.
Refuses to know: where data come from, where a run is stored, and which loggers listen (`train.cli`, `train.run`).

Metric keys: `train/…`, `val/…` (teacher-forced), `decode/…` (measured by decoding); `…/1` to `…/K` by draft position.
Shapes: B batch, T position, M anchors, K draft position, D hidden, F features.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from decode import Decoder
from decode.prompts import read_prompts
from decode.stats import DecodeStats
from mtp.base import FrozenBase
from mtp.config import HeadsConfig, HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, RecurrentHeads
from mtp.initialise import new_heads
from mtp.least_squares import Moments, start_from_states
from mtp.losses import LossOptions, LossWeights
from mtp.objective import DraftSums, draft_sums, to_draft
from mtp.targets import TargetPlan, neighbours, pad_for_drafts, plan_targets
from mtp.vocab import build_draft_vocab, coverage, vocab_hash
from train.data import ChatDataModule
from train.feature_store import FeatureOptions, FeatureStore
from train.loader import Batch
from train.optimizer import make_optimizer
from train.options import BaseOptions, DecodeOptions, OptimizerOptions, learning_rate_share
from train.summary import decode_metrics, summarise
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
    ) -> None:
        super().__init__()
        self.base_options, self.heads_options = base, heads
        self.loss_options, self.optimizer_options, self.decode_options = loss, optimizer, decode
        self.feature_options, self.start_positions = features, start_positions
        self.store: FeatureStore | None = None
        self.peak: float | None = None  # operations per second; `train.prepare` measures it
        self.on_start: Callable[[int, int], None] | None = None
        self._base: FrozenBase | None = None
        self.heads: Heads | None = None
        self.vocab_coverage = 1.0
        self._prompts = read_prompts(Path(decode.prompts), decode.limit) if decode.prompts else []
        self.latest: dict[str, float] = {}
        self._step: DraftSums | None = None
        self._gradient: Tensor | None = None
        self._counter: FlopCounterMode | None = None
        self.flops_per_token: float | None = None
        self.register_buffer("running_alpha", torch.zeros(heads.draft_length))
        self._grad_norm = 0.0
        self._window: DraftSums | None = None
        self._validation: DraftSums | None = None
        self._tokens, self._since = 0.0, time.monotonic()

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
        random = self.heads_options.init == "random"
        if isinstance(self.heads, RecurrentHeads) and random and self.start_positions and not self.trainer.ckpt_path:
            self._start(self.heads, data)

    def build(self, data: ChatDataModule) -> None:
        """Make the heads for the attached base and a data module that is set up. UserError where they do not fit."""
        self.heads = new_heads(self.heads_options, self.base, self._draft_vocab(data))

    def _start(self, heads: RecurrentHeads, data: ChatDataModule) -> None:
        """The closed-form start; ranks agree afterwards because DDP and FSDP begin with the weights of rank 0."""
        moments = Moments(heads)
        tell = self.on_start or (lambda done, total: None)
        for batch in data.train_dataloader():
            tokens = batch["tokens"].to(self.base.device)
            segments = batch["segments"].to(tokens.device) if "segments" in batch else None
            here, after, next_tokens = neighbours(tokens, batch["supervised"].to(tokens.device), segments)
            output = self.base.forward(tokens, feature_layers=heads.config.feature_layers, segments=segments)
            features, states = output.features.flatten(0, 1), output.hidden.flatten(0, 1)
            moments.add(features[here], states[here], next_tokens, states[after])
            tell(min(moments.count, self.start_positions - 1), self.start_positions)
            if moments.count >= self.start_positions:
                break
        start_from_states(heads, moments)
        tell(moments.count, moments.count)

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
        if hidden.requires_grad:
            hidden.register_hook(self._note_gradient)
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

    def _note_gradient(self, slope: Tensor) -> None:
        """Squared norm [K] of the objective's gradient to the heads' states: whether every head is being taught."""
        squared = slope.detach().double().square().sum((0, 1, 3))
        self._gradient = squared if self._gradient is None else self._gradient + squared

    def loss_weights(self) -> LossWeights:
        """The weights of the losses at this moment of training."""
        steps = self.trainer.estimated_stepping_batches if self.loss_options.final else 1
        return self.loss_options.at(self.global_step / steps)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self.flops_per_token is None and self.peak is not None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def _stop_counting(self, batch: Batch) -> None:
        """One step tells the operations of all: what a token costs hardly differs between batches."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops_per_token = self._counter.get_total_flops() / float(batch["attention_mask"].sum())
            self._counter = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The objective as a sum. `on_before_optimizer_step` divides the gradient by the positions of all batches that
        went into the step, so that batch size, padding, accumulation and ranks do not change it."""
        sums = self.draft_sums(batch)
        seen = sums.detached()
        self._step = seen if self._step is None else self._step + seen
        self._window = seen if self._window is None else self._window + seen
        self._tokens += float(batch["attention_mask"].sum())
        return sums.total * self.trainer.accumulate_grad_batches  # Lightning divides by it

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._step is not None, "a step follows a batch"
        seen, self._step = self._reduced(self._step), None
        scale = float(self.trainer.world_size / seen.positions.clamp(min=1))  # ranks average gradients
        for parameter in self.trained.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        slopes = [p.grad for p in self.trained.parameters() if p.grad is not None]
        self._grad_norm = float(torch.nn.utils.get_total_norm(slopes))
        alpha = (seen.alpha / seen.count.clamp(min=1)).to(self.running_alpha)
        self.running_alpha.lerp_(alpha, RUNNING_SHARE)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._stop_counting(batch)
        step, every = self.trainer.global_step, self.trainer.log_every_n_steps
        stepped = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch
        if self._window is None or not stepped or step % every:
            return
        metrics = summarise(self._reduced(self._window), "train")
        metrics["train/lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        metrics["train/tokens_per_s"] = self._tokens / max(1e-9, time.monotonic() - self._since)
        if self.peak is not None and self.flops_per_token is not None:
            metrics["train/peak_share"] = self.flops_per_token * metrics["train/tokens_per_s"] / self.peak
        metrics["train/grad_norm"] = self._grad_norm
        if self._gradient is not None:
            norms = (self._gradient.sqrt() / float(self._window.positions.clamp(min=1))).tolist()
            metrics |= {f"train/grad_norm/{k}": norm for k, norm in enumerate(norms, 1)}
        self._report(metrics)
        self.log("loss", metrics["train/loss"], prog_bar=True, logger=False)
        self.log("tok/s", metrics["train/tokens_per_s"], prog_bar=True, logger=False)
        self._restart_window()

    def _restart_window(self) -> None:
        self._window, self._gradient, self._tokens, self._since = None, None, 0.0, time.monotonic()

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
            metrics |= decode_metrics(self.decode())
        self._report(metrics)
        for key in ("val/accept_len_implied", "val/loss", "decode/accept_len"):
            if key in metrics:
                self.log(key, metrics[key], logger=False)
        self._since = time.monotonic()
        self._tokens = 0.0

    def decode(self) -> DecodeStats:
        """Decode the validation prompts with the engine that users decode with."""
        options, decoder = self.decode_options, Decoder(self.base, self.trained)
        total: DecodeStats | None = None
        for prompt in self._prompts:
            stats = decoder.generate(
                prompt,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                seed=options.seed,
            ).stats
            if total is None:
                total = stats
            else:
                total.merge(stats)
        assert total is not None
        return total

    def _reduced(self, sums: DraftSums) -> DraftSums:
        """Sums over all ranks."""
        reduce = self.trainer.strategy.reduce
        return DraftSums(*(torch.as_tensor(reduce(value, reduce_op="sum")) for value in vars(sums).values()))

    def _report(self, metrics: dict[str, float]) -> None:
        """Send metrics to every logger at the current optimiser step, and keep them for callbacks."""
        self.latest |= metrics
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.trainer.global_step)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["heads_config"] = self.trained.config.to_json()
        checkpoint["torch_rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the draft vocabulary of the checkpoint; refuse heads of another shape or another base."""
        saved = HeadsConfig.from_json(checkpoint["heads_config"], "--ckpt_path")
        ours = self.trained.config
        base = replace(
            ours.base, name=saved.base.name, revision=saved.base.revision
        )  # the fingerprint tells them apart
        if replace(saved, draft_vocab_hash=None) != replace(ours, draft_vocab_hash=None, base=base):
            raise UserError(
                "--ckpt_path holds heads of another configuration or base than the config file; resume with the config "
                "the run was started with (config.yaml in its folder), or start a new run."
            )
        ids = checkpoint["state_dict"].get("heads.draft_ids")
        if ids is not None and vocab_hash(ids) != saved.draft_vocab_hash:
            raise UserError(
                "--ckpt_path has a draft vocabulary that does not match its own hash; use another checkpoint."
            )
        self.trained.config = replace(ours, draft_vocab_hash=saved.draft_vocab_hash)
        torch.set_rng_state(checkpoint["torch_rng"].cpu())

    def on_train_start(self) -> None:
        # A checkpoint may have brought another draft vocabulary, and Lightning may have moved the heads.
        self.trained.bind(self.base.embedding, self.base.output_matrix)
        self._restart_window()
