"""`mtp-decode bench`: whose turn it is, ratios in pairs, where a step's time goes, the JSON, the table, the picture."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import bench_picture, costs, png
from decode.bench import bench
from decode.bench_picture import draw
from decode.chain import Chain, draft_chain
from decode.cli import main
from decode.decoder import Decoder
from decode.report import Screen, show_bench
from decode.request import Request
from decode.rivals import LOOKUP_TOKENS, transformers_runner
from decode.sides import Runner, Side, Spent, Trial, in_turns, paired, spread, take_turns
from decode.stats import DecodeStats
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.tiny import tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- turns and ratios --------------------------------------------------------------------------------------------


def test_every_side_takes_its_turn_and_nobody_is_always_first() -> None:
    order: list[tuple[str, int, int]] = []

    def runner(name: str) -> Runner:
        def run(trials: Sequence[Trial]) -> tuple[int, Sequence[DecodeStats]]:
            order.extend((name, trial.ids[0], trial.max_new_tokens) for trial in trials)
            return 1, ()

        return run

    sides = [Side(name, runner(name)) for name in "abc"]
    trials, calls = [Trial([number], 5 + number) for number in range(4)], list[int]()
    assert take_turns(sides, in_turns(trials, 1), lambda: calls.append(len(order))) == 4
    assert "".join(name for name, _, _ in order) == "abc" + "bca" + "cab" + "abc"
    assert [prompt for _, prompt, _ in order] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert all(budget == 5 + prompt for _, prompt, budget in order)
    assert calls == [3, 6, 9, 12]
    order.clear(), calls.clear()
    assert take_turns(sides, in_turns(trials, 3), lambda: calls.append(len(order)), stop=lambda: True) == 3
    assert [prompt for _, prompt, _ in order] == [0, 1, 2] * 3
    assert calls == [9, 9, 9]


def timed(name: str, turns: list[tuple[int, float]], stats: DecodeStats | None = None) -> Side:
    """A side that generates so many tokens in so many seconds, by a clock of its own."""
    now, left = [0.0], iter(turns)

    def run(trials: Sequence[Trial]) -> tuple[int, Sequence[DecodeStats]]:
        tokens, seconds = next(left)
        now[0] += seconds
        return tokens, [stats] if stats else []

    return Side(name, run, clock=lambda: now[0])


def test_ratios_are_of_pairs_on_the_same_prompt() -> None:
    """A machine that is slow for a while is slow for both: the ratio of each pair tells, that of the medians less."""
    ours = timed("mtp", [(10, 1.0), (10, 10.0), (10, 5.0)])
    other = timed("plain", [(10, 2.0), (10, 15.0), (10, 5.0)])
    take_turns([ours, other], [[Trial([0], 10)]] * 3)
    assert ours.rates == pytest.approx([10.0, 1.0, 2.0])
    assert other.rates == pytest.approx([5.0, 10 / 15, 2.0])
    assert paired(ours, other) == pytest.approx([2.0, 1.5, 1.0])
    assert spread(paired(ours, other)) == pytest.approx({"median": 1.5, "min": 1.0, "max": 2.0})
    assert ours.tok_per_s / other.tok_per_s == pytest.approx(22 / 16)  # of totals: another number
    report = ours.to_json()
    assert report["tok_per_s"] == pytest.approx(30 / 16)
    assert report["tok_per_s_spread"] == pytest.approx({"median": 2.0, "min": 1.0, "max": 10.0})
    assert (report["tokens"], report["wall_seconds"]) == (30, pytest.approx(16.0))


def test_what_of_a_step_is_not_the_base_s_forward() -> None:
    stats = DecodeStats("block", 2)
    stats.steps = 4
    stats.seconds |= {"prefill": 2.0, "draft": 1.0, "verify": 4.0, "rule": 0.5, "other": 0.1}
    side = timed("mtp", [(9, 10.0)], stats)
    side.measure([Trial([0], 9)])
    spent = Spent.by(side)
    assert spent.seconds["other"] == pytest.approx(2.5)  # with what no phase accounts for
    assert (spent.stepping, spent.step, spent.rest) == pytest.approx((8.0, 2.0, 0.75))
    report = side.to_json()
    assert report["overhead_share"] == pytest.approx(0.5)
    assert report["rule_share"] == pytest.approx(0.0625)
    assert report["step_seconds"] == pytest.approx(2.0)


# ---- the sides of transformers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return tiny_base("llama", tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_drafts_and_says_so_to_generate(
    base: FrozenBase, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    texts: dict[int | None, list[int]] = {}
    rows: dict[int | None, list[int]] = {}  # of each forward
    generate = base.model.generate

    def heard(tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        lookup = base.model.generation_config.prompt_lookup_num_tokens
        seen = rows.setdefault(lookup, [])
        hook = base.model.register_forward_pre_hook(
            lambda _, positional, named: seen.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        output: torch.Tensor = generate(tokens, **options)
        hook.remove()
        texts[lookup] = output[0].tolist()
        return output

    monkeypatch.setattr(base.model, "generate", heard)
    prompt, before = [5, 6, 7, 8] * 6, base.model.generation_config
    for lookup in (None, LOOKUP_TOKENS):
        run = transformers_runner(base, Request(temperature=temperature, seed=3), lookup)
        count, stats = run([Trial(prompt, 40)])
        assert stats == ()
        assert count == len(texts[lookup]) - len(prompt) <= 40
    assert base.model.generation_config is before
    assert rows[None] == [len(prompt)] + [1] * (len(texts[None]) - len(prompt) - 1)
    assert rows[LOOKUP_TOKENS][0] == len(prompt) + LOOKUP_TOKENS  # drafts from the first forward on
    if not temperature:
        assert texts[None] == texts[LOOKUP_TOKENS]
        assert len(rows[LOOKUP_TOKENS]) < len(rows[None])


def test_a_batch_of_generate_writes_the_texts_of_each_alone(base: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts each up to its own end: here the token that the first text writes third."""
    prompts, generate, texts = [[5, 6, 7, 8], [9], [3, 4]], base.model.generate, list[list[int]]()

    def heard(tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = generate(tokens, **options)
        texts.extend(output[:, tokens.shape[1] :].tolist())
        return output

    monkeypatch.setattr(base.model, "generate", heard)
    monkeypatch.setattr(type(base), "eos_token_ids", ())
    alone = transformers_runner(base, Request(), None)
    for ids in prompts:
        alone([Trial(ids, 8)])
    assert [len(text) for text in texts] == [8] * 3
    expected, end = list(texts), texts[0][2]
    counts = [text.index(end) + 1 if end in text else 8 for text in expected]
    assert counts[0] < 8
    texts.clear()
    monkeypatch.setattr(type(base), "eos_token_ids", (end,))
    trials = [Trial(ids, most) for ids, most in zip(prompts, (8, 8, 2), strict=True)]
    tokens, _ = transformers_runner(base, Request(), None)(trials)
    for text, longer, count in zip(texts, expected, counts, strict=True):
        assert text[:count] == longer[:count]
    assert tokens == counts[0] + counts[1] + min(2, counts[2])


def test_lookup_is_refused_what_transformers_is_not_given(base: FrozenBase) -> None:
    with pytest.raises(UserError, match="--presence-penalty is 0.5, which transformers is not given here"):
        transformers_runner(base, Request(presence_penalty=0.5), LOOKUP_TOKENS)


# ---- the report --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-cli")
    base = tiny_base("llama", folder)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=3), base), folder / "heads")
    lines = [{"prompt": "the user", "category": "a"}, {"prompt": "what is it?", "category": "b"}, {"prompt": "hi"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def run(folder: Path, *args: object) -> int:
    paths = ["--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl")]
    return main(["bench", *paths, "--max-new-tokens", "8", *map(str, args)])


def document(folder: Path, capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert run(folder, *args, "--json") == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return parsed


@pytest.mark.parametrize("flags", [[], ["--temperature", 1], ["--temperature", 1, "--reproducible"]])
def test_the_document_is_complete(folder: Path, capsys: pytest.CaptureFixture[str], flags: list[object]) -> None:
    report = document(folder, capsys, "--against", "plain,transformers,lookup", *flags)
    names = [side["name"] for side in report["results"]]
    assert names == ["mtp", "plain", "transformers", "lookup"]
    assert report["lookup_tokens"] == LOOKUP_TOKENS
    for side in report["results"]:
        rates = side["tok_per_s_by_turn"]
        assert len(rates) == 3
        assert side["tok_per_s_spread"] == {"median": sorted(rates)[1], "min": min(rates), "max": max(rates)}
        assert min(rates) <= side["tok_per_s"] <= max(rates)
    ours = report["results"][0]
    for side in report["results"][1:]:
        pairs = [a / b for a, b in zip(ours["tok_per_s_by_turn"], side["tok_per_s_by_turn"], strict=True)]
        assert report["paired_ratios"][side["name"]] == pytest.approx(spread(pairs))
        assert report["ratios"][side["name"]] == pytest.approx(ours["tok_per_s"] / side["tok_per_s"])
    for side in report["results"][:2]:
        stepping = side["wall_seconds"] - side["seconds"]["prefill"]
        assert side["step_seconds"] == pytest.approx(stepping / side["steps"])
        assert side["overhead_share"] == pytest.approx(1 - side["seconds"]["verify"] / stepping)
    told = report["costs"]
    assert (told["context"], len(told["forward_seconds"])) == (200, 8)
    assert min(*told["forward_seconds"], told["draft_seconds"], told["read_bandwidth"]) > 0
    assert told["memory_floor_seconds"] == pytest.approx(told["weight_bytes"] / told["read_bandwidth"])
    assert told["forward_bandwidth"] == pytest.approx(told["weight_bytes"] / told["forward_seconds"][0])
    assert told["step_over_floor"] == pytest.approx(ours["step_seconds"] / told["memory_floor_seconds"])
    check_model(report)


def test_batches_are_measured_as_turns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = document(folder, capsys, "--against", "plain,transformers")
    report = document(folder, capsys, "--against", "plain,transformers", "--batch-size", 2)
    assert (report["batch_size"], report["num_prompts"], report["cost_model"]) == (2, 3, None)
    assert report["costs"]["step_over_floor"] is None
    for side, single in zip(report["results"], alone["results"], strict=True):
        assert len(side["tok_per_s_by_turn"]) == 2
        assert side["tokens"] == single["tokens"]  # greedily the same texts
    ours, single = report["results"][0], alone["results"][0]
    assert ours["accept_len"] == single["accept_len"]
    assert ours["accept_len_by_category"] == single["accept_len_by_category"]
    assert run(folder, "--batch-size", 2, "--against", "plain") == 0
    shown = capsys.readouterr().out
    assert "3 prompts, 2 at a time" in shown
    assert "step of mtp (a text's share of a batch's)" in shown


def test_what_takes_one_text_at_a_time_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--against", "lookup"], "--batch-size is 2, and --against has lookup"),
        (["--plot", folder / "p.png"], "--plot draws single texts, but --batch-size is 2"),
        (["--tree", "2,1"], "--batch-size is 2, but --tree is 2,1"),
    ):
        assert run(folder, "--batch-size", 2, *flags) == 2
        assert message in capsys.readouterr().err
    assert run(folder, "--batch-size", 0) == 2
    assert "--batch-size is 0; use at least 1." in capsys.readouterr().err


def check_model(report: dict[str, Any]) -> None:
    """The expectation and the measurement, from the document's other numbers."""
    ours, plain = report["results"][:2]
    told, speeds = report["costs"], [side["accept_len"] / side["step_seconds"] for side in (ours, plain)]
    assert report["cost_model"]["measured"] == pytest.approx(speeds[0] / speeds[1])
    rests = [(side["seconds"]["rule"] + side["seconds"]["other"]) / side["steps"] for side in (ours, plain)]
    forward, shares = told["forward_seconds"], ours["accepted_per_position"]
    expected = [
        (1 + sum(shares[:k])) * (forward[0] + rests[1]) / (forward[k] + k * told["draft_seconds"] + rests[0])
        for k in range(1, 4)
    ]
    assert report["cost_model"]["speed_up"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "flags",
    [["--draft-length", 0], ["--tree", "2,1", "--against", "plain"], ["--against", "transformers"], ["--against", ""]],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_costs_are_told_where_there_is_nothing_to_expect(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[object]
) -> None:
    report = document(folder, capsys, *flags)
    assert report["cost_model"] is None
    assert len(report["costs"]["forward_seconds"]) == 8
    assert (report["costs"]["draft_seconds"] is None) == ("--draft-length" in flags)
    assert report["lookup_tokens"] is None


def test_a_short_context_leaves_what_room_it_has(base: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Chain] = []
    monkeypatch.setattr(costs, "draft_chain", lambda *given: drawn.append(draft_chain(*given)))
    decoder = Decoder(base, new_heads(HeadsOptions(draft_length=9), base))
    request = Request(max_new_tokens=3, bad_words=("a",), draft_max_entropy=0.0)
    report = bench(decoder, ["hi"], request, "heads", against=("plain",))
    assert (report["costs"]["context"], len(report["costs"]["forward_seconds"])) == (200, 10)  # K + 1 rows
    assert {chain.block.shape[1] for chain in drawn} == {10}  # though this request itself drafts nothing
    assert report["results"][0]["accept_len"] == 1.0
    monkeypatch.setattr(type(base), "context_length", 30)
    report = bench(decoder, ["hi"], request, "heads", against=("plain",))
    assert (report["costs"]["context"], len(report["costs"]["forward_seconds"])) == (20, 10)


# ---- table and picture -------------------------------------------------------------------------------------------


def test_the_table_fits_a_hundred_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = document(folder, capsys, "--against", "plain,transformers,lookup")
    for side in report["results"]:  # as on a fast machine
        side["tok_per_s"], side["tok_per_s_spread"] = 1234.5, {"median": 1234.5, "min": 1033.4, "max": 1534.5}
    monkeypatch.setenv("COLUMNS", "60")
    show_bench(report, to_stderr=False)
    assert "1234.5 (1033.4–1534.5)" in capsys.readouterr().out  # in a file there is room
    monkeypatch.setattr(Screen, "is_terminal", True)
    for columns in (60, 80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_bench(report, to_stderr=False)
        out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        rows = out[: out.index("by turn: ")].splitlines()
        assert max(map(len, rows)) <= columns
        assert "…" not in "".join(rows)
        assert ("1234.5 (1033.4–1534.5)" in out) == (columns > 80)
        assert re.search(r"^ transformers +1234\.5 ", out, re.MULTILINE)
    monkeypatch.undo()
    show_bench(report, to_stderr=False)
    ours, out = report["results"][0], capsys.readouterr().out
    assert f"the rest {ours['overhead_share']:.1%}: drafting" in out
    assert "forward over 1…8 rows behind 200 tokens" in out
    assert re.search(r"memory floor of a forward: [\d.]+ ms; a step of mtp takes [\d.]+ times that", out)
    assert "acceptance length, mean over categories" in out


@pytest.mark.parametrize("length", [[], ["--draft-length", 1]])
def test_the_picture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: list[object]) -> None:
    report = document(folder, capsys, "--plot", tmp_path / "speed.PNG", "--temperature", 1, *length)
    data = (tmp_path / "speed.PNG").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    assert [path.name for path in tmp_path.iterdir()] == ["speed.PNG"]
    assert len(report["cost_model"]["speed_up"]) == (1 if length else 3)


def test_the_picture_draws_the_numbers_of_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = document(folder, capsys)
    report["cost_model"] = {"speed_up": [1.11, 1.32, 1.23], "measured": 1.27}
    drawn: list[str] = []
    real = bench_picture._draw_curve

    def seen(axes: Any, *values: Any) -> None:
        real(axes, *values)
        drawn.extend(text.get_text() for text in axes.texts)

    monkeypatch.setattr(bench_picture, "_draw_curve", seen)
    draw(report)
    assert drawn == ["plain decoding", "1.11", "1.32", "1.23", "1.27"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--against", "plain,lookahead"], "--against has 'lookahead'; use one of plain, transformers, lookup"),
        (["--plot", "{}/speed.jpg"], "speed.jpg; name a file that ends in .png."),
        (["--plot", "{}"], "name a file that ends in .png."),
        (["--plot", "{}/none/speed.png"], "but there is no folder"),
        (["--plot", "{}/speed.png", "--against", "lookup"], "over plain, but --against is lookup; add plain to it."),
        (["--plot", "{}/speed.png", "--against", ""], "but --against is empty; add plain"),
        (["--plot", "{}/speed.png", "--tree", "2,1"], "--tree is 2,1; leave one of them out."),
        (["--plot", "{}/speed.png", "--draft-length", "0"], "but --draft-length is 0; use a number from 1"),
        (["--plot", "{}/speed.png", "--draft-length", "auto"], "but --draft-length is auto; use a number from 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_before_anything_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    flags = [flag.replace("{}", str(tmp_path)) for flag in flags]
    assert run(folder, "--heads", folder / "missing", *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: --")
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", locked)
    assert run(folder, "--heads", folder / "missing", "--plot", tmp_path / "speed.png") == 2
    told = f"--plot is {tmp_path}/speed.png, but the folder {tmp_path} cannot be written (Permission denied); choose"
    assert told in capsys.readouterr().err


def test_a_full_disk_takes_no_numbers_along(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "speed.png"
    path.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(png.Path, "write_bytes", full)
    assert run(folder, "--plot", path, "--against", "plain", "--json") == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["cost_model"]["measured"] > 0
    assert f"--plot {path} cannot be written (No space left on device)" in captured.err
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_costs_behind_another_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = document(folder, capsys, "--against", "", "--context", 37)
    assert report["costs"]["context"] == 37
    assert main(["bench", "--heads", str(folder), "--prompts", "x", "--context", "0"]) == 2
    assert "--context is 0; use a number of tokens, at least 1" in capsys.readouterr().err
