"""How the Hub is asked, and what its client stumbled over, in one sentence with a remedy.

Knows: what lies behind the client's exceptions, whose classes differ between its releases. Refuses to know: who asks
for what. A token is never shown: not by `repr`, and not in a message, even where the client's own would.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
_BROKEN_OFF = ("RemoteProtocolError", "ReadError", "ReadTimeout", "WriteError", "ChunkedEncodingError")
_MOST_TOLD = 200  # characters of the client's own message


@dataclass(frozen=True, kw_only=True)
class HubAccess:
    """Keywords of the Hub's client, as in transformers.

    Args:
        token: of an account; None is the one of `hf auth login` or HF_TOKEN, False is none.
        cache_dir: where downloads are kept; None is the client's own cache.
        local_files_only: take what is in that cache and ask nobody.
    """

    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    local_files_only: bool = False


USUAL = HubAccess()


def reason(error: BaseException, access: HubAccess, *, sending: bool = False) -> str:
    """Why a request failed and what to do, to follow a name and a colon. Without a full stop. sending: it was to take
    something, not to give it."""
    found = list(_chain(error))
    http = next((one for one in found if isinstance(one, HfHubHTTPError)), None)
    if http is not None:
        return without_token(_by_answer(http), access)
    if constants.HF_HUB_OFFLINE or any(isinstance(one, OfflineModeIsEnabled) for one in found):
        if sending:
            return "HF_HUB_OFFLINE forbids the network; repeat the command without that variable"
        return (
            "it is not in the Hub's local cache, and HF_HUB_OFFLINE forbids the network; load it once without that "
            "variable, or copy the folder to this machine and give its path"
        )
    if access.local_files_only:
        return (
            "it is not in the Hub's local cache, and local_files_only forbids the network; load it once without, or "
            "copy the folder to this machine and give its path"
        )
    if any("Illegal header" in str(one) or isinstance(one, UnicodeError) for one in found):
        return (
            f"the token cannot be sent, as it holds a line break or another character that tokens lack; {_LOG_IN} anew"
        )
    if any(isinstance(one, HFValidationError) for one in found):
        return without_token(f"that is no name on the Hub ({_line(error)}); write it as owner/name", access)
    if any(type(one).__name__ in _BROKEN_OFF or "Consistency check" in str(one) for one in found):
        return f"the transfer broke off; repeat the command{'' if sending else ', a download goes on where it stopped'}"
    if isinstance(error, FileNotFoundError) or any("Connect" in type(one).__name__ for one in found):
        if sending:
            return (
                "the Hub cannot be reached; look at the network (and at HF_ENDPOINT, if that is set), and repeat the "
                "command"
            )
        return (
            "the Hub cannot be reached, and its local cache does not have it; look at the network (and at HF_ENDPOINT, "
            "if that is set), or copy the folder to this machine and give its path"
        )
    return without_token(f"the Hub's client failed ({type(error).__name__}: {_line(error)})", access)


def _by_answer(error: HfHubHTTPError) -> str:
    """By the answer of a Hub that was reached."""
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"the Hub wants its conditions to be accepted ({status}); do so on its page there, and {_LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return f"the Hub has no such revision of it ({status}); name a branch, a tag or a commit that is there"
    if isinstance(error, EntryNotFoundError):
        return f"the Hub lacks a file of it ({status}): {_line(error)}"
    if status == 403:
        return f"the account may not do that (403: {_said(error)}); use a token with the right to, or another name"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return f"the Hub does not have it, or not for this account ({status}); look at the spelling, or {_LOG_IN}"
    if status == 401:
        return f"the Hub does not take the token (401); {_LOG_IN} anew"
    if status == 429:
        return "the Hub has had too many requests (429); wait some minutes and repeat the command"
    if status >= 500:
        return f"the Hub has trouble of its own ({status}); repeat the command later"
    return f"the Hub refuses ({status}): {_said(error)}"


def without_token(text: str, access: HubAccess) -> str:
    """The text without the token in use and without anything else that looks like one."""
    known = access.token if isinstance(access.token, str) else get_token()
    for part in (known or "").split():
        text = text.replace(part, "<token>")
    return re.sub(r"\bhf_\w{3,}", "<token>", text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that it came from."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _said(error: HfHubHTTPError) -> str:
    return getattr(error, "server_message", None) or _line(error)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MOST_TOLD else text[: _MOST_TOLD - 1] + "…"
