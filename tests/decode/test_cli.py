"""`mtp-decode` through `main`: what it prints, its JSON, its exit codes, and every kind of bad input."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import decode.together
from decode import check_cli, generate_cli
from decode.check import CheckSettings, Finding
from decode.cli import main
from mtp.config import HeadsOptions
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.tiny import CONTEXT, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    base = tiny_base("llama", folder)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=3), base), folder / "heads")
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "the user"}, {"turns": ["what is it?", "and?"]}, {"messages": messages}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "hi " * CONTEXT}))
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    parsed: dict[str, Any] = json.loads(out.splitlines()[-1])
    return parsed


def test_generate_prints_text_and_then_statistics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "--heads", folder / "heads", "--prompt", "the user", "--max-new-tokens", 12)
    code, out, err = run(capsys, *args)
    report = document(capsys, *args)
    assert code == 0
    assert out == report["results"][0]["text"] + "\n"
    assert "acceptance length" in err
    assert "K = 3, greedy" in err


def test_generate_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = document(
        capsys, "generate", "--heads", folder / "heads", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 9,
        "--temperature", 1, "--seed", 4, "--draft-length", 2,
    )  # fmt: skip
    assert (report["num_prompts"], report["draft_length"], report["verify"]) == (3, 2, "block")
    assert (report["lossless"], report["tree"], report["unusable_q"], report["undrafted_texts"]) == (True, None, 0, 0)
    assert len(report["accepted_per_position"]) == len(report["alpha"]) == 2
    assert set(report["seconds"]) == {"prefill", "draft", "verify", "rule", "other"}
    assert all(seconds > 0 for seconds in report["seconds"].values())
    assert report["committed"] == sum(len(result["token_ids"]) for result in report["results"])
    assert report["accept_len"] == pytest.approx(report["committed"] / report["steps"])
    for result in report["results"]:
        assert result["finish_reason"] in {"eos", "length"}
        assert result["stats"]["committed"] == len(result["token_ids"])
        assert "logprobs" not in result


def test_generate_in_batches_gives_the_same_lines_and_counts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    blocks = decode.together.run_blocks

    def noted(*args: Any) -> Any:
        sizes.append(len(args[2]))
        return blocks(*args)

    monkeypatch.setattr(decode.together, "run_blocks", noted)
    args = ("generate", "--heads", folder / "heads", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 12)
    code, out, err = run(capsys, *args)
    assert not sizes
    several = run(capsys, *args, "--batch-size", 3)
    assert max(sizes) == 3
    assert several[:2] == (code, out) == (0, out)
    assert out.count("\n") >= 3
    assert "acceptance length" in several[2]
    single, batch = document(capsys, *args), document(capsys, *args, "--batch-size", 3)
    assert (single["batch_size"], batch["batch_size"]) == (1, 3)
    for name in ("steps", "committed", "drafted", "accepted", "histogram"):
        assert single[name] == batch[name]
    assert [one["token_ids"] for one in single["results"]] == [one["token_ids"] for one in batch["results"]]
    assert batch["tok_per_s"] > 0


WARM = ["--temperature", "1", "--seed", "1"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", "1", "--seed", "1"],
        ["--temperature", "1", "--seed", "2", "--top-k", "2"],
        ["--temperature", "1", "--seed", "1", "--top-p", "0.2"],
        ["--temperature", "1", "--seed", "1", "--min-p", "0.9"],
        ["--temperature", "1", "--seed", "2"],
        ["--no-chat"],
        ["--max-new-tokens", "3"],
        ["--stop", "x", "6", "--stop", "a"],
        [*WARM, "--typical-p", "0.1"],
        [*WARM, "--epsilon-cutoff", "0.05"],
        [*WARM, "--eta-cutoff", "0.9"],
        [*WARM, "--reproducible"],
        [*WARM, "--verify", "token"],
        [*WARM, "--draft-length", "1"],
        [*WARM, "--draft-temperature", "0.1"],
        [*WARM, "--tree", "3,2"],
        ["--repetition-penalty", "3"],
        ["--presence-penalty", "9"],
        ["--frequency-penalty", "9"],
        ["--no-repeat-ngram", "1"],
        ["--logit-bias", "7=99", "8=-inf"],
        ["--suppress-tokens", "{first}"],
        ["--bad-words", "{text}"],
        ["--stop-ids", "{first}"],
        ["--dtype", "bfloat16"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_every_flag_changes_something(folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    args = ["generate", "--heads", folder / "heads", "--prompt", "the user"]
    plain = document(capsys, *args, *(WARM if flags[:4] == WARM != flags else []), "--max-new-tokens", 16)
    first = plain["results"][0]
    flags = [flag.format(first=first["token_ids"][0], text=first["text"][:2]) for flag in flags]
    changed = document(capsys, *args, *([] if "--max-new-tokens" in flags else ["--max-new-tokens", 16]), *flags)
    if "--dtype" in flags:
        assert (plain["dtype"], changed["dtype"]) == ("float32", "bfloat16")
    else:
        assert first["token_ids"] != changed["results"][0]["token_ids"]
    if "--stop" in flags or "--stop-ids" in flags:
        assert changed["results"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tree", "3,2"], {"tree": "3,2", "draft_length": 2, "verify": "greedy", "lossless": True}),
        ([*WARM, "--tree", "dynamic:5"], {"tree": "dynamic:5", "draft_length": 3, "verify": "traversal"}),
        ([*WARM, "--tree", "2,1", "--verify", "token"], {"tree": "2,1", "verify": "recursive", "lossless": True}),
        ([*WARM, "--reproducible"], {"verify": "match", "lossless": True, "tree": None}),
        ([*WARM, "--verify", "lossy-typical"], {"verify": "lossy-typical", "lossless": False}),
        ([*WARM, "--draft-max-entropy", "0"], {"drafted": 0, "accept_len": 1.0, "draft_length": 3}),
        ([*WARM, "--draft-min-confidence", "1"], {"drafted": 0, "accept_len": 1.0, "draft_length": 3}),
        (["--logit-bias", "2=99"], {"committed": 1}),
        (["--logit-bias", "2=99", "--min-new-tokens", "4"], {"committed": 5}),
        (["--logit-bias", "2=99", "--ignore-eos"], {"committed": 12}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_that_show_in_the_statistics(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], expected: dict[str, object]
) -> None:
    """Token 2 is this base's end of sequence."""
    args = ("generate", "--heads", folder / "heads", "--prompt", "the user", "--max-new-tokens", 12)
    report = document(capsys, *args, *flags)
    assert {name: report[name] for name in expected} == expected
    assert {name: report["results"][0]["stats"][name] for name in expected} == expected


