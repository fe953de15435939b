"""Several processes of a run without paying for their imports each time: they are forks of one that has everything.

`python -m tests.train.ranks` reads jobs, one JSON line each, and starts each as torchrun or Slurm would: so many
processes that find their place in the environment.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ranks:
    """The server, as a test sees it. Close it, and everything that it started ends."""

    def __init__(self) -> None:
        alien = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in alien}
        self._running: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, arguments: list[str], said: Path, count: int = 2) -> list[int]:
        """Begin `mtp-train` with these arguments in `count` processes; their ids. What they say goes to a file."""
        assert self._process.stdin is not None
        if self._running:  # a test that failed has left them
            self._kill()
            self.codes()
        self._process.stdin.write(json.dumps({"arguments": arguments, "said": str(said), "count": count}) + "\n")
        self._process.stdin.flush()
        self._running = self._answer()
        return self._running

    def codes(self) -> list[int]:
        """Wait for the ends of what was started; negative is a signal."""
        self._running = []
        return self._answer()

    def run(self, arguments: list[str], said: Path, count: int = 2) -> str:
        """All of it; what was said."""
        self.start(arguments, said, count)
        codes = self.codes()
        assert codes == [0] * count, f"{codes}\n{said.read_text()[-4000:]}"
        return said.read_text()

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        found: list[int] = json.loads(self._process.stdout.readline())
        return found

    def _kill(self) -> None:
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._kill()
        self._process.kill()
        self._process.communicate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def rank_process(arguments: list[str], said: str, place: dict[str, str]) -> Iterator[int]:
    """Fork; the child runs and never comes back."""
    pid = os.fork()
    if pid:
        yield pid
        return
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.environ.update(place)
    code = 70
    try:
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        from train.cli import main

        rank_zero_only.rank = int(place["LOCAL_RANK"])
        if arguments[0].startswith("tests."):  # a function of the tests in place of mtp-train
            module, name = arguments[0].split(":")
            getattr(importlib.import_module(module), name)(*arguments[1:])
            code = 0
        else:
            sys.argv = ["mtp-train", *arguments]
            code = main(arguments)
        used = resource.getrusage(resource.RUSAGE_SELF)
        print("PEAK", used.ru_maxrss * 1024, "bytes", round(used.ru_utime + used.ru_stime, 1), "seconds")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import train.cli  # noqa: F401

    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        places = {"WORLD_SIZE": str(job["count"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(job["count"])}
        pids = [
            next(rank_process(job["arguments"], job["said"], places | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(job["count"])
        ]
        print(json.dumps(pids), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
