"""A run's page: that it says what the records say, of finished, killed, resumed and old runs, and stops no training."""

import json
import math
import shlex
from pathlib import Path

import pytest

from decode.cli import main as decode_main
from decode.trace import ORIGINS, histogram
from tests.pages import Seen, look
from tests.train.run_folders import TEXTS, metrics_at, write_metrics, write_run
from tests.train.runs import read_metrics, train
from train import callbacks, run_page
from train.cli import main
from train.history import read_run
from train.run_page import write_page
from train.samples import read_samples

SECTIONS = [
    "Acceptance length",
    "Acceptance per draft position",
    "Where drafts fail",
    "Speed",
    "Training health",
    "Every metric",
]


def page_of(folder: Path) -> Seen:
    return look(write_page(folder, pictures=False))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "fast heads"
    folder.mkdir()
    return write_run(folder)


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_every_number_of_the_records_is_in_the_page(run: Path) -> None:
    seen = page_of(run)
    assert [text for text in seen.texts["h2"] if text in SECTIONS] == SECTIONS
    assert seen.loads == []
    rows = {str(row[0]): row for row in seen.numbers["Metrics"][1:]}
    assert rows.keys() == metrics_at(10).keys()
    for key, row in rows.items():
        best = "" if key.startswith("train/") else metrics_at(20)[key]
        assert row == [key, metrics_at(50)[key], 50.0, best, 5.0]
    assert [row[1] for row in seen.numbers["Cost per row"][1:]] == [
        metrics_at(step)["decode/verify_ms_per_row"] for step in range(10, 60, 10)
    ]
    assert seen.numbers["Shares of a step"][0] == ["optimiser step", "verify", "draft", "rule", "other"]
    lengths = seen.numbers["Acceptance length"]
    assert lengths[0] == ["optimiser step", "implied", "decoded", "implied, greedy"]
    named = ["val/accept_len_implied", "decode/accept_len", "val/accept_len_implied_greedy"]
    assert lengths[1:] == [[step, *(metrics_at(step)[key] for key in named)] for step in range(10, 60, 10)]
    for title, key in {
        "α, on validation data": "val/alpha",
        "α, decoded": "decode/alpha",
        "Conditional, decoded": "decode/conditional",
        "Cumulative, implied": "val/cumulative",
        "Cumulative, decoded": "decode/accepted",
        "Loss per position, validation": "val/loss",
        "Gradient norm per position": "train/grad_norm",
    }.items():
        expected = [[step, *(metrics_at(step)[f"{key}/{k}"] for k in (1, 2, 3))] for step in range(10, 60, 10)]
        assert seen.numbers[title][1:] == expected, title


def test_another_number_in_the_records_is_another_page(run: Path) -> None:
    before = page_of(run)
    rows = {step: metrics_at(step) for step in range(10, 60, 10)}
    rows[30]["val/alpha/2"] += 1e-9
    write_metrics(run, rows)
    after = page_of(run)
    differ = [title for title, table in before.numbers.items() if table != after.numbers[title]]
    assert differ == ["α, on validation data"]
    assert after.numbers[differ[0]][3][2] == rows[30]["val/alpha/2"]


def test_pictures_hold_the_charts_of_the_page(run: Path) -> None:
    write_page(run)
    drawn = sorted(path.name for path in (run / "plots").iterdir())
    assert drawn == [
        "acceptance-length.png",
        "acceptance-per-draft-position.png",
        "speed.png",
        "training-health.png",
        "where-drafts-fail.png",
    ]
    first = (run / "plots" / drawn[0]).read_bytes()
    rows = {step: metrics_at(step) for step in range(10, 60, 10)}
    rows[30]["val/accept_len_implied"] += 0.5
    write_metrics(run, rows)
    write_page(run)
    assert (run / "plots" / drawn[0]).read_bytes() != first
    assert not list(run.glob("**/*.part"))


