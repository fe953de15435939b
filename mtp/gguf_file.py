"""Reading a GGUF file (the format of llama.cpp) into a plain transformers model and tokenizer.

Knows: transformers' own GGUF reader and what has to be put right after it. Refuses to know: where the file comes from.
"""

import contextlib
import io
import mmap
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from mtp.errors import UserError

# llama.cpp's names of tokenizers that cut numbers into single digits before the GPT-2 rule. transformers' reader only
# installs the GPT-2 rule, which tokenizes "\n\n1" differently from what the model was trained on.
_SPLIT_DIGITS = ("smollm", "starcoder", "refact")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No log lines, warnings or progress bars of transformers inside the block; the settings come back after it.

    The Hub client's bars stay: a download of gigabytes should be seen.
    """
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def load_gguf(path: Path, *, dtype: str, name: str) -> tuple[Any, Any]:
    """Model (dequantised to `dtype`, CPU) and tokenizer of a GGUF file; `name` is what the config calls itself.

    Raises UserError when the file is not GGUF, is cut short, or holds an architecture transformers cannot read.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file (its first four bytes are not 'GGUF'); give the path of one.")
    arguments = {"gguf_file": path.name, "local_files_only": True}
    try:
        pre_tokenizer = _pre_tokenizer(path)
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # its bar here obeys no setting
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **arguments)
            model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=getattr(torch, dtype), **arguments)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, OverflowError, struct.error) as error:
        raise UserError(
            f"{path} could not be read as a GGUF language model ({one_line(error)}); it is damaged, cut short, or of "
            "an architecture this version of transformers cannot convert: fetch it again or use a transformers folder."
        ) from error
    _forget_quantisation(model, name)
    _mend_tokenizer(tokenizer, pre_tokenizer, model.config.get_text_config())
    return model, tokenizer


def one_line(error: BaseException, limit: int = 200) -> str:
    """The message of an error on one line, shortened to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _pre_tokenizer(path: Path) -> str:
    """Value of the header's `tokenizer.ggml.pre`, or "".

    Found by its bytes (length, key, type 8 = string, length, value; little-endian), as reading the whole header
    takes seconds.
    """
    key = b"tokenizer.ggml.pre"
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        pattern = struct.pack("<Q", len(key)) + key + struct.pack("<I", 8)
        start = content.find(pattern)
        if start < 0:
            return ""
        (length,) = struct.unpack_from("<Q", content, start + len(pattern))
        first = start + len(pattern) + 8
        return content[first : first + min(length, 100)].decode("utf-8", errors="replace")


def _forget_quantisation(model: Any, name: str) -> None:
    """The weights are ordinary floats by now; transformers refuses to save a model that still claims otherwise."""
    for holder in (model.config, model.config.get_text_config()):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    model.config.name_or_path = name
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path


def _mend_tokenizer(tokenizer: Any, pre_tokenizer: str, config: Any) -> None:
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and pre_tokenizer in _SPLIT_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    longest = getattr(config, "max_position_embeddings", None)
    if longest and tokenizer.model_max_length > longest:
        tokenizer.model_max_length = longest
