"""Heads on the Hub: their folder downloaded from there, and sent there.

Knows: the three files of such a folder, in which order they are fetched, and what a repository must be like before
anything is sent. Refuses to know: what is in the weights (`mtp.hub`), and accounts: the Hub's client finds the token.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from mtp.card import amend_card, make_card, named_base
from mtp.config import HeadsConfig
from mtp.errors import UserError
from mtp.hub_access import HubAccess, reason

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
DIGEST = "weights_sha256"
"""Key of config.json beside the fields of `HeadsConfig`."""
FILES = (CONFIG, WEIGHTS, CARD)
"""All that is ever fetched or sent."""
MESSAGE = "Heads for multi-token prediction"


class _Bar(tqdm):
    """A progress bar for terminals only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        shown = {**kwargs, "disable": kwargs.get("disable") or None}
        super().__init__(*args, **shown)  # type: ignore[no-untyped-call]


def fetch(repo_id: str, revision: str | None, access: HubAccess, *, force_download: bool = False) -> Path:
    """The folder with heads of the Hub in the client's cache. The config is read before the weights are fetched, which
    in a repository of something else may be large. UserError where the Hub does not give them."""
    at = f"@{revision}" if revision else ""
    told = f"--heads {repo_id}{at} is no folder on this machine, and from the Hub it was not to be had"

    def snapshot(revision: str | None, files: tuple[str, ...]) -> Path:
        with _explained(told, access):
            found = snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=list(files),
                force_download=force_download,
                token=access.token,
                cache_dir=access.cache_dir,
                local_files_only=access.local_files_only,
                tqdm_class=_Bar,
            )
        return Path(found)

    folder = snapshot(revision, (CONFIG,))
    if not _is_ours(folder / CONFIG):
        raise UserError(
            f"--heads {repo_id}{at} is on the Hub, but its {CONFIG} is not that of heads; name the repository of heads "
            "that mtp wrote, not that of a base, and import those of other software with mtp-decode import."
        )
    return snapshot(folder.name, FILES)  # the folder has the name of the commit


def _is_ours(path: Path) -> bool:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and DIGEST in document


def prepare(
    folder: Path, config: HeadsConfig, build: Path, repo_id: str, *, license: str | None, base_model: str | None
) -> None:
    """The files as they will be on the Hub, in the empty folder `build`: the weights as they are in `folder`, a base
    that others can find, and a card with its metadata. UserError where one of them cannot be made."""
    check_repo(repo_id)
    base = named_base(config.base, base_model)
    shutil.copyfile(folder / WEIGHTS, build / WEIGHTS)
    document = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (build / CONFIG).write_text(json.dumps({**document, "base": asdict(base)}, indent=2) + "\n", encoding="utf-8")
    try:
        card = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        card = make_card(config)
    card = amend_card(card, config, license=license, base=base, place=repo_id)
    (build / CARD).write_text(card, encoding="utf-8")


def publish(
    build: Path,
    repo_id: str,
    access: HubAccess,
    *,
    revision: str | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Send a prepared folder in one commit; the repository and the branch `revision` are made where they are missing.

    private: of a new repository; True also refuses one that others can read. UserError where the Hub refuses.
    """
    check_target(repo_id, revision, create_pr=create_pr)
    api = HfApi(token=access.token)
    with _explained(f"--repo {repo_id}", access, sending=True):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and api.model_info(repo_id).private is False:
            raise UserError(
                f"--repo {repo_id} exists and can be read by everybody, but private was asked for; nothing was sent. "
                "Make it private in its settings on the Hub, or name another."
            )
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=build,
            allow_patterns=list(FILES),
            revision=revision,
            commit_message=commit_message or MESSAGE,
            create_pr=create_pr,
        )


def check_target(repo_id: str, revision: str | None, *, create_pr: bool) -> None:
    """UserError where heads cannot be sent to, whatever the Hub says."""
    check_repo(repo_id)
    if create_pr and revision is not None:
        raise UserError(f"--revision is {revision}, but a pull request goes to the main branch; leave one of them out.")


def check_repo(repo_id: str) -> None:
    """UserError unless that can be a name on the Hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        told = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"--repo is {repo_id!r} ({told}); write it as owner/name.") from None


@contextmanager
def _explained(told: str, access: HubAccess, *, sending: bool = False) -> Iterator[None]:
    """What the client raises as one sentence. Without its own exception behind it, which may show a token."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the HTTP library too, whose classes differ between releases of the client
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk
        raise UserError(f"{told}: {reason(error, access, sending=sending)}.") from None


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
