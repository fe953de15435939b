"""A Weights & Biases run that never costs anybody their work: online where that works, on disk in any case.

Knows: when to use wandb online, how long to wait for it, and how records are sent later.
Refuses to know: what is logged (`decode.telemetry`, `decode.wandb_media`).

wandb is imported where it is used: it takes a second, and most commands do without. A key is never shown or kept.
"""

import logging
import netrc
import shlex
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

Mode = Literal["online", "offline", "disabled"]
INIT_SECONDS = 25.0
"""How long to wait for wandb at the start of a run, before the run is recorded offline."""
FINISH_SECONDS = 60.0
"""How long to wait, at the end, for records that are not sent yet."""
STAGED = "staged"
"""Folder beside the records of runs, for files that are not sent yet."""
_DATA_DIR = "WANDB_DATA_DIR"
_HOST = "https://api.wandb.ai"
_REASON = 200  # characters of a message of wandb's that are passed on


def wandb_mode(environ: Mapping[str, str]) -> Mode:
    """Online only if that asks nobody anything: a key is configured, and WANDB_MODE does not forbid it."""
    mode = environ.get("WANDB_MODE", "online")
    if mode == "disabled":
        return "disabled"
    return "online" if mode == "online" and _key(environ) else "offline"


def _key(environ: Mapping[str, str]) -> str | None:
    if environ.get("WANDB_API_KEY"):
        return environ["WANDB_API_KEY"]
    host = environ.get("WANDB_BASE_URL", _HOST).split("//")[-1].split("/")[0]
    path = Path(environ.get("NETRC", Path.home() / ".netrc"))
    try:
        found = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return found[2] if found else None


class WandbRun:
    """A run being recorded. wandb writes every record to disk before it sends any, so an outage loses nothing; if
    wandb's own process dies, what is logged from then on is dropped, with a warning.

    Attributes:
        run: wandb's own object.
        folder: where its records are.
        sync: the command that sends them.
    """

    def __init__(self, run: Any, say: Callable[[str], None]) -> None:
        self.run = run
        self.folder = Path(run.settings.sync_dir)
        self.sync = sync_command(self.folder, online=not run.offline)
        self._say = say
        self._lost = False
        self._asks = True  # the server, once for each table

    def log(self, values: Mapping[str, Any]) -> None:
        """Log a row. Never raises because of wandb."""
        self.guard(lambda: self._log(dict(values)))

    def _log(self, row: dict[str, Any]) -> None:
        """Of a run that is online wandb asks the server before it takes a table, waits for the answer, and then drops
        the row. So a table that was not taken, and all that follow, become files of the run, which asks nobody."""
        if self._asks:
            try:
                self.run.log(row)
                return
            except Exception:
                if not any(map(_is_table, row.values())):
                    raise
            self._asks = False
        for name, value in row.items():
            if _is_table(value) and not value.is_bound():
                value.bind_to_run(self.run, name, self.run.step)
        self.run.log(row)

    def define_axis(self, names: str, axis: str) -> None:
        """Draw the metrics of that name (`*` for any) over the metric `axis`."""
        self.guard(lambda: self.run.define_metric(names, step_metric=axis))

    def guard(self, call: Callable[[], object]) -> None:
        """Make a call of wandb's, unless one has failed before."""
        if self._lost:
            return
        try:
            call()
        except Exception as error:  # wandb's process may be gone, which shows as errors of many kinds
            self._lost = True
            self._say(
                f"warning: wandb has stopped recording ({_first_line(error)}); the run goes on without it. "
                f"What it had by then: `{self.sync}`"
            )

    def finish(self) -> None:
        """Close the run, so that the next one of this process gets its own, and say where its records are."""
        sent = False
        if not self._lost:
            try:
                self.run.finish()
                sent = True
            except Exception as error:  # a TimeoutError, or its process is gone
                self._say(f"warning: wandb did not take all records in time ({_first_line(error)}); nothing is lost")
        if sent and not self.run.offline:
            self._say(f"wandb: {self.run.url}; should anything be missing there: {self.sync}")
        else:
            self._say(f"wandb: the records are on disk; send them with: {self.sync}")


def start_run(
    project: str,
    name: str | None,
    folder: Path,
    config: Mapping[str, Any],
    environ: MutableMapping[str, str],
    say: Callable[[str], None],
    job_type: str,
) -> WandbRun | None:
    """Start a run whose records lie in `wandb` below `folder`; None if wandb is disabled.

    Where a key is configured but refused, or nobody answers within `INIT_SECONDS`, the run is recorded offline, and one
    warning says so. wandb keeps the files of tables that are not sent yet where WANDB_DATA_DIR tells it. Unless
    somebody has chosen a place, `environ` gets one beside the other records, so that all of a run is in one folder.
    """
    import wandb

    mode, told = wandb_mode(environ), ""
    if mode == "disabled":
        return None
    if Path(environ.get(_DATA_DIR) or STAGED).name == STAGED:
        environ[_DATA_DIR] = str((folder / "wandb" / STAGED).absolute())
    given: dict[str, Any] = {
        "project": project,
        "name": name,
        "dir": folder,
        "config": dict(config),
        "job_type": job_type,
    }
    if mode == "online":
        before = _runs(folder)
        try:
            return WandbRun(wandb.init(**given, mode="online", settings=_settings(FINISH_SECONDS)), say)
        except Exception as error:  # of wandb, of the network, of a proxy
            told = _first_line(error).replace(_key(environ) or "\n", "***")
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would report on its own reporting
        for started in _runs(folder) - before:  # nothing is in it
            shutil.rmtree(started, ignore_errors=True)
    run = WandbRun(wandb.init(**given, mode="offline", settings=_settings(0.0)), say)
    if told:
        say(
            f"warning: wandb cannot be used now ({told}), so this run is recorded offline. Check the network and the "
            f"key (`wandb login --relogin` sets another); `{run.sync}` sends the records later"
        )
    return run


def sync_command(folder: Path, online: bool) -> str:
    """How to send the records in `folder`; wandb skips those of an online run unless it is told."""
    return f"wandb sync {'--include-online ' if online else ''}{shlex.quote(str(folder))}"


def _is_table(value: object) -> bool:
    import wandb

    return isinstance(value, wandb.Table)


def _settings(finish_seconds: float) -> Any:
    """Writing to disk is waited for without limit (0); wandb would cut it off, too."""
    import wandb

    return wandb.Settings(
        silent=True,  # a run says itself where its records are
        init_timeout=INIT_SECONDS,
        finish_timeout=finish_seconds,
        finish_timeout_raises=True,
    )


def _runs(folder: Path) -> set[Path]:
    return set((folder / "wandb").glob("run-*"))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:_REASON]
