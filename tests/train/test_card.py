"""The card that training writes: the run's figures and settings, a licence only if stated, no path of this machine."""

import json
import math
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from mtp.errors import UserError
from mtp.hub import read_config
from tests.train.runs import train
from train.card import card_of_run
from train.run import RunOptions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("card"))


def test_a_run_leaves_a_card_with_its_figures(run: Path) -> None:
    card = (run / "heads" / "README.md").read_text()
    record = json.loads((run / "run.json").read_text())
    best = record["best"]
    found = ModelCard(card)
    assert found.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}  # no licence, and no base on the Hub
    for k in (1, 2):
        for key in ("val/alpha", "val/cumulative", "val/greedy", "decode/accepted"):
            assert f"{best[f'{key}/{k}']:.3f}" in card
    assert f"{best['val/accept_len_implied']:.2f} implied" in card
    assert f"{best['decode/accept_len']:.2f} in really decoding 2 prompts of `prompts.jsonl`, 8 new tokens each" in card
    assert math.isfinite(best["decode/accept_len"])
    tokens = f"| tokens | {record['tokens_trained']:,} |"
    torch = f"torch {record['versions']['torch']}"
    assert "| rows in a batch | 4 |" in card
    for part in ("`data.jsonl`", "learning rate 0.01", tokens, "| loss | kl 1 |", torch):
        assert part in card, part
    fingerprint = read_config(run / "heads").base.fingerprint
    assert fingerprint
    assert fingerprint in card
    assert str(run.parent.parent) not in card
    assert str(Path.home()) not in card


def test_what_is_stated_is_told(run: Path, tmp_path: Path) -> None:
    config = read_config(run / "heads")
    (tmp_path / "config.yaml").write_text(
        "run: {license: mit}\ndata: {train: {org/answers:small: 2.0, /home/me/mine.jsonl: 1.0}, max_length: 64}\n"
    )
    card = card_of_run(config, tmp_path)
    assert ModelCard(card).data.to_dict()["license"] == "mit"
    assert ModelCard(card).data.to_dict()["datasets"] == ["org/answers"]
    assert "- `org/answers:small`, each record 2 times an epoch\n- `mine.jsonl`\n" in card
    assert "/home/me" not in card
    assert "## Acceptance" not in card


def test_rows_are_those_of_all_devices(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {batch_size: 4}\ntrainer: {accumulate_grad_batches: 2}\n")
    (tmp_path / "run.json").write_text('{"devices": 3}')
    assert "| rows in a batch | 24, 8 on each of 3 devices |" in card_of_run(read_config(run / "heads"), tmp_path)


def test_a_run_without_records_still_gets_a_card(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("[")
    (tmp_path / "run.json").write_text("{")
    card = card_of_run(read_config(run / "heads"), tmp_path)
    assert "## Recipe" not in card
    assert "## Use" in card


def test_a_licence_that_cannot_be_one() -> None:
    with pytest.raises(UserError, match="run.license is 'My own'; use one of the Hub's identifiers"):
        RunOptions(license="My own")
    with pytest.raises(UserError, match=r"run.license is 'apache2'; .*did you mean 'apache-2.0'\?"):
        RunOptions(license="apache2")
