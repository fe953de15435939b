"""Heads of any kind for transformers' `generate(custom_generate=…)`: the weights, and the code that decodes with them.

The code is `mtp.formats.payload` and `mtp.fingerprint`, with the imports between these files made relative. It runs
offline, in a process that has torch and transformers and no `mtp`.

Knows: which files are written, and how the written ones are run to be compared. Refuses to know: how they decode.

Shapes: T position, K draft position, D hidden, F features, V vocabulary, Vd draft vocabulary.
"""

import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.config import HeadsConfig
from mtp.errors import UserError
from mtp.formats.interface import Content, Format, Lent
from mtp.formats.tensors import CONFIG, WEIGHTS, Expected, check_tensors, read_document, read_tensors
from mtp.heads import Heads, build_heads

_PACKAGE = Path(__file__).parents[1]
_FILES = ("formats/payload/generate.py", "formats/payload/draft_heads.py", "fingerprint.py")
_CODE = "custom_generate"
CODE_FILES = tuple(f"{_CODE}/{Path(name).name}" for name in _FILES)
"""The code, by its path in the folder."""
_IMPORT = re.compile(r"^from mtp\.(?:\w+\.)*(\w+) import", re.MULTILINE)
_KINDS = ("recurrent", "sequential", "parallel", "hydra", "medusa")  # that `payload/draft_heads.py` knows


def _fault(heads: Heads, base: FrozenBase) -> str | None:
    if heads.config.kind not in _KINDS:
        return f"holds {', '.join(_KINDS)} heads, and these are {heads.config.kind} ones"
    return None if heads.config.base.name else "names the base, and these heads do not say theirs"


def _content(heads: Heads, base: FrozenBase) -> Content:
    return Content(config={"heads": heads.config.to_json()}, tensors=dict(heads.state_dict()), texts=_texts())


def _texts() -> dict[str, str]:
    """The code by its path in the folder, with relative imports."""
    pairs = zip(CODE_FILES, _FILES, strict=True)
    texts = {path: (_PACKAGE / name).read_text(encoding="utf-8") for path, name in pairs}
    return {path: _IMPORT.sub(r"from .\1 import", text) for path, text in texts.items()}


@dataclass(frozen=True)
class PayloadReader:
    """The folder's own `draft_heads.py`, run on its weights."""

    code: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def logits(self, features: Tensor, tokens: Tensor, drafts: Tensor, lent: Lent) -> Tensor:
        """See `mtp.formats.interface.Reader`. The anchors come in two parts, as in decoding."""
        tensors = {name: t.float() if t.is_floating_point() else t for name, t in self.tensors.items()}
        heads = self.code.DraftHeads(self.config, tensors, lent.embedding, lent.output_matrix)
        for part in (slice(0, len(tokens) // 2), slice(len(tokens) // 2, None)):
            heads.ingest(features[part], tokens[part])
        found = torch.stack([heads.draft(k, drafts[: k - 1]) for k in range(1, len(drafts) + 2)])
        if heads.draft_ids is None:
            return found
        spread = found.new_full((len(found), self.config["vocab_size"]), -torch.inf)
        spread[:, heads.draft_ids] = found
        return spread


def read_custom(folder: Path, option: str = "--input") -> PayloadReader:
    """A written folder. UserError on anything not whole, and on code that is not what this version writes."""
    document = read_document(folder, option)
    if not isinstance(document.get("heads"), dict):
        raise UserError(f"{folder / CONFIG} lacks heads, what the weights are; write the folder again.")
    config = HeadsConfig.from_json(document["heads"], f"{folder / CONFIG}: heads")
    expected = {
        name: Expected(tuple(tensor.shape), "of the heads", torch.int64 if name == "draft_ids" else None)
        for name, tensor in build_heads(config).state_dict().items()
    }
    tensors = read_tensors(folder / WEIGHTS)
    check_tensors(tensors, expected, str(folder / WEIGHTS))
    for name, text in _texts().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} is not the code that this version writes; write the folder again.")
    return PayloadReader(_module(folder / _CODE / "draft_heads.py"), document["heads"], tensors)


def _module(path: Path) -> Any:
    """The Python file as a module, which no import finds, and which leaves no compiled file in the folder."""
    module = types.ModuleType("draft_heads")
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


CUSTOM_GENERATE = Format(
    name="custom_generate",
    written_for="transformers 5.10 and later (`generate(custom_generate=…)`)",
    tested="transformers 5.24.0",
    usage="""```python
model.generate(**tokenizer("Why is the sky blue?", return_tensors="pt"), max_new_tokens=64,
               custom_generate="{folder}", trust_remote_code=True)
```

One text at a time. `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `max_new_tokens` and `eos_token_id` are
honoured, any other setting that would change the text is refused; `seed` and `draft_length` (at most {k}) may be
given. Defaults are transformers' own (`top_k` is 50 when sampling). The text is distributed exactly as the model's
own. Read the code in `custom_generate/` before you trust it.""",
    fault=_fault,
    content=_content,
    read=read_custom,
)
