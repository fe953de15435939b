"""What heads share with models of transformers: `save_pretrained`, `from_pretrained`, `push_to_hub`.

Knows: the names of these methods and of their keywords. Refuses to know: files (`mtp.hub`) and the Hub (`mtp.share`),
which know heads and are therefore only imported when asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from huggingface_hub import CommitInfo

from mtp.errors import UserError
from mtp.hub_access import HubAccess

if TYPE_CHECKING:
    from mtp.heads.interface import Heads

H = TypeVar("H", bound="Saved")


class Saved:
    """For `Heads` alone, which inherits it."""

    loaded_from: Path | None = None
    """The folder that the heads were read from."""

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        card: str = "",
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_kwargs: Any,
    ) -> CommitInfo | None:
        """Write `config.json`, `model.safetensors` and a card, replacing the folder as a whole.

        card: Markdown with metadata; by default the one that the heads were loaded with, as long as they are the same.
        push_to_hub: send the folder to the Hub, too, as `repo_id` (default: the folder's name); further keywords are
        those of `push_to_hub`. Returns the commit where there is one.
        """
        from mtp.hub import save_heads

        folder = save_heads(cast("Heads", self), Path(save_directory), card)
        if not push_to_hub:
            return None
        return _push(folder, repo_id or folder.name, **push_kwargs)

    @classmethod
    def from_pretrained(
        cls: type[H],
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> H:
        """Heads from a folder, by the name of those that come with the package, or from the Hub: `owner/name`.

        On the CPU in float32, and unbound: `decode.Decoder` joins them with their base. revision: a branch, tag or
        commit of theirs on the Hub, not of the base. Read strictly: UserError names what is missing, left over, of
        another shape or type, or not what the config says. Other files than safetensors are never read.
        """
        from mtp.hub import find_heads, load_heads

        access = HubAccess(token=token, cache_dir=cache_dir, local_files_only=local_files_only)
        folder = find_heads(pretrained_model_name_or_path, access, revision, force_download=force_download)
        heads = load_heads(folder).eval()
        if not isinstance(heads, cls):
            raise UserError(
                f"{pretrained_model_name_or_path} holds {heads.config.kind} heads, which are no {cls.__name__}; use "
                f"Heads.from_pretrained, or {type(heads).__name__}."
            )
        return heads

    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: str = "",
        license: str | None = None,
        base_model: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Send the heads to the Hub in one commit: weights, config and a card; returns that commit.

        repo_id: `owner/name`; it is made where it is missing. card: as for `save_pretrained`. license: of the heads,
        for the card; none is assumed. base_model: `owner/name[@revision]` of the base on the Hub, where the heads were
        trained on a copy that only this machine has. revision: the branch, made where it is missing. private: of a
        new repository; True also refuses one that others can read.
        """
        from mtp.hub import save_heads
        from mtp.share import scratch

        with scratch() as folder:
            save_heads(cast("Heads", self), folder / "heads", card)
            return _push(
                folder / "heads",
                repo_id,
                license=license,
                base_model=base_model,
                revision=revision,
                token=token,
                private=private,
                commit_message=commit_message,
                create_pr=create_pr,
            )


def _push(
    folder: Path,
    repo_id: str,
    *,
    license: str | None = None,
    base_model: str | None = None,
    token: str | bool | None = None,
    **publishing: Any,
) -> CommitInfo:
    from mtp.hub import read_config
    from mtp.share import prepare, publish, scratch

    with scratch() as build:
        prepare(folder, read_config(folder), build, repo_id, license=license, base_model=base_model)
        return publish(build, repo_id, HubAccess(token=token), **publishing)
