"""What commands show: help, completion, narrow terminals, narrow encodings, progress, and how they stop."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

from decode import check_cli, cli, lab, parser
from decode.completion import script
from decode.evidence import Finding
from decode.sides import Side
from decode.stream import Stream
from decode.terminal import Terminal, clock
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.tiny import tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    base = tiny_base("llama", folder)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=3), base), folder / "heads")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("the", "an ant", "a")))
    return folder


class Narrow(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


Begin = Callable[[], tuple[Narrow, Narrow]]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """From its call on stdout and stderr are terminals of 60 columns (pytest sets its own behind the fixtures)."""

    def begin() -> tuple[Narrow, Narrow]:
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("LINES", "40")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        out, err = Narrow(), Narrow()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return begin


def too_wide(text: str, columns: int = 60) -> list[str]:
    """The lines that have no room, as they stand after codes and carriage returns."""
    lines = [part for line in CODE.sub("", text).split("\n") for part in line.split("\r")]
    return [line for line in lines if cell_len(line) > columns]


# ---- help ----------------------------------------------------------------------------------------------------------


def test_help_needs_no_torch() -> None:
    code = "import sys; from decode.cli import main; main(['--help']); assert not {'torch', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("examples:") < done.stdout.index("commands:")
    assert "130 interrupted" in done.stdout


@pytest.mark.parametrize("name", list(parser.COMMANDS))
def test_help_begins_with_examples_that_parse(name: str, narrow: Begin) -> None:
    out, _ = narrow()
    assert cli.main([name, "--help"]) == 0
    shown = out.getvalue()
    assert shown.index("examples:") < shown.index("options:")
    assert "130 interrupted" in shown
    assert "[options]" in shown.splitlines()[0]
    for example in parser.COMMANDS[name].examples:
        assert example in shown
        arguments = shlex.split(example.partition(">")[0])
        parser.parse([name, *arguments])
    prose = [line for line in shown.splitlines() if not line.startswith(f"  {parser.PROG} ")]
    assert not too_wide("\n".join(prose))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["genrate"], "the command is 'genrate'; use one of generate, chat, "),
        (["genrate"], "did you mean 'generate'?"),
        ([], "the command is missing; use one of generate, chat, "),
        (["generate", "--max-new-token", "3"], "--max-new-token 3; did you mean --max-new-tokens?"),
        (["generate", "--max_new_tokens=3"], "did you mean --max-new-tokens?"),
        (["generate", "--temprature", "1", "--sed", "2"], "did you mean --temperature? did you mean --seed?"),
        (["bench", "--zzz"], "mtp-decode bench --help lists the options."),
        (["chat", "--heads", "smollm2-135"], "did you mean smollm2-135m?"),
        (["chat", "--base", "/nowhere/smolm2-135m"], "Did you mean 'smollm2-135m'?"),
        (["generate", "--heads", "x", "--prompt", "x", "--verify", "blok"], "did you mean 'block'?"),
        (["export", "--heads", "x", "--output", "y", "--format", "eagle"], "did you mean 'eagle3'?"),
        (
            ["chat", "--heads", "x", "--colour", "onn"],
            "--colour is 'onn'; use one of auto, on, off; did you",
        ),
        (["chat", "--heads", "x", "--compile", "of"], "did you mean 'off'?"),
    ],
)
def test_did_you_mean(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_heads_in_another_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (folder / "head", folder.with_name(folder.name + "x") / "heads"):
        assert cli.main(["generate", "--heads", str(wrong), "--prompt", "x"]) == 2
        assert f"did you mean {folder / 'heads'}?" in capsys.readouterr().err


# ---- completion ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """What bash offers for the last of the words."""
    path = tmp_path_factory.mktemp("completion") / "script"
    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert cli.main(["completion"]) == 0
        path.write_text(sys.stdout.getvalue())
    finally:
        sys.stdout = out

    def offered(*words: str) -> list[str]:
        line = f"source {path}; COMP_WORDS=({shlex.join(['mtp-decode', *words])}); COMP_CWORD={len(words)}; "
        shown = subprocess.run(
            ["bash", "-c", line + '_mtp_decode; printf "%s\\n" "${COMPREPLY[@]}"'],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert shown.stderr == ""
        return shown.stdout.split()

    return offered


def test_completion(completion: Callable[..., list[str]]) -> None:
    assert completion("ge") == ["generate"]
    assert set(completion("")) == {*parser.COMMANDS, "--help"}
    assert completion("generate", "--max-n") == ["--max-new-tokens"]
    assert completion("export", "--max-n") == []
    assert completion("chat", "--heads", "") == ["smollm2-135m"]
    assert completion("bench", "--verify", "m") == ["match"]
    assert "eagle3" in completion("export", "--format", "")
    assert "in-base" in completion("import", "--format", "")
    assert "in-base" not in completion("export", "--format", "")
    assert completion("generate", "--prompts", "") == []  # the shell's own: files


def test_every_option_is_completed(completion: Callable[..., list[str]]) -> None:
    for name in parser.COMMANDS:
        assert set(completion(name, "--")) == set(parser.flags(parser.command_parser(name)))


def test_a_script_of_another_program() -> None:
    made = script("mtp-train", {"fit": ["--config"]}, {"--config": ["a.yaml"]})
    assert "complete -o default -o bashdefault -F _mtp_train mtp-train" in made
    subprocess.run(["bash", "-n"], input=made, text=True, check=True)


# ---- 60 columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "bench", "lab", "check"])
def test_60_columns_hold_everything(folder: Path, narrow: Begin, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = (
        "chi-square, block, K = 3",
        "p-value 0.1234, 300 texts of 4 tokens, 12 cells; resampling from p fails at 1e-12",
    )
    monkeypatch.setattr(check_cli, "findings", lambda *_: iter([Finding(real[0], True, real[1])] * 8))
    out, err = narrow()
    heads = ["--heads", str(folder / "heads"), "--compile", "off"]
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "4"]
    args = {
        "generate": [*heads, "--prompt", "the", "--max-new-tokens", "4", "--verbose"],
        "bench": [*heads, *prompts, "--against", "plain"],
        "lab": ["--p", "0.1,0.2,0.3,0.4", "--q", "0.4,0.3,0.2,0.1"],
        "check": [*heads, "--samples", "300", "--max-new-tokens", "4"],
    }[command]
    assert cli.main([command, *args]) in (0, 1)
    assert not too_wide(out.getvalue())
    assert not [line for line in too_wide(err.getvalue()) if "/" not in line]  # paths stay whole
    assert out.getvalue()


def test_a_bar_with_rate_and_time_left(narrow: Begin) -> None:
    _, err = narrow()
    terminal = Terminal()
    with terminal.tracked(3, "prompts") as advance:
        for _ in range(2):
            advance("12345 tok/s")
        terminal.say("a line beside it")
    shown = CODE.sub("", err.getvalue())
    assert "2/3" in shown
    assert re.search(r"2/3 \d+\.\d(/s| s each), 0:0\d left 12345 tok/s", shown)
    assert "a line beside it\n" in shown
    assert not too_wide(err.getvalue())


def test_a_clock() -> None:
    assert [clock(seconds) for seconds in (0.4, 65, 3599.6, 7209)] == ["0:00", "1:05", "1:00:00", "2:00:09"]


@pytest.mark.parametrize("terminal", [Terminal(), Terminal(quiet=True)])
def test_no_bar_where_nobody_sees_it(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Narrow() if terminal.quiet else io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with terminal.tracked(2, "prompts") as advance, terminal.waiting("x"):
        advance()
    assert err.getvalue().strip() == ""


# ---- quiet, verbose, colours ----------------------------------------------------------------------------------------


def test_quiet_and_verbose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--heads", str(folder / "heads"), "--prompt", "the", "--max-new-tokens", "4"]
    args += ["--compile", "off"]
    assert cli.main(args) == 0
    usual = capsys.readouterr()
    assert cli.main([*args, "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert (quiet.out, quiet.err) == (usual.out, "")
    assert cli.main([*args, "--verbose"]) == 0
    verbose = capsys.readouterr()
    assert verbose.out == usual.out
    assert re.search(r"\[\d+\.\d s\] base .*llama-0: 0\.0 M parameters, cpu, float32", verbose.err)
    assert "recurrent, K = 3" in verbose.err


@pytest.mark.parametrize("more", [[], ["--prompts"]])
def test_colours_on_a_terminal_only(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    prompt = ["--prompts", str(folder / "prompts.jsonl"), "--batch-size", "2"] if more else ["--prompt", "the user"]
    args = ["generate", "--heads", str(folder / "heads"), *prompt, "--max-new-tokens", "12", "--compile", "off"]
    assert cli.main(args) == 0
    plain = capsys.readouterr()
    assert "\x1b" not in plain.out
    assert cli.main([*args, "--colour", "on"]) == 0
    coloured = capsys.readouterr()
    assert "\x1b[" in coloured.out
    assert CODE.sub("", coloured.out) == plain.out
    assert "underlined: accepted draft, bold: recovered, plain: bonus" in coloured.err
    for variable, expected in (("", True), ("1", False)) if not more else ():
        monkeypatch.setenv("NO_COLOR", variable)
        monkeypatch.setenv("TERM", "xterm")
        terminal = Narrow()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            assert cli.main(args) == 0
        assert ("\x1b[" in terminal.getvalue()) == expected


# ---- encodings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "bench", "lab"])
def test_a_terminal_that_shows_ascii_only(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    heads = ["--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "3"]
    args = ["--p", ".1,.9", "--q", ".4,.6"] if command == "lab" else heads
    args += ["--against", "plain", "--compile", "off"] if command == "bench" else []
    args += ["--json", "--compile", "off"] if command == "generate" else []
    before = signal.getsignal(signal.SIGINT)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            patch.setattr(sys, "argv", ["mtp-decode", command, *args])
            with pytest.raises(SystemExit) as ended:
                cli.entry()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 0
    shown, told = (bytes(stream.buffer.getvalue()).decode("ascii") for stream in (out, err))  # type: ignore[attr-defined]
    assert shown
    assert "\\u" not in shown + told  # spelt, as in "alpha"
    if "--json" in args:
        assert json.loads(shown.splitlines()[-1])


def test_a_real_process_in_a_narrow_locale(folder: Path) -> None:
    """What Python itself prints and reads: arguments, stdout, and a prompt file."""
    prompts = folder / "emoji.jsonl"
    prompts.write_text(json.dumps({"prompt": "👩‍🚀 שלום é"}, ensure_ascii=False), encoding="utf-8")
    args = ["generate", "--heads", str(folder / "heads"), "--prompts", str(prompts), "--max-new-tokens", "3", "--json"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONWARNDEFAULTENCODING": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-W", "error::EncodingWarning:decode", "-m", "decode", *args],
        env=environment, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode("ascii"))["results"][0]["prompt"] == "👩‍🚀 שלום é"


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_modules_are_loaded() -> None:
    """The signal comes at the first import of torch."""
    code = (
        "import builtins, os, signal, sys; from decode import cli; real = builtins.__import__\n"
        "def hooked(name, *rest):\n"
        "    if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = hooked; sys.argv = ['mtp-decode', 'generate', '--prompt', 'x']; cli.entry()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "\ninterrupted; nothing was begun.\n"


def interrupt_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, count: int) -> None:
    """SIGINT behind the `count`-th call of a method."""
    calls, real = [], getattr(owner, name)

    def noted(*args: object, **named: object) -> object:
        result = real(*args, **named)
        calls.append(name)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, noted)


def test_ctrl_c_ends_bench_behind_the_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, Side, "measure", 3)  # in the second prompt
    args = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "3", "--against", "plain", "--json"]
    args += ["--compile", "off"]
    assert cli.main(["bench", "--heads", str(folder / "heads"), *args]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["num_prompts"] == 2
    assert "stopping after this prompt; Ctrl-C again leaves at once" in err
    assert "interrupted: these are 2 of 3 prompts; the same command measures all of them." in err


def test_ctrl_c_keeps_the_findings_of_check(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(*_: object) -> Iterator[Finding]:
        yield Finding("first", True, "as it should be")
        raise KeyboardInterrupt

    monkeypatch.setattr(check_cli, "findings", findings)
    assert cli.main(["check", "--heads", str(folder / "heads"), "--json"]) == 130
    out, err = capsys.readouterr()
    assert (json.loads(out)["passed"], json.loads(out)["interrupted"]) == (False, True)
    assert "nothing is certified; the same command starts again" in err
    assert "lossless as far" not in err


def test_ctrl_c_keeps_the_texts_of_generate(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["generate", "--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl"), "--limit", "1"]
    args += ["--max-new-tokens", "6", "--logit-bias", "2=-inf", "--draft-length", "0", "--compile", "off"]
    assert cli.main(args) == 0
    first = capsys.readouterr().out
    interrupt_at(monkeypatch, Stream, "add", 8)  # in the second text
    assert cli.main([*args[:5], *args[7:]]) == 130
    out, err = capsys.readouterr()
    assert out.startswith(first)
    assert "8 in 8 steps" in err
    assert "interrupted: 1 of 3 prompts are done; with --output FILE the same command would go on." in err


def test_a_second_ctrl_c_leaves_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Terminal(quiet=True).stoppable("this") as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_the_lab_behind_an_anchor(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, lab, "Anchor", 2)
    args = ["--heads", str(folder / "heads"), "--prompt", "the", "--max-new-tokens", "8", "--json", "--seed", "1"]
    assert cli.main(["lab", *args]) == 130
    out, err = capsys.readouterr()
    assert len(json.loads(out)["anchors"]) == 2
    assert "interrupted after 2 anchors; the same command starts again." in err


def test_messages_of_faulty_options_are_not_ours_to_lose() -> None:
    with pytest.raises(UserError, match="top_k"):
        parser.parse(["generate", "--top-k", "x"])
