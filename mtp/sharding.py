"""A base whose decoder layers are spread over several devices, each layer gathered only while it runs (FSDP2).

Knows: torch's `fully_shard`, and how to read and write tensors that are spread. Refuses to know: processes and how they
were started, heads, and training.

Every forward of a sharded base is one of all its processes: they must run it equally often, on whatever tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mtp.anatomy import find_inner, find_layers, freeze
from mtp.base import FrozenBase
from mtp.fingerprint import model_fingerprint


def shard_base(model: Any, tokenizer: Any, name: str, revision: str | None, mesh: DeviceMesh) -> FrozenBase:
    """Spread the decoder layers of a model, the same on all processes, over `mesh`; the rest stays whole everywhere, as
    heads read embedding and output matrix at any time. The model may be on the CPU; the result is on the mesh's device.
    """
    freeze(model)
    inner = find_inner(model, name)
    layers = find_layers(inner, model.config.get_text_config(decoder=True), name)
    fingerprint = model_fingerprint(model, int(model.get_output_embeddings().weight.shape[0]))
    device = _device(mesh)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # to its device, one at a time
    _move_rest(model, layers, device)
    # One root over all layers, so that the next is fetched while one runs; it spreads nothing itself.
    spread = {parameter for layer in layers for parameter in layer.parameters()}
    fully_shard(inner, mesh=mesh, ignored_params={p for p in inner.parameters() if p not in spread})
    base = FrozenBase.from_model(model, tokenizer, name, revision)
    base.mark_sharded(fingerprint)
    return base


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _move_rest(model: nn.Module, layers: nn.ModuleList, device: torch.device) -> None:
    """Everything outside the layers to `device`."""
    inside = {id(module) for module in layers.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of a module that may be spread are whole, also after it ran."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.set_reshard_after_forward(False)
    module.unshard()
    try:
        yield
    finally:
        module.set_reshard_after_forward(True)
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread: all processes must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This process's part of a tensor that all have whole, where `example` is spread; else the tensor itself."""
    if not isinstance(example, DTensor):
        return tensor
    tensor = tensor.to(example.device)
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)
