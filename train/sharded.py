"""Lightning's strategy for heads and base that are spread over all devices: `trainer.strategy: fsdp`.

Knows: FSDP2 through Lightning's ModelParallelStrategy, and that a checkpoint is the file that one process would write:
it loads under any strategy and on any number of devices; and how what is spread becomes whole. Refuses to know: what is
trained.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from decode.stats import DecodeStats
from mtp.base import FrozenBase
from mtp.heads import Heads, build_heads
from mtp.sharding import spread_like, whole
from train.loader import rescaled


class ShardedStrategy(ModelParallelStrategy):
    """Parameters, gradients and optimiser states of the heads are spread; the base is sharded by `mtp.sharding`."""

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """As there; a second time does nothing."""
        if self._device_mesh is None:
            self._data_parallel_size = self.num_processes * self.num_nodes
            super().setup_environment()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def mesh(self) -> Any:
        """Of all processes, one dimension."""
        return self.device_mesh["data_parallel"]

    def shard(self, heads: nn.Module) -> None:
        """Spread heads, in place, beginning with the weights of the first process."""
        with torch.no_grad():
            for tensor in [*heads.parameters(), *heads.buffers()]:
                dist.broadcast(tensor, 0)
        fully_shard(heads, mesh=self.mesh, reshard_after_forward=False)
        register_fsdp_forward_method(heads, "unroll")

    # ---- checkpoints: whole tensors on the first process, in the usual file ------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return _whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return _whole(getattr(optimizer, "_optimizer", optimizer).state_dict())

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own, found = self.lightning_module.state_dict(), checkpoint["state_dict"]
        assert not strict or own.keys() == found.keys()
        for name, tensor in own.items():
            tensor.copy_(spread_like(found[name].to(tensor.dtype), tensor))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
            for part in getattr(optimizer, "parts", [optimizer]):
                for parameter, held in part.state.items():
                    _spread(held, parameter)


def whole_heads(heads: Heads, base: FrozenBase) -> Heads:
    """The heads themselves, or a whole copy, on every process, of those that are spread."""
    if not isinstance(heads, FSDPModule):
        return heads
    copy = build_heads(heads.config).to(base.device)
    copy.load_state_dict({name: whole(tensor) for name, tensor in heads.state_dict().items()})
    return copy.bind(base.embedding, base.output_matrix)


def merged(stats: DecodeStats | None, count: int) -> DecodeStats | None:
    """What `count` processes have decoded, in their order, on the first; None on the others."""
    found: list[DecodeStats | None] | None = [None] * count if dist.get_rank() == 0 else None
    dist.gather_object(stats, found)
    total: DecodeStats | None = None
    for one in filter(None, found or []):
        if total is None:
            total = one
        else:
            total.merge(one)
    return total


def share_progress(checkpoint: dict[str, Any], world_size: int) -> None:
    """Let Lightning's count of batches in a checkpoint be that of each of now `world_size` processes. UserError where
    they would differ."""
    before = checkpoint.get("world_size", world_size)
    if before == world_size:
        return
    loop = checkpoint["loops"]["fit_loop"]
    for counts in loop["epoch_loop.batch_progress"].values():
        if isinstance(counts, dict):
            counts.update({name: rescaled(count, before, world_size) for name, count in counts.items()})


def _whole(value: Any) -> Any:
    """A state with every tensor whole and on the CPU."""
    if isinstance(value, Tensor):
        return whole(value.detach()).cpu()
    if isinstance(value, Mapping):
        return {key: _whole(one) for key, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _spread(held: dict[str, Any], parameter: Tensor) -> None:
    """Spread what an optimiser keeps of a parameter, where it has its shape."""
    for name, value in held.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            held[name] = spread_like(value, parameter)
