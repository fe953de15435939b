"""`mtp-train inspect` and what training says about data: the facts are right, and bad data end with code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtp.base import FrozenBase
from tests.tiny import write_tiny_gguf
from tests.train.runs import job, read_metrics, train
from train import inspect
from train.cli import main


def inspected(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **changes: Any) -> tuple[dict, str]:
    """The JSON document and what was said beside it."""
    assert main(["inspect", "--config", str(job(folder, **changes)), "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def extra(folder: Path) -> str:
    path = folder / "extra.jsonl"
    rows = [{"prompt": f"say {i}", "response": f"ant {i}."} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_facts_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = {str(tmp_path / "data.jsonl"): 2.0, extra(tmp_path): 0.5}
    document, said = inspected(
        tmp_path, capsys, "--count", "3", data__train=mixture, data__val_size=6, data__packing=True
    )
    first, second = document["sources"]
    assert (first["weight"], second["weight"]) == (2.0, 0.5)
    assert first["records"] + second["records"] == 56 - document["validation"]["records"]
    assert first["drawn_per_epoch"] == 2 * first["examples"]
    assert second["drawn_per_epoch"] == round(second["examples"] / 2)
    assert document["train"]["records"] == first["records"] + second["records"]
    assert sum(one["count"] for one in document["lengths"]) == document["train"]["examples"]
    assert document["draft_vocab_coverage"].keys() == {"40", "all 64"}
    assert "40 tokens 100.00%" in said
    assert document["packing"]["filled"] > 0.9
    assert len(document["examples"]) == 3
    assert "⟦the answer to what is" in document["examples"][0]
    assert "⟦ant " in document["examples"][2]
    assert (said.count("⟦the answer to"), said.count("⟦ant ")) == (2, 1)
    assert "warning: model.heads.draft_vocab_size is 40" in said
    assert f"{extra(tmp_path)}: {second['records']} records" in said
    assert "█" in said
    assert not (tmp_path / "runs").exists(), "nothing was trained"


def test_tokens_are_kept_below_the_home_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTP_HOME", str(tmp_path / "home"))
    path = job(tmp_path)
    config = yaml.safe_load(path.read_text())
    del config["data"]["cache_dir"]
    path.write_text(yaml.safe_dump(config))
    assert main(["inspect", "--config", str(path)]) == 0
    assert len(list((tmp_path / "home" / "tokens").glob("*.safetensors"))) == 2  # training and validation
    assert "tokens kept in" in capsys.readouterr().out


def test_a_gguf_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    document, _ = inspected(tmp_path, capsys, model__base__name=gguf)
    assert "⟦the answer to" in document["examples"][0]


def test_no_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path)
    for weights in (tmp_path / "llama").glob("*.safetensors"):
        weights.unlink()
    monkeypatch.setattr(FrozenBase, "from_pretrained", None)
    document, said = inspected(tmp_path, capsys)
    assert len(document["examples"]) == 3
    assert "tokens kept in" in said
    assert "tokens read from cache" in inspected(tmp_path, capsys)[1]
    assert "tokens" not in inspected(tmp_path, capsys, data__cache_dir=None)[0]["train"]["dropped"]
    assert "tokens read" not in inspected(tmp_path, capsys, data__cache_dir=None)[1]


BAD_DATA = {
    "no answers": ({"data__val_size": 0}, [{"messages": [{"role": "user", "content": "why?"}]}], "no assistant turn"),
    "empty file": ({}, [], "holds no records"),
    "unknown record": ({}, [{"question": "why?"}], "no known record"),
    "weight": ({"data__train": {"data.jsonl": -1.0}}, None, "data.train gives data.jsonl the weight -1.0"),
    "no number": ({"data__train": {"data.jsonl": "much"}}, None, "much"),
    "missing": ({"data__train": {"nowhere.jsonl": 1.0}}, None, "nowhere.jsonl"),
    "no source": ({"data__train": {}}, None, "data.train is empty"),
    "key": ({"data__pack": True}, None, "pack"),
    "too long": (
        {"data__max_length": 400, "data__val_size": 0},
        [{"text": "the ant " * 400}] * 9,
        "the base reads 256",
    ),
}


@pytest.mark.parametrize("command", ["inspect", "train"])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_end_with_code_2(case: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, rows, message = BAD_DATA[case]
    path = job(tmp_path, **changes)
    if rows is not None:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*(["inspect"] if command == "inspect" else []), "--config", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_a_negative_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--config", str(job(tmp_path)), "--count", "-1"]) == 2
    assert "--count is -1; allowed is 0 or more" in capsys.readouterr().err


def test_a_packed_mixture_trains_and_resumes(tmp_path: Path) -> None:
    """Through the command line; the saved config holds the mixture, and is itself a config."""
    mixture = {str(tmp_path / "data.jsonl"): 1.5, extra(tmp_path): 0.5}
    changes: dict[str, Any] = {"data__train": mixture, "data__packing": True, "data__max_length": 200}
    changes |= {"data__batch_size": 2, "model__decode__prompts": None}
    part = train(tmp_path, "--trainer.max_steps", "4", **changes)
    checkpoint = part / "checkpoints" / "last.ckpt"
    resumed = [
        "--config",
        str(part / "config.yaml"),
        "--run.wandb_project",
        "null",
        "--trainer.max_steps",
        "9",
        "--ckpt_path",
        str(checkpoint),
    ]
    assert main(resumed) == 0
    assert [int(row["step"]) for row in read_metrics(part) if row.get("train/loss")] == list(range(1, 10))
    assert "extra.jsonl: 0.5" in (part / "config.yaml").read_text()


def test_histogram_covers_every_length() -> None:
    bins = inspect.histogram([1, 10, 11, 95, 95, 95], 95)
    assert [one["count"] for one in bins] == [1, 2, 0, 0, 0, 0, 0, 0, 0, 3]
    assert [one["least"] for one in bins[1:]] == [one["most"] + 1 for one in bins[:-1]]
    assert (bins[0]["least"], bins[0]["most"], bins[-1]["most"]) == (1, 9, 95)
    shown = inspect.bars(bins)
    assert shown[-1] == f"  86–95 {'█' * inspect.BAR} 3"
    assert [one["count"] for one in inspect.histogram([1, 2, 3], 3)] == [1, 1, 1]


def test_a_draft_vocabulary_of_unseen_tokens_is_warned_of() -> None:
    counts = torch.tensor([4.0, 2.0, 1.0, 0.0, 0.0, 0.0])
    assert inspect.vocab_warning(counts, torch.tensor([0, 1, 2, 3])) is None
    warning = inspect.vocab_warning(counts, torch.tensor([0, 1, 2, 3, 4]))
    assert warning is not None
    assert "model.heads.draft_vocab_size is 5, and 40% of these tokens are never supervised" in warning
    assert inspect.coverages(counts, {0}) == {"all 6": 1.0}
    many = torch.cat([torch.ones(5000), torch.zeros(5000)])
    assert inspect.coverages(many, {0}) == {"4096": 4096 / 5000, "8192": 1.0, "all 10000": 1.0}
