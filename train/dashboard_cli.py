"""`mtp-train dashboard`: the acceptance-length workspace and the comparison report of a W&B project, as code.

Knows: its options, and what is printed. Refuses to know: panels (`train.dashboard`) and W&B (`train.dashboard_save`).
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from decode.wandb_run import wandb_mode
from mtp.errors import UserError
from train import dashboard_save
from train.dashboard import COMPARED, COMPARISON, SECTIONS, Section, panels
from train.help import command_parser, read_options
from train.run import RunOptions

ABOUT = (
    "Create or update the acceptance-length dashboard of a W&B project. The same command again updates the same view."
)
EXAMPLES = ("--dry-run", "--entity me --project mtp", "--report --dry-run --json")


def run_dashboard(arguments: Sequence[str]) -> None:
    """Save the dashboard, or show what would be saved."""
    parser = command_parser("dashboard", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("--entity", type=str | None, help="team or user that owns the project; whose key it is, if not given")
    add("--project", type=str, default=RunOptions.wandb_project, help="project in W&B")
    add("--report", action="store_true", help="the report that compares runs, in place of the workspace")
    add("--dry-run", action="store_true", help="show what would be saved; needs no key and no network")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")
    options = read_options(parser, arguments)
    for name in ("entity", "project"):
        _check(name, options[name])
    if options.dry_run:
        made = _build(options.report, options.entity or "", options.project)
        document = _document(options.report, options.entity, options.project) | {"spec": _spec(made)}
    else:
        if wandb_mode(os.environ) != "online":
            raise UserError(
                "no key of W&B is configured, or WANDB_MODE forbids its use; `wandb login` sets one, and --dry-run "
                "needs none."
            )
        entity = options.entity or dashboard_save.default_entity()
        save = dashboard_save.save_report if options.report else dashboard_save.save_workspace
        url = save(entity, options.project)
        document = _document(options.report, entity, options.project) | {"url": url}
    _show(document, Console(file=sys.stderr if options.json else sys.stdout, highlight=False, soft_wrap=True))
    if options.json:
        print(json.dumps(document, ensure_ascii=False), flush=True)


def _check(name: str, value: str | None) -> None:
    if value is not None and (not value.strip() or "/" in value):
        raise UserError(f"--{name} is {value!r}; use a name without slashes, as in the address of the project.")


def _build(report: bool, entity: str, project: str) -> Any:
    build = dashboard_save.build_report if report else dashboard_save.build_workspace
    return build(entity, project)


def _spec(made: Any) -> dict[str, Any]:
    """What would be sent, as plain JSON types."""
    model = made._to_model().spec
    spec: dict[str, Any] = json.loads(model.model_dump_json(by_alias=True, exclude_none=True))
    return spec


def _document(report: bool, entity: str | None, project: str) -> dict[str, Any]:
    sections = tuple(Section(title, COMPARISON) for title in COMPARED) if report else SECTIONS
    return {
        "kind": "report" if report else "workspace",
        "name": dashboard_save.REPORT if report else dashboard_save.NAME,
        "entity": entity,
        "project": project,
        "num_panels": len(panels(sections)),
        "sections": [
            {"name": section.name, "panels": [panel.to_json() for panel in section.panels]} for section in sections
        ],
    }


def _show(document: dict[str, Any], console: Console) -> None:
    entity = document["entity"] or "(the key's own entity)"
    owner = f"{entity}/{document['project']}"
    if "url" in document:
        console.print(f"{document['kind']} saved: {document['url']}", markup=False)
        return
    console.print(f"would save the {document['kind']} {document['name']!r} in {owner}:", markup=False)
    for section in document["sections"]:
        console.print(f"\n{section['name']}", style="bold", markup=False)
        for panel in section["panels"]:
            console.print(f"  {panel['title']}  ({panel['kind']}: {', '.join(panel['metrics'])})", markup=False)
