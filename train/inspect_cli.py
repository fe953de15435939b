"""`mtp-train inspect`: the data of a configuration, without the weights of the base.

Knows: its options and the console. Refuses to know: what is found in the data (`train.inspect`).
"""

import json
import os

from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console

from mtp.embedded import default_home
from train.fit import TrainCLI, parse, quiet_lightning
from train.inspect import coloured, inspect_data, lines

HELP = """usage: mtp-train inspect --config FILE [options]

examples:
  mtp-train inspect --config configs/demo.yaml
  mtp-train inspect --config configs/demo.yaml --count 8
  mtp-train inspect --config configs/demo.yaml --data.train mine.jsonl

What a config will train on: records, lengths, the mask on some examples, and what
a draft vocabulary covers; without the base's weights.

options:
  --config FILE  YAML, as for training; --KEY VALUE changes any key of it
  --count N      examples to show (default: 3)
  --json         the last line of stdout is one JSON document

exit codes: 0 done, 2 bad input or nothing to learn, 130 interrupted
"""


class InspectCLI(TrainCLI):
    """The same configuration, of which only the data are made: no base, no trainer, no run."""

    options = (*TrainCLI.options, "count", "json!")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--count", type=int, default=3, help="examples to show")
        parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON document")

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.model, self.datamodule = self._get(self.config_init, "model"), self._get(self.config_init, "data")


def run_inspect(arguments: list[str]) -> None:
    """`mtp-train inspect`."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    quiet_lightning()
    cli = parse(arguments, InspectCLI)
    data, count = cli.datamodule, cli.config["count"]
    console = Console(stderr=cli.config["json"], highlight=False, soft_wrap=True, markup=False)
    document = inspect_data(
        data,
        cli.model.base_options,
        cli.model.heads_options.draft_vocab_size,
        default_home(os.environ),
        count=count,
        on_progress=console.print,
    )
    for line in lines(document, data):
        console.print(line)
    for number, example in enumerate(data.sample(count), start=1):
        console.print(f"example {number} ({example.where}), supervised tokens between ⟦ and ⟧:")
        console.print(coloured(example, data))
    if cli.config["json"]:
        print(json.dumps(document, ensure_ascii=False), flush=True)
