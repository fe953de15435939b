"""`mtp-decode lab`: tables, the JSON document, the picture, and every kind of bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from decode import lab
from decode.lab import add_arguments
from decode.lab_picture import Exhibit, draw, readable
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.hub import save_heads
from mtp.initialise import new_heads
from mtp.rules import all_rules
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = ("--p", "0.1,0.2,0.3,0.4", "--q", "0.4,0.3,0.2,0.1")
RULES = ["residual", "resample from p", "resample from p, corrected", "scaled by 0.5", "match", "match, greedy draft"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    base = tiny_base("llama", folder)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=3), base), folder / "heads")
    few = torch.arange(0, VOCAB_SIZE, 2)
    options = HeadsOptions(draft_length=2, draft_vocab_size=len(few))
    save_heads(new_heads(options, base, few), folder / "few")
    return folder


def run(*args: object) -> None:
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    lab.run(parser.parse_args([str(arg) for arg in args]))


def document(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    run(*args, "--json")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_the_example_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    run(*EXAMPLE)
    out = " ".join(capsys.readouterr().out.split())
    assert "residual yes 0 0.6 .10 .20 .30 .40" in out
    assert "resample from p no 0.14 0.6 .14 .28 .32 .26" in out
    assert "resample from p, corrected yes 0 0.25" in out
    assert "2 0.9600 1.0300 +0.070" in out
    assert "at y = 3: 0.1 + 0.4 · 0.4 = 0.26, where p has 0.4" in out
    assert "A* = min q/p = 0.25" in out


def test_the_example_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, *EXAMPLE)
    assert [rule["name"] for rule in report["rules"]] == RULES
    assert [rule["exact"] for rule in report["rules"]] == [name != "resample from p" for name in RULES]
    assert report["rules"][1]["law"] == pytest.approx([0.14, 0.28, 0.32, 0.26])
    assert report["rules"][1]["total_variation"] == pytest.approx(0.14)
    assert report["q"] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [row["K"] for row in report["drafts"]] == [1, 2, 3, 4, 5]
    assert report["drafts"][1]["token"] == pytest.approx(0.96)
    assert all(row["block"] >= row["token"] - 1e-12 and row["bias"] < 1e-12 for row in report["drafts"])
    assert report["picture"] is None


def test_the_known_toy_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, "--p", "0.3333333,0.6666667", "--q", "0.6666667,0.3333333", "--scale", 0.25)
    assert report["drafts"][1]["token"] == pytest.approx(10 / 9, abs=1e-6)
    assert report["drafts"][1]["block"] == pytest.approx(11 / 9, abs=1e-6)
    assert report["rules"][3]["name"] == "scaled by 0.25"


def test_random_laws_follow_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (document(capsys, "--random", 12, "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert first["p"] != other["p"]
    assert [row["K"] for row in first["drafts"]] == [1, 2, 3, 4]  # 12^5 drafts are too many
    large = document(capsys, "--random", 5000)
    assert "p" not in large
    assert [row["K"] for row in large["drafts"]] == [1]


def test_a_real_base_and_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--heads", folder / "heads", "--prompt", "the user", "--max-new-tokens", 12, "--seed", 5)
    report, again = document(capsys, *args), document(capsys, *args)
    assert report == again
    assert 1 <= len(report["anchors"]) <= 12
    assert [row["K"] for row in report["drafts"]] == [1, 2, 3]
    accept = {rule["name"]: rule["p_accept"] for rule in report["rules"]}
    alphas = [anchor["alpha"] for anchor in report["anchors"]]
    assert accept["residual"] == pytest.approx(sum(alphas) / len(alphas))
    assert 0 < accept["match"] < accept["residual"] < 1
    assert report["drafts"][0]["token"] == pytest.approx(accept["residual"])
    assert report["drafts"][0]["block"] == pytest.approx(accept["residual"])
    assert report["drafts"][2]["token"] > report["drafts"][1]["token"] > report["drafts"][0]["token"]
    assert [rule["exact"] for rule in report["rules"]] == [name != "resample from p" for name in RULES]
    assert report["vocab_size"] == VOCAB_SIZE


def test_the_text_is_the_base_s_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other heads, with a draft vocabulary and another K, see the same text; and A* is 0 with half the vocabulary."""
    args = ("--prompt", "the user", "--max-new-tokens", 10, "--seed", 5, "--temperature", 0.8, "--top-p", 0.95)
    full, few = (document(capsys, "--heads", folder / name, *args) for name in ("heads", "few"))
    texts = [[anchor["token"] for anchor in report["anchors"]] for report in (full, few)]
    assert texts[0] == texts[1]
    assert [row["K"] for row in few["drafts"]] == [1, 2]
    assert few["rules"][2]["p_accept"] < 1e-3


