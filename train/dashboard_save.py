"""The dashboard as a W&B workspace, and the comparison of runs as a W&B report.

Knows: `wandb_workspaces`, which is asked for when it is used; how a saved view is found again; what W&B answers when it
refuses. Refuses to know: which panels there are (`train.dashboard`), command lines and the environment.

A view is told by its name within a project. Ours is always `VIEW`, and a panel's id follows from its place and title.
So whoever saves the dashboard a second time changes the view that is there, and does not add another.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mtp.errors import UserError
from train.dashboard import COMPARED, COMPARISON, SECTIONS, Panel, Section, pattern

NAME, REPORT = "Acceptance length", "Comparison of draft heads"
VIEW = "mtpacceptlen"
_RETRIES, _SECONDS = 1, 15.0  # of a question to W&B
_CELL = {"w": 12, "h": 8}  # of a report's grid, which is 24 wide


def build_workspace(entity: str, project: str, sections: Sequence[Section] = SECTIONS) -> Any:
    """The workspace, not yet saved; needs no network."""
    ws, wr = _packages()
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(
                name=section.name,
                is_open=number <= 2,
                panels=[_panel(wr, panel, f"{section.name}/{panel.title}") for panel in section.panels],
                layout_settings=ws.SectionLayoutSettings(columns=2, rows=2),
            )
            for number, section in enumerate(sections, 1)
        ],
        settings=ws.WorkspaceSettings(tooltip_number_of_runs="all_runs"),
        runset_settings=ws.RunsetSettings(
            pinned_columns=["run:displayName", "summary:decode/accept_len", "summary:val/accept_len_implied"]
        ),
    )
    made._internal_name = f"nw-{VIEW}-v"
    made._internal_runset_id = _identity("runs")
    return made


def save_workspace(entity: str, project: str) -> str:
    """Create the view, or update its sections and leave what people have set about runs; returns its address."""
    ws, _ = _packages()
    made = build_workspace(entity, project)
    with answered(entity, project):
        try:
            found = ws.Workspace.from_url(
                f"https://wandb.ai/{entity}/{project}?nw={VIEW}"
            )  # any host: the key's is asked
        except ValueError as error:
            if not str(error).startswith("Workspace"):
                raise
        else:
            found.sections, found.name = made.sections, made.name
            made = found
        made.save()
        return str(made.url)


def build_report(entity: str, project: str, resolved: bool = False) -> Any:
    """A report that sets runs side by side by each of `COMPARED`, not yet saved. `resolved` asks W&B which project it
    is; without it the runs are those of the report's own project, and no network is needed."""
    _, wr = _packages()
    blocks = [
        wr.P(
            "Acceptance length τ is tokens committed per step; plain decoding is 1. Runs are grouped by what differs."
        ),
        wr.TableOfContents(),
    ]
    for title, key in COMPARED.items():
        runs = wr.Runset(name=f"by {title.lower()}", groupby=[f"config.{key}"])
        if resolved:
            runs.entity, runs.project = entity, project
        runs._id = _identity(f"report/{title}")
        cells = [_panel(wr, panel, f"report/{title}/{panel.title}") for panel in COMPARISON]
        for number, cell in enumerate(cells):
            cell.layout = wr.Layout(x=12 * (number % 2), y=8 * (number // 2), **_CELL)
        blocks += [wr.H1(title), wr.PanelGrid(runsets=[runs], panels=cells)]
    return wr.Report(entity=entity, project=project, title=REPORT, blocks=blocks, width="fluid")


def save_report(entity: str, project: str) -> str:
    """Create the report, or bring the newest of its title up to date; returns its address."""
    import wandb

    made = build_report(entity, project, resolved=True)
    with answered(entity, project):
        found = [one for one in wandb.Api().reports(f"{entity}/{project}") if one.display_name == REPORT]
        if found:
            made.id = max(found, key=lambda one: str(one.updated_at)).id
        made.save()
        return str(made.url)


def default_entity() -> str:
    """Whose key it is."""
    import wandb

    with answered("?", "?"):
        return str(wandb.Api().default_entity)


@contextmanager
def answered(entity: str, project: str) -> Iterator[None]:
    """Bounded waits, and a UserError for what W&B or the network answers."""
    import wandb

    wandb.setup(wandb.Settings(x_graphql_retry_max=_RETRIES, x_graphql_timeout_seconds=_SECONDS, silent=True))
    try:
        yield
    except Exception as error:  # of many packages: wandb, its transport, the network
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "project" in told.lower() and ("not found" in told or "does not exist" in told):
            raise UserError(
                f"--project is {project}, and {entity} has no project of that name that this key may see; a run with "
                f"--run.wandb_project {project} creates it, --entity names another owner."
            ) from error
        raise UserError(
            f"the dashboard was not saved: W&B says {told[:200]!r}; check the network and the key (`wandb login "
            "--relogin` sets another), or look at it with --dry-run."
        ) from error


def _panel(wr: ModuleType, panel: Panel, place: str) -> Any:
    if panel.kind == "table":
        made = wr.WeavePanelSummaryTable(table_name=panel.metrics[0])
    elif panel.kind == "page":
        made = wr.MediaBrowser(title=panel.title, media_keys=list(panel.metrics), num_columns=1)
    elif panel.kind == "bars":
        made = wr.BarPlot(title=panel.title, metrics=list(panel.metrics))
    else:
        made = wr.LinePlot(
            title=panel.title,
            x=panel.x,
            log_y=panel.log_y or None,
            plot_type="pct-area" if panel.kind == "shares" else None,
            **_drawn(panel),
        )
    made._id = _identity(place)
    return made


def _drawn(panel: Panel) -> dict[str, Any]:
    """By name, or by a pattern where the names depend on the run."""
    if not any(metric.endswith("*") for metric in panel.metrics):
        return {"y": list(panel.metrics)}
    return {"metric_regex": "|".join(pattern(metric) for metric in panel.metrics)}


def _identity(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:12]


def _packages() -> tuple[ModuleType, ModuleType]:
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError(
            "mtp-train dashboard needs the package wandb-workspaces, which is not installed; "
            "`pip install wandb-workspaces` brings it."
        ) from None
    return ws, wr
