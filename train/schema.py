"""Every key that a config may hold, with its type, default and help: one list for messages, help and tests.

Knows: the classes that `mtp-train` is configured by. Refuses to know: what keys do, and where values come from.
"""

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import lightning
from docstring_parser import parse

from train.data import ChatDataModule
from train.module import HeadsModule
from train.run import RunOptions

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,  # val_check_interval counts batches across epochs
    "log_every_n_steps": 10,
    "gradient_clip_val": 1.0,
    "use_distributed_sampler": False,  # the loaders know their rank
    "enable_model_summary": False,
}
SEED_HELP = "seed of weights, order and draws; true picks one"


class Key(NamedTuple):
    """What may be said for one key. `default` is `...` where a value must be given."""

    hint: Any
    default: Any
    help: str

    @property
    def nullable(self) -> bool:
        return self.hint is Any or type(None) in (get_args(self.hint) or (self.hint,))


@cache
def schema() -> Mapping[str, Key]:
    """All keys, dotted, in the order of their classes."""
    keys = {"seed_everything": Key(bool | int, 0, SEED_HELP)}
    keys |= _of("run", RunOptions) | _of("model", HeadsModule) | _of("data", ChatDataModule)
    trainer = _of("trainer", lightning.Trainer)
    for name, default in TRAINER_DEFAULTS.items():
        trainer[f"trainer.{name}"] = trainer[f"trainer.{name}"]._replace(default=default)
    return keys | trainer


def groups(keys: Collection[str]) -> set[str]:
    """The names that only hold other keys: `model`, `model.heads`, …"""
    return {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}


def _of(prefix: str, cls: type) -> dict[str, Key]:
    """The keys of one class; dataclasses among its arguments are groups of keys."""
    hints = get_type_hints(cls.__init__)
    told = {one.arg_name: one.description or "" for one in parse(inspect.getdoc(cls.__init__) or "").params}
    told |= {one.arg_name: one.description or "" for one in parse(inspect.getdoc(cls) or "").params}
    found: dict[str, Key] = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        hint, key = hints[name], f"{prefix}.{name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= _of(key, hint)
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        found[key] = Key(hint, default, " ".join(told.get(name, "").split()))
    return found
