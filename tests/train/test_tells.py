"""What a run says: the summary before the first step, the time left, the table and commands after the last."""

import io
import math
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from decode.parser import COMMANDS as DECODE_COMMANDS
from decode.parser import parse
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.hub import load_heads
from tests.tiny import tiny_base
from tests.train.runs import job, read_metrics
from train import disk as disk_module
from train.briefing import acceptance_table, steps_in_words, time_in_words
from train.cli import COMMANDS, entry, farewell, main
from train.console import COLUMNS
from train.disk import Disk, check_disk, estimate_disk, size
from train.help import short_help
from train.interrupt import Interrupted, command_line, resuming
from train.module import HeadsModule
from train.pace import SETTLE, SURE, Pace, in_words
from train.prepare import half_precision_warning

STEPS = 12


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A finished run, and the lines it printed."""
    folder = tmp_path_factory.mktemp("told")
    patch = pytest.MonkeyPatch()
    out = io.StringIO()
    patch.setattr("sys.stdout", out)
    try:
        assert main(["--config", str(job(folder, trainer__max_steps=STEPS, trainer__val_check_interval=6))]) == 0
    finally:
        patch.undo()
    return folder / "runs" / "tiny", out.getvalue().splitlines()


def test_the_summary_comes_before_the_first_step_and_is_true(told: tuple[Path, list[str]]) -> None:
    run, lines = told
    first = lines.index("before the first step")
    assert not any(line.startswith("step ") for line in lines[:first])
    summary = "\n".join(lines[first : first + 12])
    heads = load_heads(run / "heads")
    assert f"recurrent, K = 2, {sum(p.numel() for p in heads.parameters()) / 1e6:.1f} M parameters" in summary
    assert "drafting 40 of 64 tokens" in summary
    assert "28 records" in summary
    assert f"steps   {STEPS} of 4 rows" in summary
    assert re.search(r"memory  about \d+\.\d GB at 4 × \d+ tokens", summary)
    assert re.search(r"disk    about \d+ [kM]B of \d+\.\d GB free\n +checkpoint .*heads ", summary)
    assert re.search(r"time    about [\d.]+ \w+ left: [\d.]+ m?s a step, guessed", summary)
    measured = [line for line in lines[first:] if line.endswith("measured") and "time " in line]
    assert len(measured) == 1, "the rate is told once when it is known"
    assert all(len(line) <= 60 for line in lines[first : first + 12] if str(run.parent.parent) not in line)


def test_the_estimate_of_the_disk_is_near(told: tuple[Path, list[str]]) -> None:
    run, _ = told
    heads = load_heads(run / "heads")
    numbers = sum(p.numel() for p in heads.parameters()), sum(b.numel() * b.element_size() for b in heads.buffers())
    found = estimate_disk(*numbers, states=2, rows=STEPS + 2, draft_length=2)
    assert (run / "checkpoints" / "last.ckpt").stat().st_size == pytest.approx(found.checkpoint, rel=0.3)
    assert (run / "heads" / "model.safetensors").stat().st_size == pytest.approx(found.heads, rel=0.1)
    (csv,) = run.glob("csv/*/metrics.csv")
    assert csv.stat().st_size < found.records


def test_the_end_shows_the_table_and_commands_that_work(told: tuple[Path, list[str]]) -> None:
    run, lines = told
    header = lines.index("draft   alpha  1..k kept  decoded")
    saved = [row for row in read_metrics(run) if row.get("val/alpha/1")]
    assert lines[header + 1].split()[1] in {f"{float(row['val/alpha/1']):.3f}" for row in saved}
    assert len(lines[header + 1].split()) == len(lines[header + 2].split()) == 4
    commands = [shlex.split(line) for line in lines[header:] if line.startswith("mtp-decode ")]
    assert [words[1] for words in commands] == ["generate", "bench", "check", "export", "push"]
    for words in commands:
        assert words[words.index("--heads") + 1] == str(run / "heads")
        if words[1] in DECODE_COMMANDS:
            parse(words[1:])  # UserError for an option that does not exist
    chosen = FORMATS[commands[3][commands[3].index("--format") + 1]]
    heads, base = load_heads(run / "heads"), FrozenBase.from_pretrained(str(run.parent.parent / "llama"), device="cpu")
    assert chosen.fault(heads, base) is None, "the format that is named can express these heads"


def test_a_quiet_run_says_where_the_heads_are_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(job(tmp_path, trainer__max_steps=1)), "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"heads: {tmp_path / 'runs' / 'tiny' / 'heads'}"]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_the_table_and_steps_in_words() -> None:
    assert acceptance_table({}, 2) == []
    lines = acceptance_table({"val/alpha/1": 0.5, "val/cumulative/1": 0.5, "decode/accepted/1": math.nan}, 1)
    assert lines[1].split() == ["1", "0.500", "0.500", "-"]
    assert steps_in_words(100, 40, 8, 50) == "100 of 8 rows = 2.0 epochs, 40 done"
    assert steps_in_words(math.inf, 0, 8, 50) == "no end of 8 rows"
    assert steps_in_words(4, 0, 8, 1000) == "4 of 8 rows = 0.004 epochs"


def test_pace_guesses_then_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("train.pace.time.monotonic", lambda: now[0])
    pace = Pace()
    assert pace.left(10, 0) is None
    assert time_in_words(pace, 10, 0, None).strip() == "time    known after the first steps"
    pace.guess = 5.0
    assert pace.left(10, 2) == 50.0
    assert "guessed" in time_in_words(pace, 10, 2, None)
    pace.begin()
    for seconds in [30.0] * SETTLE + [2.0] * SURE:  # the first one is slow and does not count
        now[0] += seconds
        pace.stepped()
    assert pace.sure
    assert pace.per_step == 2.0
    now[0] += 7.0
    pace.validated(7.0)
    now[0] += 2.0
    pace.stepped()
    assert pace.per_step == 2.0, "a validation is no step"
    assert pace.left(10, 2) == 34.0
    assert "about 34 s left: 2.0 s a step, measured" in time_in_words(pace, 10, 2, None)
    assert "about 20 s left" in time_in_words(pace, 10, 2, 20.0)
    assert "max_time" in time_in_words(pace, 10, 2, 20.0)
    told = [in_words(x) for x in (0.25, 45, 119, 3600 * 3 + 60 * 20, 86400 * 2 + 3600 * 4, math.inf)]
    assert told == ["0.2 s", "45 s", "2 min", "3 h 20 min", "2 d 4 h", "no end"]


def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(checkpoint=3 * 10**9, heads=10**9, features=0, records=10**6)
    assert disk.peak == 7 * 10**9 + 10**6
    usage = type("Usage", (), {"free": 8 * 10**9})()
    monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda _: usage)
    assert check_disk(disk, tmp_path / "not" / "there") == "about 4.0 GB of 8.0 GB free"
    usage.free = 6 * 10**9
    with pytest.raises(UserError, match=r"has 6.0 GB free and this run needs 7.0 GB"):
        check_disk(disk, tmp_path)
    assert [size(x) for x in (5e3, 5e6, 5e9)] == ["5 kB", "5 MB", "5.0 GB"]


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_commands_that_go_on() -> None:
    assert resuming(["--config", "a b.yaml", "--ckpt_path", "x", "--ckpt_path=y"], "r/last.ckpt") == (
        "mtp-train --config 'a b.yaml' --ckpt_path r/last.ckpt"
    )
    assert command_line(["inspect"]) == "mtp-train inspect"
    assert farewell(KeyboardInterrupt(), ["--config", "a"]).endswith("Start again with\nmtp-train --config a")
    assert "what is done is kept" in farewell(Interrupted("x"), ["compare", "--out", "o"])
    assert farewell(Interrupted("4 steps"), ["--config", "a"]) == "interrupted; 4 steps"


PHASES = {
    "loading": "train.prepare.load_base",
    "tokens": "train.prepare.set_up",
    "self-tests": "train.prepare.run_self_tests",
    "the closed-form start": "train.module.start_heads",
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_before_the_first_step_leaves_no_run(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PHASES[phase], interrupt)
    path = job(tmp_path)
    assert main(["--config", str(path)]) == 130
    error = capsys.readouterr().err
    assert error.endswith(f"Start again with\nmtp-train --config {path}\n")
    assert "Traceback" not in error
    assert not list((tmp_path / "runs").glob("*"))


def interrupted(arguments: list[str], hook: str, at_step: int, times: int = 1, sign: int = signal.SIGINT) -> int:
    """The exit code of a run that gets Ctrl-C, or another signal, within `hook`, after so many steps."""
    real = getattr(HeadsModule, hook)
    patch = pytest.MonkeyPatch()

    def pressed(self: Any, *rest: Any) -> Any:
        if (at_step == 0 or self.global_step >= at_step) and times:
            for _ in range(times):
                signal.raise_signal(sign)
        return real(self, *rest)

    patch.setattr(HeadsModule, hook, pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    others = signal.getsignal(signal.SIGTERM)
    try:
        return main(arguments)
    finally:
        patch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is given back"
        assert signal.getsignal(signal.SIGTERM) is others
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_ctrl_c_keeps_every_step_and_the_printed_command_ends_the_same(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are far apart; what is resumed ends with the weights of a run that nobody stopped."""
    changes: dict[str, Any] = {"run__checkpoint_every": 100, "model__decode__prompts": None, "trainer__max_steps": 7}
    changes |= {"trainer__val_check_interval": 4}
    path = job(tmp_path, **changes)
    assert main(["--config", str(path)]) == 0
    whole = torch.load(tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert interrupted(["--config", str(path), "--run.name", "cut"], hook, at_step=4) == 130
    checkpoint = tmp_path / "runs" / "cut" / "checkpoints" / "last.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["global_step"]
    error = capsys.readouterr().err
    assert f"{saved} steps are saved. Go on with" in error
    assert saved == {"training_step": 5, "validation_step": 4}[hook]
    command = shlex.split(error.splitlines()[-1])
    assert command[-1] == str(checkpoint)
    assert main(command[1:]) == 0
    assert re.search(rf"steps   7 of 4 rows = .* epochs, {saved} done", capsys.readouterr().out)
    ended = torch.load(checkpoint, weights_only=True)
    assert ended["global_step"] == 7
    assert all(torch.equal(tensor, ended["state_dict"][name]) for name, tensor in whole.items())


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job(tmp_path, run__checkpoint_every=100, model__decode__prompts=None)
    assert interrupted(["--config", str(path)], "training_step", at_step=2, times=2) == 130
    assert "no step was saved" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_a_process_alone_that_is_told_to_end_saves_its_step_and_says_how_to_go_on(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM, as from `kill`, torchrun or a scheduler, in the middle of a step or of a validation."""
    changes: dict[str, Any] = {"run__checkpoint_every": 100, "model__decode__prompts": None, "trainer__max_steps": 7}
    path = job(tmp_path, **(changes | {"trainer__val_check_interval": 4}))
    assert interrupted(["--config", str(path)], hook, at_step=4, sign=signal.SIGTERM) == 2
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    saved = {"training_step": 5, "validation_step": 4}[hook]
    assert torch.load(checkpoint, weights_only=True)["global_step"] == saved
    error = capsys.readouterr().err
    assert f"error: the run was told to end by SIGTERM; nothing before step {saved} is lost" in error
    assert f"--ckpt_path {checkpoint} goes on" in error
    assert main(["--config", str(path), "--ckpt_path", str(checkpoint)]) == 0
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 7


@pytest.mark.parametrize(("hook", "at_step", "times"), [("training_step", 2, 2), ("build", 0, 1)])
def test_told_to_end_before_anything_is_saved(
    hook: str, at_step: int, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second SIGTERM does not wait for the step; one before the first step leaves no run behind."""
    path = job(tmp_path, run__checkpoint_every=100, model__decode__prompts=None)
    assert interrupted(["--config", str(path)], hook, at_step, times, signal.SIGTERM) == 2
    error = capsys.readouterr().err
    assert "error: the run was told to end by SIGTERM; there is no checkpoint yet, so start again" in error
    assert "Traceback" not in error
    assert bool(list((tmp_path / "runs").glob("*"))) is (hook != "build")


# ---- help and the console --------------------------------------------------------------------------------------------


def test_help_is_short_has_examples_first_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text == short_help()
    assert text.index("mtp-train --config configs/demo.yaml") < text.index("options")
    assert len(text.splitlines()) < 50
    assert all(len(line) <= 60 or line.startswith("  mtp-train ") for line in text.splitlines()), "but for examples"
    assert "exit codes: 0 done, 2 bad input, 130 interrupted" in text
    for name in COMMANDS:
        assert f"\n  {name} " in text
        assert main([name, "--help"]) == 0
        told = capsys.readouterr().out
        assert told.index(f"mtp-train {name}") < told.index("xit codes")
        assert len(told.splitlines()) < 60
    assert main(["--help-all"]) == 0
    text = capsys.readouterr().out
    assert "model.heads.draft_length = 4   (a whole number)" in text
    assert "trainer.accumulate_grad_batches = 1" in text


def test_unknown_commands_and_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["regenerat"], "did you mean 'regenerate'?"),
        ([], "--config is missing"),
        (["regenerate", "--limt", "3"], "did you mean --limit?"),
        (["regenerate", "--limit", "x"], "--limit is x; allowed is a whole number or null"),
        (["compare"], "prompts"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_completion_knows_commands_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    assert "inspect regenerate compare" in script
    assert "--model.heads.draft_length" in script
    assert script.endswith("mtp-train\n")


def test_bars_fit_in_60_columns_and_any_encoding() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    console = Console(file=out, width=60, force_terminal=True, color_system=None, legacy_windows=False)
    with Progress(*COLUMNS[:-1], console=console, auto_refresh=False) as bar:
        task = bar.add_task("training, 3 h 20 min left", total=20_000)
        bar.update(task, completed=1234)
        bar.refresh()
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", raw.getvalue().decode("ascii"))
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert lines
    assert all(len(line) <= 60 for line in lines)
    assert any("1234/20000" in line and "training, 3 h 20 min left" in line for line in lines)


def test_signs_that_a_terminal_lacks_are_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="latin-1", errors="strict", write_through=True))
    monkeypatch.setattr("sys.argv", ["mtp-train", "--help"])
    with pytest.raises(SystemExit) as stop:
        entry()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert stop.value.code == 0
    print("α ⟦é⟧ ×", end="")
    assert raw.getvalue().decode("latin-1").endswith("alpha [[é]] ×")


@pytest.mark.parametrize(
    ("precision", "dtype", "cpu", "warned"),
    [
        ("bf16-mixed", torch.float32, {"architecture": "x86_64", "avx512_bf16": False}, True),
        ("32-true", torch.bfloat16, {"architecture": "x86_64"}, True),
        ("32-true", torch.float32, {"architecture": "x86_64"}, False),
        ("bf16-mixed", torch.float32, {"architecture": "x86_64", "avx512_bf16": True}, False),
        ("bf16-mixed", torch.float32, {"architecture": "x86_64", "amx_bf16": True}, False),
        ("bf16-mixed", torch.float32, {"architecture": "aarch64"}, False),
        ("bf16-mixed", torch.float32, {}, False),
    ],
)
def test_emulated_half_precision_is_told(
    precision: str,
    dtype: torch.dtype,
    cpu: dict[str, Any],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    base = tiny_base("llama", tmp_path)
    base.model.to(dtype)
    warning = half_precision_warning(base, precision)
    assert (warning is not None) == warned
    if warning is not None:
        assert f"trainer.precision is {precision}" in warning
        assert "trainer.precision 32-true" in warning