def test_drafting_stops_behind_an_unlikely_draft(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "--heads", folder / "heads", "--prompt", "the user", "--max-new-tokens", 24, *WARM)
    plain = document(capsys, *args)
    report = document(capsys, *args, "--draft-min-prob", "1")
    assert 0 < report["drafted"] <= report["steps"]  # one draft each: the one behind which it stops
    assert plain["drafted"] > 2 * plain["steps"]


def test_logprobs_are_in_the_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "--heads", folder / "heads", "--prompt", "the user", "--max-new-tokens", 12, "--logprobs")
    [result] = document(capsys, *args)["results"]
    assert len(result["logprobs"]) == len(result["token_ids"])
    assert all(value < 0 for value in result["logprobs"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tree", "2,2"], "K = 2, greedy, tree 2,2"),
        ([*WARM, "--tree", "2,2"], "K = 2, traversal, tree 2,2"),
        (WARM, "K = 3, block"),
        ([*WARM, "--verify", "lossy-typical"], "the rule lossy-typical does not keep the base's distribution"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_statistics_say_how_it_was_decoded(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    code, _, err = run(capsys, "generate", "--heads", folder / "heads", "--prompt", "a", "--max-new-tokens", 4, *flags)
    assert code == 0
    assert said in err
    assert "rule 0." in err


def test_limit_and_base(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = document(
        capsys, "generate", "--base", folder / "llama-0", "--prompts", folder / "prompts.jsonl", "--limit", 2,
        "--max-new-tokens", 3, "--device", "cpu",
    )  # fmt: skip
    assert (report["num_prompts"], report["heads"], report["draft_length"]) == (2, None, 0)
    assert report["accept_len"] == 1.0


@pytest.mark.parametrize("temperature", [0, 1])
def test_bench_json(folder: Path, capsys: pytest.CaptureFixture[str], temperature: int) -> None:
    report = document(
        capsys, "bench", "--heads", folder / "heads", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 6,
        "--temperature", temperature, "--top-p", 0.9, "--draft-length", 2,
    )  # fmt: skip
    ours, plain, theirs = report["results"]
    assert [ours["name"], plain["name"], theirs["name"]] == ["mtp", "plain", "transformers"]
    assert set(report["ratios"]) == {"plain", "transformers"}
    assert report["ratios"]["plain"] == pytest.approx(ours["tok_per_s"] / plain["tok_per_s"])
    assert (report["draft_length"], report["num_prompts"], report["dtype"]) == (2, 3, "float32")
    assert report["verify"] == ("block" if temperature else "greedy")
    assert (report["lossless"], report["tree"], report["top_p"], report["seed"]) == (True, None, 0.9, 0)
    assert len(ours["accepted_per_position"]) == len(ours["alpha"]) == 2
    assert plain["accept_len"] == 1.0
    assert plain["steps"] == plain["tokens"]
    assert set(report["versions"]) == {"torch", "transformers", "mtp"}
    for side in report["results"]:
        assert side["tok_per_s"] == pytest.approx(side["tokens"] / side["wall_seconds"])
    for side in (ours, plain):
        assert set(side["seconds"]) == {"prefill", "draft", "verify", "rule", "other"}
        assert 0 < side["rule_share"] < 1
        assert sum(side["seconds"].values()) == pytest.approx(side["wall_seconds"])
    if not temperature:
        assert ours["tokens"] == plain["tokens"] == theirs["tokens"]


def test_bench_table_and_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("bench", "--heads", folder / "heads", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 2)
    code, out, _ = run(capsys, *args, "--against", "plain")
    assert code == 0
    assert "plain" in out
    assert "transformers" not in out


def test_bench_of_a_tree_and_of_our_own_penalties(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = document(
        capsys, "bench", "--heads", folder / "heads", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 4,
        "--against", "plain", "--tree", "2,1", "--presence-penalty", 1,
    )  # fmt: skip
    assert (report["tree"], report["draft_length"], report["presence_penalty"]) == ("2,1", 2, 1.0)
    ours, plain = report["results"]
    assert plain["accept_len"] == 1.0
    assert ours["tokens"] == plain["tokens"]


@pytest.mark.parametrize("passed", [True, False])
def test_check_ends_with_1_when_a_check_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    asked: list[CheckSettings] = []

    def found(decoder: object, settings: CheckSettings) -> Iterator[Finding]:
        asked.append(settings)
        yield from [Finding("first", True, "as it should be"), Finding("second", passed, "0 of 3")]

    monkeypatch.setattr(check_cli, "findings", found)
    monkeypatch.setattr(check_cli, "NUM_FINDINGS", 2)
    args = ("check", "--heads", folder / "heads", "--samples", 7, "--seed", 3, "--max-new-tokens", 5)
    code, out, _ = run(capsys, *args)
    assert code == (0 if passed else 1)
    assert ("lossless" in out, "FAILED" in out, "1 of 2 failed" in out) == (passed, not passed, not passed)
    code, out, err = run(capsys, *args, "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == (0 if passed else 1)
    assert report["passed"] is passed
    assert [(one["name"], one["passed"]) for one in report["checks"]] == [("first", True), ("second", passed)]
    assert "as it should be" in err
    assert [(one.samples, one.seed, one.max_new_tokens) for one in asked] == [(7, 3, 5)] * 2


def heads_with(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the heads with an edited config.json."""
    copy = folder / name
    copy.mkdir(exist_ok=True)
    (copy / "model.safetensors").write_bytes((folder / "heads" / "model.safetensors").read_bytes())
    (copy / "config.json").write_text((folder / "heads" / "config.json").read_text().replace(old, new))
    return copy


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "command"),
        (["generat"], "generat"),
        (["generate", "--heads", "{}/heads"], "--prompt TEXT or --prompts FILE"),
        (["generate", "--prompt", "a"], "neither --heads nor --base"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--prompts", "{}/prompts.jsonl"], "given twice"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--limit", "1"], "--limit is 1"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--batch-size", "2"], "--batch-size is 2, but it only"),
        (["generate", "--heads", "{}/heads", "--prompts", "{}/prompts.jsonl", "--batch-size", "0"], "use at least 1"),
        (
            ["generate", "--heads", "{}/heads", "--prompts", "{}/prompts.jsonl", "--batch-size", "2", "--tree", "2"],
            "--batch-size is 2, but --tree is 2",
        ),
        (
            ["generate", "--heads", "{}/heads", "--prompts", "{}/long.jsonl", "--batch-size", "2"],
            "this base reads at most",
        ),
        (["generate", "--heads", "{}/heads", "--prompts", "{}/bad.jsonl"], "bad.jsonl, line 2"),
        (["generate", "--heads", "{}/heads", "--prompts", "{}/none.jsonl"], "none.jsonl"),
        (["generate", "--heads", "{}/heads", "--prompts", "{}/long.jsonl"], "shorten the prompt"),
        (["generate", "--heads", "{}/missing", "--prompt", "a"], "missing"),
        (["generate", "--heads", "{}/heads", "--base", "{}/nothing", "--prompt", "a"], "nothing"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--draft-length", "9"], "--draft-length is 9"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--top-k", "x"], "top_k"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--device", "abacus"], "abacus"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--dtype", "float8"], "float8"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--unknown", "1"], "--unknown"),
        (["generate", "--heads", "{}/heads", "--prompt", "", "--no-chat"], "no tokens"),
        (["bench", "--prompts", "{}/prompts.jsonl"], "--heads is missing"),
        (["bench", "--heads", "{}/heads"], "--prompts FILE"),
        (["bench", "--heads", "{}/heads", "--prompts", "{}/prompts.jsonl", "--against", "x,y"], "--against has 'x'"),
        (["bench", "--heads", "{}/heads", "--prompts", "{}/long.jsonl"], "shorten the prompt"),
        (
            ["bench", "--heads", "{}/heads", "--prompts", "{}/prompts.jsonl", "--presence-penalty", "1"],
            "--presence-penalty is 1.0, which transformers is not given here; use --against plain",
        ),
        (
            ["bench", "--heads", "{}/heads", "--prompts", "{}/prompts.jsonl", "--frequency-penalty", "1"],
            "--frequency-penalty is 1.0, which transformers is not given here; use --against plain",
        ),
        (["bench", "--heads", "{}/heads", "--prompts", "{}/prompts.jsonl", "--stop", "a"], "--stop"),
        (["check"], "--heads is missing; name the folder of heads to check"),
        (["check", "--heads", "{}/heads", "--limit", "1"], "--limit is 1"),
        (["generate", "--base", "{}/llama-0", "--prompt", "a", "--tree", "2"], "no heads to draft with"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--tree", "2,2,2,2"], "4 levels deep, but K is 3"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--tree", "3,,1"], "--tree is '3,,1'"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--verify", "best"], "--verify is 'best'; use one of"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--reproducible", "--temperature", "1"], "needs a seed"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--logit-bias", "13"], "--logit-bias has '13'"),
        (["generate", "--heads", "{}/heads", "--prompt", "a", "--suppress-tokens", "64"], "token id 64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    code, out, err = run(capsys, *[arg.replace("{}", str(folder)) for arg in args])
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_foreign_and_damaged_heads(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_base("llama", tmp_path, seed=1)
    damaged = heads_with(folder, "damaged", "", "")
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    unknown = heads_with(folder, "unknown", '"kind"', '"kin"')
    for heads, base, message in [
        (folder / "heads", tmp_path / "llama-1", "other weights"),
        (damaged, folder / "llama-0", "model.safetensors"),
        (unknown, folder / "llama-0", "kin"),
    ]:
        code, _, err = run(capsys, "generate", "--heads", heads, "--base", base, "--prompt", "a")
        assert code == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_cli, "run", interrupted)
    assert run(capsys, "generate", "--prompt", "a")[0] == 130


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    """As in `mtp-decode generate … | head -1`: the pipe is closed before the text is complete."""
    command = [sys.executable, "-m", "decode", "generate", "--heads", str(folder / "heads"), "--prompt", "the user"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "100"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "a\udcff b"], "the prompt has a part that is no text"),
        (["--prompt", "a", "--stop", "\udcff"], "--stop has a part that is no text"),
        (["--prompt", "a", "--seed", str(2**70)], "--seed is"),
        (["--prompt", "a", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "a", "--device", "meta"], "cannot be used"),
    ],
)
def test_values_that_no_program_can_use(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    code, _, err = run(capsys, "generate", "--heads", folder / "heads", "--max-new-tokens", 4, *flags)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err


def test_faults_of_the_software_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(generate_cli, "run", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["generate", "--prompt", "a"])


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["bench", "--help"], ["check", "--help"]])
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *args)
    assert code == 0
    assert "usage: " in out


def test_module_is_a_door() -> None:
    done = subprocess.run([sys.executable, "-m", "decode", "generate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: prompts are missing")


@pytest.mark.parametrize("command", ["bench", "lab"])
def test_a_table_into_a_closed_pipe_is_no_error(folder: Path, command: str) -> None:
    """Code 1 would say that a check failed."""
    heads = ["--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "2"]
    arguments = heads if command == "bench" else ["--p=.5,.5", "--q=.4,.6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "decode", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    assert process.wait(timeout=120) == 0, error
    assert "Traceback" not in error


def test_a_name_that_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "--heads", "x" * 5_000, "--prompt", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: ")


def test_bench_with_a_minimum_length(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warm-up is shorter than it."""
    heads = ("--heads", folder / "heads", "--prompts", folder / "prompts.jsonl", "--limit", 1)
    report = document(capsys, "bench", *heads, "--max-new-tokens", 12, "--min-new-tokens", 10)
    assert all(side["tokens"] >= 10 for side in report["results"])


@pytest.mark.parametrize("text", ["# Write a poem", "null", "~ tilde", "&anchor"])
def test_a_prompt_is_taken_as_it_stands(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    report = document(capsys, "generate", "--heads", folder / "heads", "--max-new-tokens", 2, f"--prompt={text}")
    assert report["results"][0]["prompt"] == text


@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_which_prompt_is_bad(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], batch_size: str) -> None:
    lines = [json.dumps({"prompt": prompt}) for prompt in ("the user", "the user " * 500, "a")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    args = [
        "generate",
        "--heads",
        str(folder / "heads"),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--max-new-tokens",
        "3",
    ]
    assert main([*args, "--batch-size", batch_size]) == 2
    assert "prompt 2 of 3: the prompt has" in capsys.readouterr().err
