"""What a checkpoint holds beside weights and optimiser, and whether it belongs to the heads that are to go on from it.

Knows: the keys we add to Lightning's checkpoints. Refuses to know: where checkpoints lie, and when one is written.
"""

from dataclasses import replace
from typing import Any

import torch

from mtp.config import HeadsConfig
from mtp.errors import UserError
from mtp.heads import Heads
from mtp.vocab import vocab_hash
from train.sharded import share_progress

Checkpoint = dict[str, Any]


def write_extras(checkpoint: Checkpoint, heads: Heads, world_size: int) -> None:
    """Add the heads' configuration, the random state and the number of processes."""
    checkpoint["heads_config"] = heads.config.to_json()
    checkpoint["torch_rng"] = torch.get_rng_state()
    checkpoint["world_size"] = world_size


def take_extras(checkpoint: Checkpoint, heads: Heads, world_size: int) -> None:
    """Set the draft vocabulary's hash, the random state, and the place in the data among `world_size` processes."""
    heads.config = replace(heads.config, draft_vocab_hash=_config(checkpoint).draft_vocab_hash)
    torch.set_rng_state(checkpoint["torch_rng"].cpu())
    share_progress(checkpoint, world_size)


def check_heads(checkpoint: Checkpoint, heads: Heads) -> None:
    """UserError unless the checkpoint is of heads like these, on the same base, with a vocabulary that is its own."""
    saved, ours = _config(checkpoint), heads.config
    # A base may have been moved: its fingerprint says which it is.
    base = replace(ours.base, name=saved.base.name, revision=saved.base.revision)
    if replace(saved, draft_vocab_hash=None) != replace(ours, draft_vocab_hash=None, base=base):
        raise UserError(
            "--ckpt_path holds heads of another configuration or base than the config file; resume with the config "
            "the run was started with (config.yaml in its folder), or start a new run."
        )
    ids = checkpoint["state_dict"].get("heads.draft_ids")
    if ids is not None and vocab_hash(ids) != saved.draft_vocab_hash:
        raise UserError("--ckpt_path has a draft vocabulary that does not match its own hash; use another checkpoint.")


def check_optimizer(checkpoint: Checkpoint, wanted: str) -> None:
    """UserError unless the optimiser's state is of the `wanted` kind: Muon's has parts."""
    kind = "muon" if any("parts" in state for state in checkpoint["optimizer_states"]) else "adamw"
    if kind != wanted:
        raise UserError(
            f"--ckpt_path was written with optimizer.kind {kind}, and the configuration has {wanted}; resume with "
            f"{kind}, or start a new run with model.start_from."
        )


def _config(checkpoint: Checkpoint) -> HeadsConfig:
    return HeadsConfig.from_json(checkpoint["heads_config"], "--ckpt_path")
