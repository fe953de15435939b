"""The dashboard as code: every panel draws what runs log, and saving it twice changes one view.

The runs are a tiny training and a tiny `bench`, recorded offline; W&B is a stand-in for it on 127.0.0.1.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml

from decode.cli import main as decode
from tests.train.runs import read_metrics, train
from tests.train.wandb_records import logged
from tests.wandb_server import KEY, Server, serving
from train.cli import main
from train.dashboard import COMPARED, COMPARISON, SECTIONS, Panel, panels, unknown
from train.dashboard_save import VIEW, build_workspace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a tiny run, with a bench of its heads beside it; W&B offline."""
    folder = tmp_path_factory.mktemp("dashboard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder / "bench"))
        (folder / "bench").mkdir()
        run = train(folder, run__wandb_project="mtp", trainer__max_steps=3)
        arguments = ["bench", "--heads", str(run / "heads"), "--prompts", str(folder / "prompts.jsonl"), "--limit", "1"]
        arguments += ["--against", "plain", "--max-new-tokens", "4", "--context", "8", "--compile", "off"]
        assert decode([*arguments, "--wandb", "mtp"]) == 0
        yield run


@pytest.fixture(scope="module")
def keys(run: Path) -> set[str]:
    """What the two have logged, by their own records on disk."""
    paths = [*run.glob("wandb/offline-*/*.wandb"), *run.parent.parent.glob("bench/wandb/offline-*/*.wandb")]
    assert len(paths) == 2
    return set().union(*map(logged, paths))


def test_every_panel_draws_what_is_logged(keys: set[str]) -> None:
    assert unknown(panels(), keys) == []
    assert unknown(COMPARISON, keys) == []
    titles = [panel.title for panel in panels()]
    assert len(set(titles)) == len(titles) >= 25
    assert [section.name for section in SECTIONS] == [
        "Acceptance length", "Acceptance per draft position", "Where drafts fail", "Speed", "Training health",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "made_up",
    [
        Panel("made up", ("val/acceptance",)),
        Panel("made up", ("val/alpha",)),
        Panel("made up", ("val/alphas/*",)),
        Panel("made up", ("val/loss",), x="steps"),
        Panel("made up", ("decode/failure",), "table"),
    ],
)
def test_a_made_up_panel_is_found(made_up: Panel, keys: set[str]) -> None:
    """The negative control."""
    assert len(unknown([*panels(), made_up], keys)) == 1
    assert unknown([made_up], keys)[0].startswith("made up: ")


def test_numbers_in_csv_are_those_in_wandb(run: Path, keys: set[str]) -> None:
    """Whoever has no account has every number that the dashboard draws of training."""
    csv = {key for row in read_metrics(run) for key in row} | {"trainer/global_step"}
    kinds = {"lines", "shares", "bars"}
    numbers = [panel for panel in panels() if panel.kind in kinds and panel.x == "trainer/global_step"]
    without = {metric.rsplit(": ", 1)[1] for metric in unknown(numbers, csv)}
    assert without == {
        "decode/committed_per_step", "bench/tok_per_s/mtp", "bench/tok_per_s/plain",
        *(m for panel in numbers for m in panel.metrics if m.startswith("spec_decode_")),
    }  # fmt: skip


def test_runs_are_compared_by_keys_of_the_configuration(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for dotted in COMPARED.values():
        found = config
        for name in dotted.split("."):
            found = found[name]
        assert found is not None


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["dashboard", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


@pytest.mark.parametrize("kind", ["workspace", "report"])
def test_a_dry_run_shows_what_would_be_saved(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs neither key nor network, and is the same each time."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    more = ["--report"] if kind == "report" else []
    arguments = ["--dry-run", "--entity", "me", "--project", "heads", *more]
    document = shown(capsys, *arguments)
    assert document == shown(capsys, *arguments)
    assert (document["kind"], document["entity"], document["project"]) == (kind, "me", "heads")
    told = [panel for section in document["sections"] for panel in section["panels"]]
    spec = json.dumps(document["spec"], ensure_ascii=False)
    for panel in told:
        assert panel["kind"] == "table" or panel["title"] in spec
        assert all(metric.removesuffix("*") in spec for metric in panel["metrics"])
    assert main(["dashboard", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"would save the {kind} ")
    assert all(panel["title"] in out for panel in told)
    if kind == "report":
        assert all(f"{key.split('.')[0]}.value.{key.split('.', 1)[1]}" in spec for key in COMPARED.values())


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        wandb.teardown()  # it would stay with the server that it met first
        patch.setenv("WANDB_BASE_URL", server.url)
        yield server
        wandb.teardown()


@pytest.fixture
def server(one_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    one_server.views = {}
    return one_server


def test_saving_twice_changes_one_view_and_keeps_what_people_set(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shown(capsys, "--project", "mtp")
    assert first["entity"] == "tester", "whose key it is"
    assert first["url"] == f"{server.url}/tester/mtp?nw={VIEW}"
    (view,) = server.views.values()
    assert json.loads(view["spec"]) == json.loads(
        build_workspace("tester", "mtp")._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    )
    changed = json.loads(view["spec"])
    changed["section"]["panelBankConfig"]["sections"].pop()
    changed["section"]["runSets"][0]["search"]["query"] = "recurrent"
    view["spec"] = json.dumps(changed)
    second = shown(capsys, "--project", "mtp", "--entity", "tester")
    assert second == first
    (again,) = server.views.values()
    assert again["id"] == view["id"]
    spec = json.loads(again["spec"])["section"]
    assert [section["name"] for section in spec["panelBankConfig"]["sections"]] == [s.name for s in SECTIONS]
    assert spec["runSets"][0]["search"]["query"] == "recurrent"


def test_saving_the_report_twice_changes_one_report(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--project", "mtp", "--entity", "tester", "--report"]
    first = shown(capsys, *arguments)
    assert first["url"].startswith(f"{server.url}/tester/mtp/reports/")
    assert shown(capsys, *arguments) == first
    (report,) = server.views.values()
    assert report["type"] == "runs"
    assert all(title in report["spec"] for title in COMPARED)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["dashboard", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert KEY not in error
    return error


def test_what_cannot_be_saved_is_told(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ([], ["--report"]):
        error = refused(capsys, "--project", "nowhere", "--entity", "tester", *kind)
        assert "--project is nowhere" in error
        assert "--run.wandb_project nowhere creates it" in error
    assert not server.views, "a report would have made the project"
    server.mode = "401"
    assert "wandb login --relogin" in refused(capsys, "--project", "mtp", "--entity", "tester")
    server.mode = "ok"
    assert "without slashes" in refused(capsys, "--project", "a/b")
    assert "--entity is ''" in refused(capsys, "--entity", "")
    monkeypatch.delenv("WANDB_API_KEY")
    assert "`wandb login`" in refused(capsys, "--project", "mtp")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert "pip install wandb-workspaces" in refused(capsys, "--dry-run")
