"""`mtp-decode push`: heads to the Hub, with a card.

Knows: the options, and how to tell what is sent. Refuses to know: tokens, which the Hub's client finds by itself, so
that none stands on a command line.
"""

import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from decode.report import as_json
from mtp.card import read_metadata
from mtp.errors import UserError
from mtp.hub import find_heads, load_heads
from mtp.hub_access import HubAccess
from mtp.share import CARD, FILES, check_target, prepare, publish, scratch


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `mtp-decode push`."""
    add = parser.add_argument
    add("--heads", type=str, help="folder of heads, such as runs/demo/heads")
    add("--repo", type=str, help="where to: you/name; it is made where it is missing")
    add("--license", type=str | None, help="of the heads, as the Hub spells it: apache-2.0, mit, other, unknown, …")
    base = "you/base or you/base@revision: the base on the Hub, if the heads name one that only this machine has"
    add("--base-model", type=str | None, help=base)
    add("--private", action="store_true", help="make the repository private, and refuse one that is not")
    add("--revision", type=str | None, help="branch to send to; it is made where it is missing")
    add("--commit-message", type=str | None, help="of the commit")
    add("--create-pr", action="store_true", help="as a pull request")
    add("--dry-run", action="store_true", help="show what would be sent, and ask nobody")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")


def run(options: Namespace) -> None:
    """`mtp-decode push`."""
    for name in ("heads", "repo"):
        if options[name] is None:
            raise UserError(f"--{name} is missing; use --heads FOLDER --repo YOU/NAME.")
    check_target(options.repo, options.revision, create_pr=options.create_pr)
    folder = find_heads(options.heads)
    config = load_heads(folder).config  # whole, or nothing is sent
    with scratch() as build:
        prepare(folder, config, build, options.repo, license=options.license, base_model=options.base_model)
        metadata = read_metadata((build / CARD).read_text(encoding="utf-8"))
        if "license" not in metadata:
            raise UserError(
                "--license is missing, and the heads' card states none; say under which licence you give them, as in "
                "--license apache-2.0 (--license unknown says that you do not know)."
            )
        report: dict[str, Any] = {
            "repo": options.repo,
            "revision": options.revision or "main",
            "private": options.private,
            "files": {name: (build / name).stat().st_size for name in FILES},
            "card": metadata,
            "commit": None if options.dry_run else _send(build, options),
        }
    _tell(report)
    if options.json:
        print(as_json(report), flush=True)


def _send(build: Path, options: Namespace) -> str:
    done = publish(
        build,
        options.repo,
        HubAccess(),
        revision=options.revision,
        private=options.private or None,
        commit_message=options.commit_message,
        create_pr=options.create_pr,
    )
    return done.pr_url or done.commit_url


def _tell(report: dict[str, Any]) -> None:
    size = sum(report["files"].values()) / 1e6
    done = "would be sent" if report["commit"] is None else "sent"
    kind = ", private" if report["private"] else ""
    files = ", ".join(report["files"])
    print(f"{done}: {files} ({size:.1f} MB) to {report['repo']}, {report['revision']}{kind}", file=sys.stderr)
    for key, value in report["card"].items():
        print(f"  {key}: {', '.join(map(str, value)) if isinstance(value, list) else value}", file=sys.stderr)
    if report["commit"] is None:
        return
    print(f"commit: {report['commit']}", file=sys.stderr)
    if report["revision"] == "main" and "/discussions/" not in report["commit"]:
        print(f'use: mtp-decode generate --heads {report["repo"]} --prompt "Why is the sky blue?"', file=sys.stderr)