def test_greedy_p_and_q_are_one_hot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = document(
        capsys, "--heads", folder / "heads", "--prompt", "a", "--no-chat", "--temperature", 0, "--max-new-tokens", 6
    )
    assert {anchor["alpha"] for anchor in report["anchors"]} <= {0.0, 1.0}
    assert len(report["anchors"]) <= 6


@pytest.mark.parametrize("name", ["toy", "large", "heads"])
def test_the_picture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    prompt = ("--prompt", "cost $5 or $6?", "--max-new-tokens", 6)
    args = {"toy": EXAMPLE, "large": ("--random", 40), "heads": ("--heads", folder / "heads", *prompt)}[name]
    run(*args, "--out", tmp_path / "lab.PNG")
    data = (tmp_path / "lab.PNG").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    assert len(data) < 200_000
    assert [path.name for path in tmp_path.iterdir()] == ["lab.PNG"]
    assert "lab.PNG" in capsys.readouterr().err


def test_a_picture_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lab.png"
    path.write_bytes(b"before")
    p, q = torch.tensor([0.4, 0.6], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    exhibit = Exhibit("", p, q, all_rules(p, q), [lab.Depth(1, 0.9, 0.9)])

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match=r"lab\.png cannot be written \(No space left"):
            draw(exhibit, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    draw(exhibit, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_bad_picture_name_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    for name, message in (
        ("lab.jpg", "ends in .png"),
        ("none/lab.png", "there is no folder"),
        ("d.png", "ends in .png"),
    ):
        (tmp_path / "d.png").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            run("--heads", tmp_path / "missing", "--prompt", "a", "--out", tmp_path / name)


def test_words_can_be_seen() -> None:
    assert readable(" the\n") == "␣the⏎"
    assert readable(readable("responsible for", 9), 9) == "responsi…"
    assert readable("日a\x00") == "□a□"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "found none"),
        (["--p", "0.5,0.5", "--q", "0.5,0.5", "--random", "3"], "--p and --q with --random"),
        (["--random", "3", "--heads", "x"], "--random with --heads"),
        (["--p", "0.5,0.5"], "--q is missing"),
        (["--q", "0.5,0.5"], "--p is missing"),
        (["--p", "0.5,0.5", "--q", "0.2,0.3,0.5"], "--p has 2 numbers and --q has 3"),
        (["--p", "0.5,half", "--q", "0.5,0.5"], "--p is '0.5,half'"),
        (["--p", "", "--q", "0.5,0.5"], "--p is ''"),
        (["--p", "0.5,0.6", "--q", "0.5,0.5"], "--p sums to 1.1"),
        (["--p", "0.5,0.5", "--q", "0,0"], "--q sums to 0"),
        (["--p", "0.5,0.5", "--q=-0.5,1.5"], "--q has -0.5 at place 1"),
        (["--p", "nan,0.5", "--q", "0.5,0.5"], "--p has nan at place 1"),
        (["--p", "1", "--q", "1"], "--p has 1 number"),
        ([*EXAMPLE, "--scale", "1.5"], "--scale is 1.5"),
        ([*EXAMPLE, "--seed", "1"], "--seed is 1, but it only applies"),
        ([*EXAMPLE, "--prompt", "a"], "--prompt is 'a', but it only applies to --heads"),
        ([*EXAMPLE, "--top-k", "3"], "--top-k is 3, but it only applies to --heads"),
        (["--random", "1"], "--random is 1; use"),
        (["--random", "1000000000000"], "--random is 1000000000000"),
        (["--random", "3", "--seed", "-1"], "--seed is -1"),
        (["--heads", "{}/heads"], "--prompt is missing"),
        (["--heads", "{}/missing", "--prompt", "a"], "missing"),
        (["--heads", "{}/heads", "--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["--heads", "{}/heads", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--heads", "{}/heads", "--prompt", "a", "--seed", "-1"], "--seed is -1"),
        (["--heads", "{}/heads", "--prompt", "hi " * CONTEXT], "give at least 1 and at most"),
        (["--heads", "{}/heads", "--prompt", "", "--no-chat"], "the prompt has 0 tokens"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        run(*[arg.replace("{}", str(folder)) for arg in args])
    assert message in str(error.value)
    assert capsys.readouterr().out == ""


def test_logits_that_are_no_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.HeadsDrafter, "draft", lambda self, k, previous: torch.full((1, VOCAB_SIZE), float("nan")))
    with pytest.raises(UserError, match="the heads returned NaN"):
        run("--heads", folder / "heads", "--prompt", "a")
