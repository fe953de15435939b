"""A base whose decoder layers are spread over several devices, each layer gathered only while it runs (FSDP2).

Knows: torch's `fully_shard`, how weights that one process has read reach the others, and how to read and write tensors
that are spread. Refuses to know: processes and how they were started, heads, and training.

Every forward of a sharded base is one of all its processes: they must run it equally often, on whatever tokens.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from mtp.anatomy import find_inner, find_layers, freeze
from mtp.base import FrozenBase
from mtp.fingerprint import model_fingerprint
from mtp.gguf_file import quiet_transformers
from mtp.loading import load


def load_sharded(
    name: str,
    mesh: DeviceMesh,
    *,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    home: Path | None,
    on_progress: Callable[[str], None],
    wait: Callable[[], None],
) -> FrozenBase:
    """This process's share of a base, over a mesh of one dimension. Only the first process reads the weights, so only
    its machine needs memory for all of them; `wait` keeps the others until it has. See `FrozenBase.from_pretrained`."""
    first, device = mesh.get_rank() == 0, torch.device(mesh.device_type)
    more: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, "home": home}
    found = load(name, dtype=dtype, device=device, on_progress=on_progress, **more) if first else None
    wait()
    if found is None:
        found = load(name, dtype=None, device=device, on_progress=on_progress, **more)
    model: Any = found.model
    facts: list[Any] = [None] * 3
    if first:
        facts = [model.dtype, getattr(model, "generation_config", None), _fingerprint(model)]
    dist.broadcast_object_list(facts, 0)
    if not first:
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(found.config, dtype=facts[0], trust_remote_code=trust_remote_code)
        model.generation_config = facts[1]
    spread(model, name, mesh)
    base = FrozenBase.from_model(model, found.tokenizer, name, revision or found.revision)
    base.mark_sharded(str(facts[2]))
    return base


def _fingerprint(model: Any) -> str:
    return model_fingerprint(model, int(model.get_output_embeddings().weight.shape[0]))


@torch.no_grad()
def spread(model: Any, name: str, mesh: DeviceMesh) -> None:
    """Spread the decoder layers over the mesh's devices; the rest becomes whole on all of them, as heads read embedding
    and output matrix at any time. The first process has the weights, and they are empty on the others."""
    freeze(model)
    inner = find_inner(model, name)
    layers = find_layers(inner, model.config.get_text_config(decoder=True), name)
    device = _device(mesh)
    for layer in layers:
        _spread_layer(layer, mesh, device)
    _copy_rest(model, layers, mesh, device)
    # One root over all layers, so that the next is fetched while one runs; it spreads nothing itself.
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    fully_shard(inner, mesh=mesh, ignored_params={p for p in inner.parameters() if p not in inside})


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _spread_layer(layer: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    given = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _copied(buffer, mesh, device))
        for name, parameter in module.named_parameters(recurse=False):  # only shapes: no layer is whole on a device
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    buffers = dict(layer.named_buffers())
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    layer.to_empty(device=device)
    for name, buffer in layer.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, DTensor)
        full = given[name].to(device) if mesh.get_rank() == 0 else torch.empty_like(given[name], device=device)
        part = distribute_tensor(full, mesh, parameter.placements)
        parameter.to_local().copy_(part.to_local())


def _copy_rest(model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, device: torch.device) -> None:
    """Everything outside the layers, whole. What is tied in the first process becomes tied in all; an empty model may
    not have it tied."""
    inside = {id(module) for module in layers.modules()}
    outside = {prefix: module for prefix, module in model.named_modules() if id(module) not in inside}
    places: list[Any] = [
        [
            (prefix, name, id(p))
            for prefix, module in outside.items()
            for name, p in module.named_parameters(recurse=False)
        ]
    ]
    dist.broadcast_object_list(places, 0)
    known: dict[int, nn.Parameter] = {}
    for prefix, name, key in places[0]:
        parameters = outside[prefix]._parameters
        if key not in known:
            known[key] = nn.Parameter(_copied(parameters[name], mesh, device), requires_grad=False)
        parameters[name] = known[key]
    for module in outside.values():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _copied(buffer, mesh, device))


def _copied(tensor: Tensor | None, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """The first process's tensor, everywhere."""
    assert tensor is not None
    first = mesh.get_rank() == 0
    copy = tensor.detach().to(device) if first else torch.empty_like(tensor, device=device, requires_grad=False)
    copy = copy.contiguous()
    dist.broadcast(copy, 0, group=mesh.get_group())
    return copy


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
