"""`mtp-decode bench --report`: a page and a picture that say what the report says."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.bench_page import bench_page
from decode.cli import main
from decode.page import render
from mtp.config import HeadsOptions
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.pages import Seen, look
from tests.tiny import tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    base = tiny_base("llama", folder)
    save_heads(new_heads(HeadsOptions(kind="medusa", draft_length=2), base), folder / "heads")
    prompts = [{"prompt": f"what is {i}?", "category": "story" if i % 2 else "letter"} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def run_bench(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    given = ["--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "8"]
    assert main(["bench", *given, "--against", "plain", "--json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_the_page_says_what_the_report_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "a page.html"
    report = run_bench(folder, capsys, "--report", str(path), "--temperature", "1")
    seen, ours = look(path), report["results"][0]
    assert seen.loads == []
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rates = {str(row[0]): row[1] for row in seen.numbers["Tokens per second"][1:]}
    assert rates == {side["name"]: side["tok_per_s"] for side in report["results"]}
    lengths = {str(row[0]): row[1] for row in seen.numbers["Acceptance length"][1:]}
    assert lengths == {"all prompts": ours["accept_len"], **ours["accept_len_by_category"]}
    kept = {(row[0], row[1]): row[2] for row in seen.numbers["Drafts kept"][1:]}
    for name, values in (("α", ours["alpha"]), ("cumulative", ours["accepted_per_position"])):
        assert [kept[f"draft {k}", name] for k in (1, 2)] == values
    assert kept["draft 1", "conditional"] == kept["draft 1", "cumulative"]
    assert [row[1] for row in seen.numbers["Cost per row"][1:]] == [1e3 * s for s in report["costs"]["forward_seconds"]]
    assert [row[1] for row in seen.numbers["Speed-up by K"][1:]] == report["cost_model"]["speed_up"]
    counts = [float(row[1]) for row in seen.numbers["Committed tokens per step"][1:]]
    assert sum(counts) == ours["steps"]
    assert sum(size * count for size, count in enumerate(counts, 1)) == ours["tokens"]  # the warm-up is not in it
    assert {str(row[0]) for row in seen.numbers["By category of prompt"][1:]} == {"story", "letter"}
    command = next(text for text in seen.texts["code"] if text.startswith("mtp-decode bench"))
    assert f"--report '{path}'" in command


def test_another_report_is_another_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_bench(folder, capsys)
    before = Seen(render(bench_page(report, [])))
    report["results"][1]["tok_per_s"] += 1
    after = Seen(render(bench_page(report, [])))
    assert [name for name in before.numbers if before.numbers[name] != after.numbers[name]] == [
        "Tokens per second",
        "Sides",
    ]


def test_pages_without_drafts_and_without_a_model_of_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_bench(folder, capsys, "--report", str(folder / "other.html"), "--draft-length", "0")
    seen = look(folder / "other.html")
    assert "Nothing was drafted." in seen.texts["p"]
    assert "Speed-up by K" not in seen.numbers
    lossy = Seen(render(bench_page(report | {"lossless": False, "heads": None}, [])))
    assert any("does not keep the base's distribution" in text for text in lossy.texts["p"])


@pytest.mark.parametrize("name", ["page.txt", "nowhere/page.html", "heads"])
def test_places_that_are_refused_at_once(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    given = ["--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl")]
    assert main(["bench", *given, "--report", str(folder / name)]) == 2
    assert "--report is" in capsys.readouterr().err


def test_a_plot_does_not_take_the_place_of_the_pages_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl"), "--against", "plain"]
    files = ["--report", str(folder / "same.html"), "--plot", str(folder / "same.png")]
    assert main(["bench", *given, *files]) == 2
    assert "where --report puts its own charts" in capsys.readouterr().err
