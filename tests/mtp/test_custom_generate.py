"""The folder for transformers' `custom_generate`: the engine's own tokens, in a process that has no `mtp`."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.decoder import Decoder
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.export import export
from mtp.formats.interface import Content
from mtp.formats.payload.generate import Draws, Run, load_heads, settle
from mtp.heads import Heads
from tests.mtp.format_toys import VOCABULARY, base_for_formats, heads_on
from tests.mtp.heads_toys import KINDS

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{kind} on llama": ("llama", kind, {}) for kind in KINDS},
    **{f"{kind} on gpt_neox": ("gpt_neox", kind, {}) for kind in ("recurrent", "sequential", "parallel")},
    "recurrent on gpt2": ("gpt2", "recurrent", {}),
    "recurrent on qwen3, EAGLE-3.1": ("qwen3", "recurrent", {"eagle31_norms": True}),
    "recurrent on gemma3, which slides": ("gemma3", "recurrent", {"draft_ids": VOCABULARY}),
    "sequential, MiMo's order": ("qwen2", "sequential", {"concat_order": "hidden_embed", "draft_ids": VOCABULARY}),
    "medusa, an output each": ("llama", "medusa", {"own_output": "each", "draft_ids": VOCABULARY}),
    "recurrent, own output": ("llama", "recurrent", {"own_output": "one"}),
    "hydra of two layers": ("llama", "hydra", {"num_layers": 2, "draft_ids": VOCABULARY}),
    "medusa of two layers": ("llama", "medusa", {"num_layers": 2, "feature_layers": (2,)}),
}
PROMPT = [5, 9, 13, 21, 9, 30, 31]
LENGTH = 24
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_k": 0},
    "warm": {"temperature": 1.7, "top_k": 0},
    "top-k": {"temperature": 1.3, "top_k": 12},
    "top-p": {"temperature": 1.5, "top_k": 0, "top_p": 0.8},
    "min-p": {"temperature": 2.0, "top_k": 0, "min_p": 0.05},
}


def made(case: str, folder: Path) -> tuple[FrozenBase, Heads]:
    family, kind, fields = CASES[case]
    base = base_for_formats(folder / "base", family)
    return base, heads_on(base, kind, **fields)


def payload(base: FrozenBase, folder: Path, settings: dict[str, Any], seed: int = 0, k: int = 3) -> list[int]:
    """What the written code generates after PROMPT, without transformers in between."""
    asked = {"max_new_tokens": LENGTH, "eos_token_id": list(base.eos_token_ids), **settings}
    with torch.no_grad():
        found = settle(base.model, None, asked, len(PROMPT))
        run = Run(base.model, load_heads(base.model, folder), found, Draws(seed))
        text: list[int] = run.to_end(torch.tensor([PROMPT]), k, None)[0].tolist()
    return text[len(PROMPT) :]


@pytest.mark.parametrize("case", CASES)
def test_it_drafts_and_decodes_as_the_engine_does(case: str, tmp_path: Path) -> None:
    """Every kind: logits when written; greedily, and with a seed, the engine's very tokens."""
    base, heads = made(case, tmp_path)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    assert {path.name for path in folder.rglob("*")} >= {"custom_generate", "generate.py", "draft_heads.py"}
    assert not list(folder.rglob("__pycache__"))
    decoder = Decoder(base, heads)
    greedy = decoder.generate(PROMPT, max_new_tokens=LENGTH)
    assert payload(base, folder, {}) == greedy.token_ids
    for seed in range(3):
        drawn = decoder.generate(PROMPT, max_new_tokens=LENGTH, temperature=1.0, seed=seed)
        assert payload(base, folder, {"do_sample": True, **SAMPLING["plain"]}, seed) == drawn.token_ids


@pytest.mark.parametrize("name", SAMPLING)
def test_the_same_seed_gives_the_same_text_under_all_settings(name: str, tmp_path: Path) -> None:
    """The rule and the order of draws are the engine's, so equal texts over many seeds are an equal law."""
    base = base_for_formats(tmp_path / "base")
    # Heads near the base, so that drafts are kept, recovered and topped up by bonus tokens.
    heads = heads_on(base, "medusa")
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(0.1)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    decoder, kept, steps = Decoder(base, heads), 0, 0
    for seed in range(20):
        drawn = decoder.generate(PROMPT, max_new_tokens=LENGTH, seed=seed, **SAMPLING[name])
        assert payload(base, folder, {"do_sample": True, **SAMPLING[name]}, seed) == drawn.token_ids, seed
        kept, steps = kept + drawn.stats.accepted, steps + drawn.stats.steps
    assert 0 < kept < 3 * steps


