"""The folder for transformers' `custom_generate`: the engine's own tokens, in a process that has no `mtp`."""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.decoder import Decoder
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.export import export
from mtp.formats.interface import Content
from mtp.formats.payload.generate import Draws, Run, generate, is_another, load_heads, settle
from mtp.heads import Heads
from tests.mtp.format_toys import VOCABULARY, base_for_formats, heads_on
from tests.mtp.heads_toys import KINDS
from tests.tiny import save_tiny

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
    assert not is_another(base.model, heads.config.to_json())
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
    assert "were trained for" not in done.stderr


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


NAN = float("nan")
ODD: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0.0, -1.0, NAN, 2, "a", 1, 0.5, 1e-3, 1e30)),
    *({"top_k": value} for value in (-1, 2.5, "a", 0, 1, 10**6)),
    *({"top_p": value} for value in (-0.1, "a", 0.0, 1e-45, 0.3, 1.0, 2.0)),
    *({"min_p": value} for value in (-0.1, 2.0, NAN, "a", 0.0, 0.3, 1.0)),
    {"top_p": 0.0, "min_p": 1.0, "temperature": 0.01},
    {"max_new_tokens": 0},
    {"max_new_tokens": "a"},
    {"max_length": len(PROMPT)},
]


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> tuple[FrozenBase, Path]:
    """A base, and heads for it as written."""
    folder = tmp_path_factory.mktemp("recurrent")
    base, heads = made("recurrent on llama", folder)
    return base, export(heads, base, "custom_generate", folder / "out").folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", ODD, ids=str)
def test_odd_settings_are_refused_or_mean_what_they_mean_to_transformers(
    asked: dict[str, Any], recurrent: tuple[FrozenBase, Path]
) -> None:
    base, folder = recurrent
    told = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    length = {} if "max_length" in asked else {"max_new_tokens": 1}
    settings = {**length, "do_sample": True, **asked}
    try:
        theirs = base.model.generate(torch.tensor([PROMPT]), **settings, **told)
    except (ValueError, TypeError, RuntimeError):
        with pytest.raises(ValueError, match=f"^{next(iter(asked))} is .*; use "):
            settle(base.model, None, settings, len(PROMPT))
        return
    found = settle(base.model, None, settings, len(PROMPT))
    run = Run(base.model, load_heads(base.model, folder), found, Draws(0))
    torch.testing.assert_close(run.law(theirs.logits[0][0].float()), theirs.scores[0][0].softmax(-1))


@pytest.mark.filterwarnings("ignore")
def test_settings_of_sampling_do_not_matter_greedily(recurrent: tuple[FrozenBase, Path]) -> None:
    base, folder = recurrent
    odd = {"temperature": -1.0, "top_p": -1.0, "min_p": 9.0, "top_k": -1}
    theirs = base.model.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, **odd)
    assert payload(base, folder, odd) == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [1, 7, 30])
@pytest.mark.parametrize(
    "asked", [{}, {"max_length": 40}, {"max_new_tokens": 3}, {"max_length": 40, "max_new_tokens": 5}]
)
def test_as_many_tokens_as_transformers_gives(
    length: int, asked: dict[str, Any], recurrent: tuple[FrozenBase, Path]
) -> None:
    base, _ = recurrent
    theirs = base.model.generate(torch.full((1, length), 5), do_sample=False, eos_token_id=[], **asked)
    assert settle(base.model, None, asked, length)["max_new_tokens"] == theirs.shape[1] - length


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        *(({"draft_length": value}, "draft_length is .* 0 to 3, a whole number") for value in ("2", 2.0, True, -1, 4)),
        *(({"seed": value}, "seed is .*whole number from 0") for value in ("a", 1.5, -1, True)),
        ({"heads": 3}, "heads is 3; give heads="),
        ({"heads": None}, "heads is missing"),
        ({"input_ids": PROMPT}, "input_ids is .*a tensor"),
        ({"input_ids": torch.tensor(PROMPT)}, "input_ids is .*a tensor"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; use a token id"),
        ({"token_type_ids": torch.zeros(1, 7)}, "token_type_ids cannot be honoured"),
        ({"token_type_ids": torch.zeros(1, 1)}, "token_type_ids cannot be honoured"),
        ({"position_ids": torch.arange(1, 8)[None]}, "position_ids cannot be honoured here, unless they are 0 to 6"),
        ({"position_ids": 0}, "position_ids cannot be honoured"),
        ({"attention_mask": [[1] * 7]}, "attention_mask hides tokens"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_kind(asked: dict[str, Any], told: str, recurrent: tuple[FrozenBase, Path]) -> None:
    base, folder = recurrent
    given = {"input_ids": torch.tensor([PROMPT]), "heads": str(folder), "max_new_tokens": 3}
    with pytest.raises(ValueError, match=told):
        generate(base.model, **(given | asked))


def test_what_changes_nothing_is_taken(recurrent: tuple[FrozenBase, Path]) -> None:
    base, folder = recurrent
    text = torch.tensor([PROMPT])
    plain = generate(base.model, text, heads=str(folder), max_new_tokens=LENGTH)
    given = {"position_ids": torch.arange(len(PROMPT))[None], "attention_mask": torch.ones_like(text)}
    ends = {"eos_token_id": torch.tensor(base.eos_token_ids)}
    assert torch.equal(generate(base.model, text, heads=folder, max_new_tokens=LENGTH, **given, **ends), plain)


def test_another_base_of_the_same_sizes_is_told(recurrent: tuple[FrozenBase, Path], tmp_path: Path) -> None:
    """The text is that base's own; the heads' own base is none, in whatever precision."""
    base, folder = recurrent
    other = AutoModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path / "other", seed=1)).eval()
    with pytest.warns(UserWarning, match=f"were trained for {base.name}, and .*others: .*fewer drafts are accepted"):
        found = generate(other, torch.tensor([PROMPT]), heads=str(folder), max_new_tokens=LENGTH)
    assert torch.equal(found, other.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = AutoModelForCausalLM.from_pretrained(base.name, dtype=dtype).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_heads(own, folder)