def test_texts_and_failures_come_from_the_samples(run: Path) -> None:
    seen = page_of(run)
    pairs = seen.numbers["Rejected drafts and recovered tokens"][1:]
    assert len(pairs) == 5
    assert pairs[0] == ["A", "The", 1.0, "1", "explain", "(start)"]
    assert ["&amp;", "<script>alert(1)</script>"] in [row[:2] for row in pairs]
    assert [row[0] for row in seen.numbers["By category of prompt"][1:]] == ["explain", "story"]
    assert seen.numbers["Committed tokens per step"][1:] == [["1 token", 4.0], ["2 tokens", 4.0], ["3 tokens", 1.0],
                                                             ["4 tokens", 0.0]]  # fmt: skip
    classes = {given.get("class") for tag, given in seen.tags if tag == "span"}
    assert classes >= set(ORIGINS)
    assert any(text.prompt in seen.texts["p"] for text in TEXTS)
    shares = dict(seen.numbers["What a step is made of"][1:])
    assert shares["verify (base)"] == pytest.approx(1.5 / 1.85)


# ---- runs of all kinds -----------------------------------------------------------------------------------------------


def test_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    told = "".join(page_of(write_run(tmp_path, finished=False)).texts["p"])
    assert "Not finished" in told
    assert "step 50" in told


def test_one_validation(tmp_path: Path) -> None:
    seen = page_of(write_run(tmp_path, steps=range(20, 21)))
    assert seen.numbers["Acceptance length"][1:] == [[20, *(metrics_at(20)[key] for key in (
        "val/accept_len_implied", "decode/accept_len", "val/accept_len_implied_greedy"))]]  # fmt: skip


def test_numbers_that_are_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path, finished=False)
    rows = {step: metrics_at(step) for step in range(10, 60, 10)}
    rows[30]["val/loss"] = math.nan
    rows[40]["train/loss"] = math.inf
    write_metrics(folder, rows)
    seen = page_of(folder)
    told = dict(zip([row[0] for row in seen.numbers["Loss"]], seen.numbers["Loss"], strict=True))
    assert math.isnan(float(told[30.0][2]))
    assert told[40.0][1] == math.inf
    only = {20: {"val/accept_len_implied": math.nan, "val/alpha/1": math.nan}}
    write_metrics(folder, only)
    assert "Acceptance length" not in page_of(folder).numbers


