"""Every YAML in configs/: those of the embedded base run for two steps through the command line; those of bases on the
Hub are parsed, and their heads built on a base of the same sizes without numbers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from mtp.anatomy import find_inner, find_layers
from mtp.base import FrozenBase
from mtp.heads import build_heads
from mtp.hub import load_heads
from mtp.initialise import describe, new_heads
from tests.tiny import tiny_base
from tests.train.runs import read_metrics
from train.cli import main
from train.compare import read_plans
from train.cost import SPARE, estimate_memory
from train.fit import parse
from train.inspect_cli import InspectCLI
from train.schema import schema
from train.words import as_yaml

EMBEDDED = "smollm2-135m"
FILES = {path: yaml.safe_load(path.read_text()) for path in sorted(Path("configs").glob("*.yaml"))}
SEVERAL_GPUS = {"one-node-8-gpus", "fsdp-70b-several-nodes"}  # see test_many_device_configs.py
BASES = {  # a sweep has none
    path: keys["model"]["base"]["name"]
    for path, keys in FILES.items()
    if "model" in keys and path.stem not in SEVERAL_GPUS
}
ALL = list(BASES)
CONFIGS = [path for path in ALL if BASES[path] == EMBEDDED] + sorted(Path("configs/compare").glob("*.yaml"))
ON_HUB = [path for path in ALL if BASES[path] != EMBEDDED]
COMMENTED = ("demo", "smollm2-medusa", "smollm2-recurrent", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b-one-gpu")
_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8, "max_position_embeddings": 40960}
_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SIZES: dict[str, tuple[str, int, dict[str, Any]]] = {  # architecture, published number of parameters, configuration
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        596_049_920,
        _QWEN3 | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
        | {"tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": (
        "qwen3",
        8_190_735_360,
        _QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "llama",
        1_235_814_400,
        _LLAMA3 | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
        | {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        8_030_261_248,
        _LLAMA3 | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    ),
    "meta-llama/Llama-3.1-70B-Instruct": (
        "llama",
        70_553_706_496,
        _LLAMA3 | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    ),
}  # fmt: skip
GPU = {"qwen3-0.6b": 16e9, "llama-3.2-1b": 24e9, "qwen3-8b-one-gpu": 80e9}  # bytes, as the files say


def test_there_are_configs() -> None:
    assert {path.stem for path in ALL} >= set(COMMENTED)
    assert {"medusa", "hydra", "sequential", "parallel", "recurrent"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_that_a_config_names_are_here(path: Path) -> None:
    named = re.findall(r"\bconfigs/[\w./-]+\w", path.read_text())
    assert all(Path(name).exists() for name in named), named


def test_the_compared_configs_are_alike(tmp_path: Path) -> None:
    plans = read_plans(Path("configs/compare"), tmp_path / "out")
    assert {plan.name: plan.keys["model.heads.kind"] for plan in plans} == {plan.name: plan.name for plan in plans}
    assert not list(tmp_path.iterdir())


# ---- comments --------------------------------------------------------------------------------------------------------


def faults(text: str) -> list[str]:
    """Keys without a comment, and comments whose default is not the schema's."""
    found, parents = [], [("", -1)]
    for line in text.splitlines():
        match = re.match(r"( *)(\w+):(.*)$", line)
        if match is None:
            continue
        while parents[-1][1] >= len(match[1]):
            parents.pop()
        key = f"{parents[-1][0]}.{match[2]}".lstrip(".")
        value, _, comment = match[3].partition("  # ")
        parents.append((key, len(match[1])))
        if not value.strip() and key not in schema():
            continue  # a group
        told = re.search(r"; (?:default (.+)|(no default))$", comment)
        if told is None:
            found.append(f"{key}: no comment with a default")
        elif (told[1] or "...") != ("..." if schema()[key].default is ... else as_yaml(schema()[key].default)):
            found.append(f"{key}: its default is {as_yaml(schema()[key].default)}")
    return found


