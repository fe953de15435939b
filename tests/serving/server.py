"""vLLM's own server: started for a base and a draft model, asked over HTTP, read for what it counted, and stopped.

Knows: its command line, the OpenAI-style request, and the names of its metrics. Refuses to know: our engine, and what
the answers should be.

Shapes: K draft position.
"""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from decode import child
from mtp.errors import UserError

HOST = "127.0.0.1"
_SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs. That command itself ends at once in the CPU package, whose metadata it does not find."""
_NAME = "base"
_OPTIONS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "1"]
_OPTIONS += ["--no-enable-prefix-caching", "--generation-config", "vllm", "--served-model-name", _NAME]
_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_ASK_SECONDS = 600
_DRAFTS, _AT = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_LOCAL = build_opener(ProxyHandler({}))

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """Ids of the prompt as the server made them, and of the text, with that text."""

    prompt: list[int]
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Counts:
    """Steps with drafts, and [K] in how many of them a position was accepted, hence all before it."""

    steps: int
    accepted_at: list[int]

    @property
    def shares(self) -> list[float]:
        """[K] as shares of the steps."""
        return [count / max(1, self.steps) for count in self.accepted_at]

    def since(self, earlier: "Counts") -> "Counts":
        """What came after `earlier`."""
        before = earlier.accepted_at or [0] * len(self.accepted_at)
        at = [now - then for now, then in zip(self.accepted_at, before, strict=True)]
        return Counts(self.steps - earlier.steps, at)


@dataclass(frozen=True)
class Server:
    """One that answers, at `url`; what it prints goes to `log`."""

    url: str
    log: Path

    def answer(self, messages: Messages, max_tokens: int) -> Answer:
        """Greedily, and on after an end-of-sequence token: the number of tokens is then known beforehand."""
        wishes = {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
        document = self.chat(messages, max_tokens, **wishes)
        choice = document["choices"][0]
        return Answer(document["prompt_token_ids"], choice["token_ids"], choice["message"]["content"])

    def chat(self, messages: Messages, max_tokens: int, **more: Any) -> dict[str, Any]:
        """The document that answers an OpenAI-style chat completion at temperature 0."""
        asked = {"model": _NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0, **more}
        document: dict[str, Any] = json.loads(self._ask("/v1/chat/completions", json.dumps(asked).encode()))
        return document

    def counts(self) -> Counts:
        """All since it was started."""
        return read_counts(self._ask("/metrics").decode())

    def ready(self) -> bool:
        """Whether it answers yet."""
        try:
            with _LOCAL.open(f"{self.url}/health", timeout=10) as reply:
                return int(reply.status) == 200
        except (OSError, HTTPException):
            return False

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        """What it replies. UserError where it refuses, is silent for too long, or is there no more."""
        request = Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with _LOCAL.open(request, timeout=_ASK_SECONDS) as reply:
                found: bytes = reply.read()
        except HTTPError as error:
            told = error.read().decode(errors="replace")[:300]
            raise UserError(f"vLLM refuses {path} with {error.code}: {told}\n{child.last_words(self.log)}") from None
        except (OSError, HTTPException) as error:
            raise UserError(f"vLLM no longer answers ({error}). It said:\n{child.last_words(self.log)}") from None
        return found


def read_counts(metrics: str) -> Counts:
    """From the text of /metrics; zeros where nothing was drafted."""
    steps, at = 0, {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(_DRAFTS):
            steps = int(float(value))
        elif name.startswith(_AT) and (found := re.search(r'position="(\d+)"', name)):
            at[int(found[1])] = int(float(value))
    return Counts(steps, [at[position] for position in sorted(at)])


def find_port(port: int) -> int:
    """`port`, or any free one for 0. UserError where another program has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port is {port}, which cannot be used ({error}); use another, or 0 for any.") from None
        found: int = probe.getsockname()[1]
    return found


@contextlib.contextmanager
def serve(python: Path, model: Path | str, more: Sequence[str], *, port: int, log: Path, wait: int) -> Iterator[Server]:
    """A server of `model` with further options, run by the interpreter that has vLLM; stopped in the end.

    What it prints goes to `log`. UserError when it ends, or is not ready after `wait` seconds.
    """
    port = find_port(port)
    command = [str(python), "-m", _SERVER, "--model", str(model), *_OPTIONS, *more, "--host", HOST, "--port", str(port)]
    process = child.start(command, log, environment=_environment())
    server = Server(f"http://{HOST}:{port}", log)
    try:
        _wait(process, server, time.monotonic() + wait)
        yield server
    finally:
        child.end(process)


def _environment() -> dict[str, str]:
    """Ours without our packages, which the other interpreter must not import."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _SETTINGS


def _wait(process: child.Child, server: Server, until: float) -> None:
    while not server.ready():
        if process.poll() is not None:
            told = child.last_words(server.log)
            raise UserError(f"vLLM ended with {process.returncode} before it could answer:\n{told}")
        if time.monotonic() > until:
            told = child.last_words(server.log)
            raise UserError(f"vLLM is not ready in time; use a longer --wait. It said:\n{told}")
        time.sleep(1)