def test_a_run_without_any_record_yet(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": ["mtp-train"]}))
    seen = page_of(tmp_path)
    assert "Nothing was recorded yet." in seen.texts["p"]
    assert not [tag for tag, _ in seen.tags if tag == "svg"]


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """Without samples, without `best`, and with a metric that nobody knows any more."""
    folder = write_run(tmp_path)
    (folder / "samples.json").unlink()
    record = json.loads((folder / "run.json").read_text())
    del record["best"]
    (folder / "run.json").write_text(json.dumps(record))
    rows = {step: metrics_at(step) | {"old/metric": 7.5} for step in range(10, 60, 10)}
    write_metrics(folder, rows)
    seen = page_of(folder)
    assert any("No decoded texts were kept" in text for text in seen.texts["p"])
    assert ["old/metric", 7.5, 50.0, "", 5.0] in seen.numbers["Metrics"]
    assert "best: step 20" in seen.texts["text"]  # found in the records


@pytest.mark.parametrize(
    "broken", ["{", "[]", '{"step": 1, "stats": {}, "texts": [{"prompt": 3}]}', "null", "\x00\xff"]
)
def test_broken_samples_are_none(run: Path, broken: str) -> None:
    (run / "samples.json").write_bytes(broken.encode("latin-1"))
    (run / "heads" / "config.json").write_text(broken[:1])
    assert read_samples(run) is None
    assert page_of(run).numbers["Metrics"]


def test_a_resumed_run_is_one_run(run: Path) -> None:
    later = {step: metrics_at(step) | {"val/loss": 0.5} for step in (50, 60)}
    write_metrics(run, later, version=1)
    write_metrics(run, {70: metrics_at(70)}, version=10)
    found = read_run(run).metrics["val/loss"]
    assert [step for step, _ in found] == [10, 20, 30, 40, 50, 60, 70]
    assert dict(found)[50] == 0.5  # what was done again holds


def test_a_run_that_was_resumed_and_cut_is_not_finished(run: Path) -> None:
    assert read_run(run).finished
    write_metrics(run, {60: metrics_at(60)}, version=1)  # run.json is of the sitting that came to its end
    assert not read_run(run).finished


def test_a_file_that_is_being_written(run: Path) -> None:
    path = run / "csv" / "version_0" / "metrics.csv"
    path.write_text(path.read_text()[:-40])
    assert page_of(run).numbers["Metrics"]
    path.write_text(path.read_text() + "\n1,2,x,,,\n" + "\0" * 9)
    assert page_of(run).numbers["Metrics"]


def test_a_long_run_is_thinned_and_keeps_its_spike(tmp_path: Path) -> None:
    rows = {step: {"train/grad_norm": 1.0 + (step == 4321)} for step in range(1, 10_000)}
    write_metrics(tmp_path, rows)
    seen = page_of(tmp_path)
    assert len(seen.numbers["Gradient norm"]) < 450
    assert [4321.0, 2.0] in seen.numbers["Gradient norm"]
    assert (tmp_path / "report.html").stat().st_size < 200_000


# ---- through the command line ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("page"))


def test_training_leaves_a_page_of_what_it_recorded(trained: Path) -> None:
    seen, rows = look(trained / "report.html"), read_metrics(trained)
    decoded = [[float(row["step"]), float(row["decode/accept_len"])] for row in rows if row["decode/accept_len"]]
    assert [[row[0], row[2]] for row in seen.numbers["Acceptance length"][1:]] == decoded
    assert len(decoded) == 2
    assert (trained / "plots" / "acceptance-length.png").is_file()
    assert "Not finished" not in "".join(seen.texts["p"])
    samples = read_samples(trained)
    assert samples is not None
    best = json.loads((trained / "run.json").read_text())["best"]
    assert samples.step == best["step"]
    assert samples.stats["accept_len"] == best["decode/accept_len"]
    assert len(samples.texts) == 2
    assert sum(len(text.tokens) for text in samples.texts) == samples.stats["committed"]
    counts = histogram(samples.texts)
    assert counts == samples.stats["histogram"][: len(counts)]


def test_the_page_is_made_again_from_the_folder(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "report.html").read_text()
    (trained / "report.html").unlink()
    assert main(["report", str(trained)]) == 0
    assert capsys.readouterr().out.strip() == f"report: {trained / 'report.html'}"
    assert (trained / "report.html").read_text() == before


def test_report_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert main(["report", str(place)]) == 2
        assert str(place) in capsys.readouterr().err


def test_a_page_that_cannot_be_written_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path, pictures: bool = True) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(callbacks, "write_page", fail)
    folder = train(tmp_path)
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("warning: report.html could not be written") == 1
    assert "No space left on device" in told
    assert (folder / "heads" / "config.json").is_file()
    assert not (folder / "report.html").exists()


def test_the_commands_in_the_page_are_commands(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their options exist, and a folder's space is quoted."""
    page = run_page.run_page(read_run(run))
    commands = [shlex.split(command) for _, command in page.commands]
    assert [command[0] for command in commands] == ["mtp-train", "mtp-decode", "mtp-decode", "mtp-train"]
    assert all(str(run / "heads") in command for command in commands[1:3])
    assert main(commands[-1][1:]) == 0
    for command in commands[1:3]:
        assert decode_main([command[1], "--help"]) == 0
        known = capsys.readouterr().out
        assert all(f"{word} " in known for word in command if word.startswith("--"))
