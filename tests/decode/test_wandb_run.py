"""A run that is recorded survives whatever becomes of wandb: no key, a refused one, nobody there, an outage, a crash.

wandb's own client talks to a stand-in for its server on 127.0.0.1.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from decode import wandb_run
from decode.wandb_run import WandbRun, start_run, wandb_mode
from tests.train.wandb_records import history
from tests.wandb_server import KEY, Server, serving


def start(folder: Path, environ: dict[str, str], said: list[str]) -> WandbRun:
    run = start_run("mtp", "a-run", folder, {"lr": 0.1}, environ, said.append, "train")
    assert run is not None
    return run


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    """One for all tests: a process of wandb's talks to the server that it met first."""
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        wandb.teardown()  # that of another test's, which has met another
        patch.setenv("WANDB_BASE_URL", server.url)
        yield server
        wandb.teardown()


@pytest.fixture
def server(one_server: Server) -> Server:
    one_server.mode, one_server.history = "ok", []
    return one_server


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A machine with a key."""
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 2.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return {"WANDB_API_KEY": KEY}


def rows(run: WandbRun) -> list[dict[str, object]]:
    (path,) = run.folder.glob("*.wandb")
    return history(path)


def without_key(folder: Path) -> None:
    """No file that a run has left, and nothing in its name, tells the key."""
    for path in folder.rglob("*"):
        assert KEY not in path.name
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_online_only_where_nobody_is_asked(tmp_path: Path) -> None:
    nobody = {"NETRC": str(tmp_path / "netrc")}
    assert wandb_mode(nobody) == "offline"
    assert wandb_mode({**nobody, "WANDB_API_KEY": KEY}) == "online"
    assert wandb_mode({**nobody, "WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}) == "offline"
    assert wandb_mode({**nobody, "WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}) == "disabled"
    (tmp_path / "netrc").write_text(f"machine wandb.here login user password {KEY}\n")
    assert wandb_mode(nobody) == "offline"
    assert wandb_mode({**nobody, "WANDB_BASE_URL": "https://wandb.here/x"}) == "online"
    (tmp_path / "netrc").write_text("machine machine machine")
    assert wandb_mode({**nobody, "WANDB_BASE_URL": "https://wandb.here/x"}) == "offline"


def test_a_disabled_wandb_records_nothing(tmp_path: Path) -> None:
    environ = {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}
    assert start_run("mtp", "a-run", tmp_path, {}, environ, pytest.fail, "train") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["401", "silent"])
def test_a_run_that_cannot_go_online_is_recorded_offline(
    mode: str, server: Server, tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    server.mode = mode
    if mode == "silent":
        monkeypatch.setattr(wandb_run, "INIT_SECONDS", 2.0)
    began = time.monotonic()
    run = start(tmp_path, environ, said)
    assert time.monotonic() - began < 60
    assert len(said) == 1
    assert said[0].startswith("warning: wandb cannot be used now")
    assert ("not logged in" in said[0]) == (mode == "401"), "the reason is told"
    assert "wandb login --relogin" in said[0]
    assert f"wandb sync {run.folder}" in said[0]
    run.log({"loss": 1.5})
    run.finish()
    assert [row["loss"] for row in rows(run)] == [1.5]
    assert said[1] == f"wandb: the records are on disk; send them with: wandb sync {run.folder}"
    left = {path.resolve() for path in (tmp_path / "wandb").glob("*run-*")}
    assert left == {run.folder.resolve()}, "of the attempt nothing is left that somebody could send"
    without_key(tmp_path)


def test_an_outage_in_the_middle_loses_nothing(server: Server, tmp_path: Path, environ: dict[str, str]) -> None:
    """Nobody waits for wandb, and what it did not take is sent later by the command that the run has told."""
    said: list[str] = []
    run = start(tmp_path, environ, said)
    run.log({"loss": 3.0})
    server.mode = "closed"
    began = time.monotonic()
    for step in range(100):
        run.log({"loss": float(step)})
    assert time.monotonic() - began < 5
    began = time.monotonic()
    run.finish()
    assert time.monotonic() - began < 20
    logged = [3.0, *map(float, range(100))]
    assert [row["loss"] for row in rows(run)] == logged
    assert "did not take all records" in said[0]
    without_key(tmp_path)
    server.mode, server.history = "ok", []
    sync(said[-1].split("with: ")[1], tmp_path)
    assert [row["loss"] for row in server.history] == logged


def sync(command: str, folder: Path) -> None:
    """What the message says to do, by wandb's own command."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments], capture_output=True, text=True, timeout=120, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_went_well_says_where_it_is(server: Server, tmp_path: Path, environ: dict[str, str]) -> None:
    said: list[str] = []
    run = start(tmp_path, environ, said)
    run.log({"loss": 3.0})
    run.finish()
    assert [row["loss"] for row in server.history] == [3.0]
    (line,) = said
    assert line.startswith(f"wandb: {server.url}/tester/mtp/runs/")
    without_key(tmp_path)


def test_the_run_goes_on_when_wandb_itself_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may be killed for memory; calls then end in errors of the connection to it."""
    said: list[str] = []
    run = start(tmp_path, {"WANDB_MODE": "offline"}, said)
    run.log({"loss": 1.0})
    log = run.run.log

    def broken(*_: object, **__: object) -> None:
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(run.run, "log", broken)
    run.log({"loss": 2.0})
    monkeypatch.setattr(run.run, "log", log)
    run.log({"loss": 3.0})
    assert len(said) == 1, "one warning, and no further attempt"
    assert "stopped recording (Connection lost)" in said[0]
    run.finish()
    run.run.finish()
    assert [row["loss"] for row in rows(run)] == [1.0]