def test_the_negative_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal texts tell something: drawing the recovered token from p in place of the residual changes some."""

    def from_p(self: Run, drafts: Tensor, q: Tensor, p: Tensor) -> tuple[int, Tensor]:
        kept, _ = right(self, drafts, q, p)
        return kept, self.draws.token(p[kept])

    base, heads = made("medusa on llama", tmp_path)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    right = Run.judge
    monkeypatch.setattr(Run, "judge", from_p)
    drawn = [Decoder(base, heads).generate(PROMPT, max_new_tokens=LENGTH, temperature=1.0, seed=s) for s in range(5)]
    found = [payload(base, folder, {"do_sample": True, **SAMPLING["plain"]}, seed) for seed in range(5)]
    assert found != [one.token_ids for one in drawn]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_any_draft_length(k: int, tmp_path: Path) -> None:
    base, heads = made("recurrent on llama", tmp_path)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    drawn = Decoder(base, heads).generate(PROMPT, max_new_tokens=LENGTH, temperature=1.0, seed=4, draft_length=k)
    assert payload(base, folder, {"do_sample": True, **SAMPLING["plain"]}, 4, k) == drawn.token_ids


CLEAN = """
import json, sys
sys.modules["mtp"] = None  # importing it is an error from here on
import torch
from transformers import AutoModelForCausalLM
base, folder, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
found = []
for settings in ({}, {"do_sample": True, "top_k": 0, "seed": 3}):
    settings = {**settings, "max_new_tokens": 24, "custom_generate": folder, "trust_remote_code": True}
    out = model.generate(torch.tensor([prompt]), **settings)
    found.append(out[0, len(prompt):].tolist())
found.append(model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):].tolist())
told = []
for settings in ({"num_beams": 2}, {"repetition_penalty": 1.2}, {"draft_length": 9}, {"top_kk": 3}):
    try:
        model.generate(torch.tensor([prompt]), custom_generate=folder, trust_remote_code=True, **settings)
    except ValueError as error:
        told.append(str(error))
print(json.dumps({"found": found, "told": told, "decode": "decode" in sys.modules}))
"""


def test_a_clean_process_offline(tmp_path: Path) -> None:
    base, heads = made("recurrent on llama", tmp_path)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", CLEAN, base.name, str(folder), json.dumps(PROMPT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    decoder = Decoder(base, heads)
    greedy = decoder.generate(PROMPT, max_new_tokens=LENGTH)
    drawn = decoder.generate(PROMPT, max_new_tokens=LENGTH, temperature=1.0, seed=3)
    assert report["found"] == [greedy.token_ids, drawn.token_ids, greedy.token_ids]
    assert len(report["told"]) == 4
    for name, told in zip(("num_beams", "repetition_penalty", "draft_length", "top_kk"), report["told"], strict=True):
        assert name in told
    assert report["decode"] is False


def test_nothing_of_mtp_is_imported(tmp_path: Path) -> None:
    base, heads = made("medusa of two layers", tmp_path)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    for path in (folder / "custom_generate").iterdir():
        assert not re.search(r"^\s*(import|from) mtp", path.read_text(), re.MULTILINE), path


def test_strict_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, heads = made("recurrent on llama", tmp_path)
    folder = export(heads, base, "custom_generate", tmp_path / "out").folder
    code = folder / "custom_generate" / "draft_heads.py"
    code.write_text(code.read_text() + "\n# edited\n")
    with pytest.raises(UserError, match="is not the code that this version writes"):
        FORMATS["custom_generate"].read(folder)
    right = FORMATS["custom_generate"]

    def wrong(heads: Heads, base: FrozenBase) -> Content:
        content = right.content(heads, base)
        swapped = torch.cat(content.tensors["attention.q_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
        return replace(content, tensors=content.tensors | {"attention.q_proj.weight": swapped})

    monkeypatch.setitem(FORMATS, "custom_generate", replace(right, content=wrong))
    with pytest.raises(UserError, match="other logits"):
        export(heads, base, "custom_generate", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_text_that_cannot_be_taken(tmp_path: Path) -> None:
    base, _ = made("recurrent on llama", tmp_path)
    for asked, message in (
        ({"attention_mask": torch.tensor([[0, 1]])}, "hides tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"logits_processor": [None]}, "logits_processor cannot be honoured"),
    ):
        with pytest.raises(ValueError, match=message):
            settle(base.model, None, asked, 2)
