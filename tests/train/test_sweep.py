"""`configs/sweep.yaml`: what `wandb agent` makes of it is a command line that `mtp-train` understands."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentError
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from mtp.errors import UserError
from mtp.losses import LossOptions, LossWeights
from train.dashboard import panels
from train.fit import TrainCLI, parse, plain
from train.summary import MONITOR

SWEEP: dict[str, Any] = yaml.safe_load(Path("configs/sweep.yaml").read_text())
RANGES: dict[str, list[Any]] = {
    name: parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]
    for name, parameter in SWEEP["parameters"].items()
}
"""The values that a parameter may take, or the ends of its range."""


def command(chosen: dict[str, Any]) -> list[str]:
    """What the agent runs for these values, by wandb's own code, without the program."""
    wrapped = {"args": {name: {"value": value} for name, value in chosen.items()}}
    words = {"${program}": [SWEEP["program"]], "${args}": create_sweep_command_args(wrapped)["args"]}
    program, *arguments = [word for words_ in SWEEP["command"] for word in words.get(words_, [words_])]
    assert program == "mtp-train"
    return arguments


class Parsed(TrainCLI):
    """The command line as it is parsed, and nothing made from it."""

    def instantiate_classes(self) -> None:
        pass


def told(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return plain(config)


CHOICES = [
    {name: values[min(number, len(values) - 1)] for name, values in RANGES.items()}
    for number in range(max(map(len, RANGES.values())))
]


def test_the_search_is_by_a_metric_that_runs_log() -> None:
    assert SWEEP["metric"] == {"name": MONITOR, "goal": "maximize"}
    assert SWEEP["method"] == "bayes"
    assert MONITOR in {metric for panel in panels() for metric in panel.metrics}


def test_every_value_is_taken_as_it_stands() -> None:
    before = parse(["--config", "configs/smollm2-recurrent.yaml"], Parsed).config
    losses = []
    for chosen in CHOICES:
        config = parse(command(chosen), Parsed).config
        for name in set(RANGES) - {"model.loss"}:
            assert told(config, name) == chosen[name]
        loss = told(config, "model.loss")
        assert {name: loss[name] for name in ("decay", "chunk")} == {
            name: told(before, "model.loss")[name] for name in ("decay", "chunk")
        }
        for name, value in json.loads(chosen["model.loss"]).items():
            found = loss[name]
            assert ({k: v for k, v in found.items() if v} if isinstance(value, dict) else found) == value
        final = {**loss, "final": loss["final"] and LossWeights(**loss["final"]), "blend": tuple(loss["blend"])}
        losses.append(LossOptions(**final))
    assert len(set(losses)) == len(RANGES["model.loss"]), "no two are the same"
    assert all(len(set(values)) == len(values) for values in RANGES.values())


@pytest.mark.parametrize(
    ("name", "value"), [("model.optimizer.rate", 0.1), ("model.loss", '{"kj": 1.0}'), ("model.loss", "kl")]
)
def test_a_made_up_key_is_refused(name: str, value: object) -> None:
    """The negative control."""
    with pytest.raises((UserError, ArgumentError)):
        parse(command({name: value}), Parsed)