@pytest.mark.parametrize("name", COMMENTED)
def test_every_key_is_explained_with_its_true_default(name: str) -> None:
    assert not faults(Path(f"configs/{name}.yaml").read_text())


def test_a_missing_comment_and_a_wrong_default_are_found() -> None:
    text = Path("configs/demo.yaml").read_text()
    assert faults(re.sub(r"(  lr: \S+).*", r"\1", text)) == ["model.optimizer.lr: no comment with a default"]
    assert faults(text.replace("default 512", "default 511")) == ["data.max_length: its default is 512"]


# ---- bases on the Hub, without them ----------------------------------------------------------------------------------


class OnPaper(FrozenBase):
    """A base with real sizes and no numbers."""

    def __init__(self, name: str) -> None:
        kind, self.published, fields = SIZES[name]
        config = AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        rotary = self.model.model.rotary_emb
        self.model.model.rotary_emb = type(rotary)(config=config)  # the only numbers that a shape is read from
        self.name, self.revision, self.tokenizer = name, None, None
        self._inner = find_inner(self.model, name)
        self._layers = find_layers(self._inner, self._text_config, name)

    def fingerprint(self) -> str:
        return "paper"

    tokenizer_fingerprint = fingerprint


@pytest.mark.parametrize("path", ON_HUB, ids=lambda path: path.stem)
def test_config_of_a_hub_base_fits_it(path: Path, tmp_path: Path) -> None:
    cli = parse(["--config", str(path)], InspectCLI)
    options, data = cli.model.heads_options, cli.datamodule
    base = OnPaper(cli.model.base_options.name)
    assert sum(p.numel() for p in base.model.parameters()) == base.published
    ids = None if options.draft_vocab_size is None else torch.arange(options.draft_vocab_size)
    with torch.device("meta"):
        heads = build_heads(describe(options, base, ids))
    assert heads.config.hidden_size == base.hidden_size
    assert data.max_length <= base.context_length
    states = 2 if cli.model.optimizer_options.kind == "adamw" else 1
    memory = estimate_memory(base, heads, data.max_length, cli.model.loss_options.chunk, states)
    if path.stem in GPU:
        assert memory.of(data.batch_size * data.max_length) < SPARE * GPU[path.stem]
        assert memory.of(4 * data.batch_size * data.max_length) > SPARE * GPU[path.stem], "the GPU is put to use"
    small = tiny_base(SIZES[base.name][0], tmp_path)  # of the same architecture: the start is possible, too
    layers = None if options.feature_layers is None else (1, 2, 3)[: len(options.feature_layers)]
    built = new_heads(replace(options, draft_vocab_size=40, feature_layers=layers), small, torch.arange(40))
    assert type(built) is type(heads)


# ---- the embedded base -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_runs_two_steps(path: Path, tmp_path: Path, smollm2: FrozenBase) -> None:
    arguments = ["--config", str(path), "--run.dir", str(tmp_path), "--run.wandb_project", "null"]
    arguments += ["--data.train", "configs/data/demo_answers.jsonl", "--data.limit", "6", "--data.val_size", "2"]
    arguments += ["--data.val", "null", "--data.batch_size", "2", "--data.max_length", "32"]
    arguments += ["--model.features.dir", str(tmp_path / "features"), "--model.start_positions", "100"]
    arguments += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.log_every_n_steps", "1"]
    arguments += ["--trainer.accumulate_grad_batches", "1", "--trainer.limit_val_batches", "1"]
    arguments += ["--model.decode.limit", "1", "--model.decode.max_new_tokens", "4"]
    assert main(arguments) == 0
    (run,) = [folder for folder in tmp_path.iterdir() if folder.name != "features"]
    rows = read_metrics(run)
    assert [row["step"] for row in rows if row.get("train/loss")] == ["1", "2"]
    assert any(row.get("decode/accept_len") for row in rows)
    assert load_heads(run / "heads").config.base.fingerprint == smollm2.fingerprint()
