"""What training records in wandb is all on disk, in the run's own folder; and it goes on whatever becomes of wandb."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from decode import wandb_run
from mtp.hub import load_heads
from tests.train.runs import job, read_metrics, train
from tests.train.wandb_records import history
from tests.train.wandb_records import records as read
from tests.wandb_server import KEY, Server, serving
from train.cli import main
from train.module import HeadsModule

TABLES = ("decode/failures", "decode/contexts", "decode/categories")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", "")
        return train(tmp_path_factory.mktemp("offline"), run__wandb_project="mtp", trainer__max_steps=6)


@pytest.fixture(scope="module")
def records(run: Path) -> Path:
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    return path


def at(rows: list[dict[str, Any]], key: str) -> dict[int, Any]:
    """Values of a key by optimiser step."""
    return {int(row["trainer/global_step"]): row[key] for row in rows if key in row}


def test_every_number_is_in_the_offline_records(run: Path, records: Path) -> None:
    rows, csv = history(records), read_metrics(run)
    keys = {key for row in csv for key, value in row.items() if value} - {"step", "epoch"}
    assert {"train/loss", "val/alpha/1", "decode/conditional/2", "decode/share/verify", "decode/committed/3"} <= keys
    for key in keys:
        expected = {int(row["step"]): float(row[key]) for row in csv if row.get(key)}
        assert at(rows, key) == pytest.approx(expected), key


def test_tables_pages_and_histograms_are_there_with_their_files(run: Path, records: Path) -> None:
    rows = history(records)
    files = records.parent / "files"
    for step in (3, 6):
        counts, edges = (at(rows, f"decode/committed_per_step/{name}")[step] for name in ("values", "bins"))
        assert len(edges) == len(counts) + 1 == 4
        assert sum(counts) > 0
        for name in (*TABLES, "decode/samples"):
            path = files / at(rows, f"{name}/path")[step]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == at(rows, f"{name}/sha256")[step]
            assert path.stat().st_size == at(rows, f"{name}/size")[step]
    page = (files / at(rows, "decode/samples/path")[6]).read_text(encoding="utf-8")
    assert page.count("<tr>") == 1 + 2, "a row for each prompt"
    assert '<span class="recovered" title=' in page
    table = json.loads((files / at(rows, "decode/categories/path")[6]).read_text())
    assert sum(row[table["columns"].index("texts")] for row in table["data"]) == 2


def test_what_is_to_be_sent_lies_in_the_folder_of_the_run(run: Path, records: Path) -> None:
    """wandb sends a table from a copy elsewhere, by default in the home of the user."""
    found = []
    for record in read(records):
        if record.WhichOneof("record_type") == "artifact":
            found += [Path(entry.local_path) for entry in record.artifact.manifest.contents]
    assert len(found) == len(TABLES) * 2
    for path in found:
        assert path.is_file()
        assert run.resolve() in path.resolve().parents


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    wandb.teardown()  # it would stay with the server that it met first
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 2.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server
    wandb.teardown()


def test_an_offline_run_is_sent_later_with_all_its_media(run: Path, records: Path, server: Server) -> None:
    """By wandb's own command, to a stand-in for its server."""
    command = [sys.executable, "-m", "wandb", "sync", str(records.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=run)
    assert done.returncode == 0, done.stderr
    media = {path.relative_to(records.parent / "files") for path in records.parent.glob("files/media/**/*.*")}
    sent = {path.removeprefix("/upload/") for path, _ in server.asked if path.startswith("/upload/media/")}
    assert sent == {str(path) for path in media}
    assert {name.split("/")[1] for name in sent} == {"html", "table"}
    assert len(server.history) == len(history(records))


def test_training_goes_on_when_the_key_expires(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a run; how a run begins without wandb is tested where runs begin (`test_wandb_run`)."""
    begin = HeadsModule.on_train_start

    def and_refuse(module: HeadsModule) -> None:
        begin(module)
        server.mode = "401"

    monkeypatch.setattr(HeadsModule, "on_train_start", and_refuse)
    assert main(["--config", str(job(tmp_path, run__wandb_project="mtp", trainer__max_steps=3))]) == 0
    run = tmp_path / "runs" / "tiny"
    load_heads(run / "heads")
    out, err = capfd.readouterr()
    (path,) = run.glob("wandb/*run-*/*.wandb")
    assert set(at(history(path), "train/loss")) == {1, 2, 3}
    for name in (*TABLES, "decode/samples"):
        media = path.parent / "files" / at(history(path), f"{name}/path")[3]
        assert hashlib.sha256(media.read_bytes()).hexdigest() == at(history(path), f"{name}/sha256")[3]
    (line,) = [line for line in err.splitlines() if line.startswith(f"wandb: {server.url}")]
    assert line.endswith(f"wandb sync --include-online {path.parent}")
    assert KEY not in out + err
    for file in run.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
