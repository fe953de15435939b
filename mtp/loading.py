"""From the name of a base to a transformers model and tokenizer.

Knows: the four places a base can be (an embedded one, a local folder, a `.gguf` file, the Hub) and how each fails. A
local or embedded base never reaches the network. Refuses to know: what the model is used for; `mtp.base` freezes and
checks it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtp.embedded import EMBEDDED, default_home, ensure_embedded
from mtp.errors import UserError
from mtp.gguf_file import load_gguf, one_line, quiet_transformers
from mtp.suggest import did_you_mean, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")
# What transformers, the Hub client and safetensors raise for files that are missing, cut short or of another kind.
_LOAD_FAILURES = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on the CPU, its config, its tokenizer, and the commit of the Hub it came from (None for local ones)."""

    model: Any
    config: Any
    tokenizer: Any
    revision: str | None = None


def load(
    name: str,
    *,
    revision: str | None,
    dtype: str | None,
    device: torch.device,
    trust_remote_code: bool,
    home: Path | None,
    on_progress: Callable[[str], None],
) -> Loaded:
    """Find the base `name` and read it; UserError says where it was looked for and what to do.

    With `dtype` None only config and tokenizer are read, and `model` is None (a .gguf file is read whole all the same).
    """
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype is {dtype!r}; {did_you_mean(dtype, DTYPES)}")
    dtype = "float32" if dtype == "auto" and device.type == "cpu" else dtype
    if name in EMBEDDED:
        _no_revision(name, revision)
        folder = ensure_embedded(name, home or default_home({}), on_progress)
        return _from_folder(name, folder, dtype, trust_remote_code)
    path = Path(name).expanduser()
    if name and path.is_dir():
        _no_revision(name, revision)
        return _from_folder(name, path, dtype, trust_remote_code)
    if path.is_file():
        _no_revision(name, revision)
        return _from_gguf(name, path, dtype)
    _require_hub_name(name)
    return _from_hub(name, revision, dtype, trust_remote_code)


def choose_device(device: str) -> torch.device:
    """`auto` is the first CUDA device when there is one, else the CPU; anything else is torch's name of a device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # a device that cannot give a number back is of no use
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {device!r} cannot be used ({one_line(error)}); allowed: auto, cpu, cuda, cuda:N."
        ) from error
    return chosen


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise UserError(
            f"revision {revision!r} has no meaning for the local base {name!r}; remove it or give a Hub id."
        )


def _from_folder(name: str, folder: Path, dtype: str | None, trust_remote_code: bool) -> Loaded:
    if not (folder / "config.json").is_file():
        raise UserError(
            f"base {name!r}: the folder {folder} holds no config.json, so it is not a model in transformers' format; "
            "give a folder written by save_pretrained (the base, not the heads)."
        )
    arguments = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        with quiet_transformers():
            return _read(name, str(folder), dtype, arguments)
    except UserError:
        raise
    except _LOAD_FAILURES as error:
        _explain_remote_code(name, error)
        raise UserError(
            f"base {name!r} in {folder} could not be loaded ({one_line(error)}); a file is missing, cut short or not "
            "of this model: copy the folder again."
        ) from error


def _from_gguf(name: str, path: Path, dtype: str | None) -> Loaded:
    if path.suffix.lower() != ".gguf":
        raise UserError(f"base {name!r} is a file but not a .gguf one; give a .gguf file, a folder or a Hub id.")
    model, tokenizer = load_gguf(path, dtype="float32" if dtype in (None, "auto") else dtype, name=path.stem)
    return Loaded(model=model, config=model.config, tokenizer=tokenizer)


def _require_hub_name(name: str) -> None:
    """Refuse what cannot be a Hub id before anything reaches for the network."""
    looks_like_path = name.startswith(("/", "./", "../", "~", "\\")) or name.endswith(".gguf") or name.count("/") > 1
    if not looks_like_path and name.strip() and " " not in name:
        return
    raise UserError(f"base {name!r} does not exist on this machine.{_suggestion(name)} {_ways()}")


def _from_hub(name: str, revision: str | None, dtype: str | None, trust_remote_code: bool) -> Loaded:
    reachable = _hub_answers(name, revision)
    arguments = {
        "trust_remote_code": trust_remote_code,
        "revision": revision or "main",
        "local_files_only": not reachable,
    }
    try:
        with quiet_transformers():
            return _read(name, name, dtype, arguments)
    except UserError:
        raise
    except Exception as error:  # also of the HTTP library, whose classes differ between releases of the Hub client
        _explain_remote_code(name, error)
        at = f" at revision {revision!r}" if revision else ""
        place = "the Hub" if reachable else "the Hub's local cache (the Hub itself cannot be reached)"
        raise UserError(
            f"base {name!r}{at} was not found: it is no embedded base, no local folder or .gguf file, and {place} gave "
            f"this: {one_line(error).rstrip('.')}.{_suggestion(name)} {_ways()}"
        ) from error


def _hub_answers(name: str, revision: str | None) -> bool:
    """One request, so that a machine without a network falls back to the local cache at once instead of retrying."""
    try:
        HfApi().model_info(name, revision=revision, timeout=10)
    except (HfHubHTTPError, HFValidationError):
        return True  # it answered; the reason is told when loading fails
    except Exception:  # the HTTP library below the client, and so the class, differs between releases
        return False
    return True


def _suggestion(name: str) -> str:
    close = nearest(Path(name).name, EMBEDDED)
    return f" Did you mean {close!r}?" if close is not None else ""


def _ways() -> str:
    return (
        f"Without a network use an embedded base ({', '.join(sorted(EMBEDDED))}), or copy a model folder or .gguf file "
        "to this machine and give its path; for a gated Hub model log in with `hf auth login`."
    )


def _explain_remote_code(name: str, error: BaseException) -> None:
    if "trust_remote_code" in str(error):
        raise UserError(
            f"base {name!r} brings its own Python code; read that code, then pass trust_remote_code=True "
            "(--trust-remote-code on the command line) if you want to run it."
        ) from error


def _read(name: str, source: str, dtype: str | None, arguments: dict[str, Any]) -> Loaded:
    """Config first, so that the wrong kind of model is refused before its weights are read."""
    config = AutoConfig.from_pretrained(source, **arguments)
    _require_causal(name, config)
    tokenizer = AutoTokenizer.from_pretrained(source, **arguments)
    revision = getattr(config, "_commit_hash", None)
    if dtype is None:
        return Loaded(model=None, config=config, tokenizer=tokenizer, revision=revision)
    model, report = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        output_loading_info=True,
        **arguments,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise UserError(f"base {name!r} lacks {len(missing)} of its weights ({shown}); fetch or copy the model again.")
    return Loaded(model=model, config=config, tokenizer=tokenizer, revision=revision)


def _require_causal(name: str, config: Any) -> None:
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"base {name!r} is an encoder-decoder model ({kind}); only decoder-only causal models can be a base."
        )
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise UserError(
            f"base {name!r} is not a causal language model ({kind}); give one that predicts the next token."
        )
