"""Recognising a base and a tokenizer again.

Knows: three hashes. `model_fingerprint` is cheap and independent of the precision a checkpoint was loaded in, so that
heads can refuse the wrong base; `model_checksum` is exact, to show that nothing was changed; `tokenizer_fingerprint`
covers what decides the meaning of a token id. Refuses to know: who compares them.
"""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLES = 64  # elements looked at per parameter


@torch.no_grad()
def model_fingerprint(model: nn.Module, vocab_size: int) -> str:
    """Hash of the names, shapes and evenly spaced elements (rounded to bfloat16) of every parameter; 16 hex digits.

    The same for a checkpoint loaded in float32 or bfloat16. Loaded in float16 it agrees if the checkpoint is stored in
    16 bits; a float32 checkpoint is rounded twice on that way and may differ.
    """
    digest = hashlib.sha256(f"vocab {vocab_size}".encode())
    samples = []
    for name, parameter in model.named_parameters():
        digest.update(f"\n{name} {tuple(parameter.shape)}".encode())
        samples.append(_sample(parameter).to(torch.bfloat16))
    digest.update(_bytes(torch.cat(samples)))  # one transfer from the device for all parameters
    return digest.hexdigest()[:16]


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]


@torch.no_grad()
def model_checksum(model: nn.Module) -> str:
    """SHA-256 over the name, precision, shape and every byte of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> "memoryview[int]":
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy().data)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of the vocabulary with its ids, the special tokens and the chat template; 16 hex digits."""
    facts = {
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        "special": sorted(tokenizer.all_special_ids),
        "roles": {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk")},
        "template": getattr(tokenizer, "chat_template", None),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
