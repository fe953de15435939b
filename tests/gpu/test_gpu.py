"""The same path on an accelerator; run with `pytest -m gpu`."""

import json
from pathlib import Path

import pytest
import torch

from decode import Decoder
from decode.check import CheckSettings, check
from decode.cli import main
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.hub import load_heads, save_heads
from mtp.initialise import new_heads
from mtp.tree import TokenTree
from mtp.tree_mask import TreeMask
from tests.tiny import FAMILIES, exact_base, tiny_base, tiny_model
from tests.train.runs import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_train_and_decode_on_a_gpu(precision: str, tmp_path: Path) -> None:
    run = train(tmp_path, trainer__accelerator="gpu", trainer__devices=1, trainer__precision=precision)
    heads = load_heads(run / "heads")
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    decoder = Decoder.from_pretrained(run / "heads", device="cuda", dtype="bfloat16")
    for temperature in (0.0, 1.0):
        result = decoder.generate("what is 2 and 3?", max_new_tokens=24, temperature=temperature, seed=0)
        assert result.stats.committed == len(result.token_ids) > 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_train_on_a_rounded_base_on_a_gpu(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    more = {"model__base__dtype": "bfloat16", "model__base__quantise": kind, "model__decode__prompts": None}
    run = train(tmp_path, trainer__accelerator="gpu", trainer__devices=1, trainer__precision="bf16-mixed", **more)
    assert {p.dtype for p in load_heads(run / "heads").parameters()} == {torch.float32}


def test_greedy_on_a_gpu_is_the_base_under_teacher_forcing(tmp_path: Path) -> None:
    """Every committed token is the base's argmax in a recomputation, or within 0.1 of it in bf16 logits."""
    run = train(tmp_path, trainer__accelerator="gpu", trainer__devices=1)
    decoder = Decoder.from_pretrained(run / "heads", device="cuda", dtype="bfloat16")
    base: FrozenBase = decoder.base
    prompt = [5, 9, 12, 7]
    ids = decoder.generate(prompt, max_new_tokens=64).token_ids
    tokens = torch.tensor([prompt + ids], device="cuda")
    logits = base.logits(base.forward(tokens).hidden)[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids, device="cuda").unsqueeze(1)).squeeze(1)
    assert float((logits.max(-1).values - chosen).max()) < 0.1


# ---- trees, reproducible mode and check ------------------------------------------------------------------------------

PROMPT = [5, 9, 12, 7]
TREES = tuple(family for family in FAMILIES if family not in ("mistral", "gemma3"))


def exact_decoder(device: str, kind: str = "medusa") -> Decoder:
    """float64 on any device: sums in another order differ by 1e-15, which turns no draw and no maximum."""
    base = exact_base("qwen2").to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads = new_heads(HeadsOptions(kind=kind, draft_length=3), base)  # type: ignore[arg-type]
    return Decoder(base, heads.double())


@pytest.mark.parametrize("family", TREES)
def test_tree_masks_on_a_gpu(family: str) -> None:
    base, tree = exact_base(family).to("cuda"), TokenTree(torch.tensor([7, 8, 9, 10, 11]), (0, 0, 2, 1, 3))
    base.require_trees()
    block = torch.tensor([[6, *tree.tokens.tolist()]], device="cuda")
    prompt, cache = torch.tensor([PROMPT], device="cuda"), base.new_cache()
    base.forward(prompt, cache=cache)
    mask = TreeMask(tree.visible().to("cuda"), torch.tensor(tree.depths, device="cuda"))
    hidden = base.forward(block, cache=cache, tree=mask).hidden[0]
    for row in range(6):
        path = block[:, [0, *tree.path(row)]]
        alone = base.forward(torch.cat([prompt, path], dim=1)).hidden[0, -1]
        torch.testing.assert_close(hidden[row], alone, atol=1e-9, rtol=1e-9)
    length = len(PROMPT)
    cache.keep(length, [length, length + 2, length + 3, length + 5])
    step = base.forward(prompt, cache=cache).hidden[0]
    text = torch.cat([prompt, block[:, [0, 2, 3, 5]], prompt], dim=1)
    torch.testing.assert_close(step, base.forward(text).hidden[0, -length:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", TREES)
def test_the_probe_of_trees_allows_for_bfloat16(family: str) -> None:
    base = FrozenBase.from_model(tiny_model(family).bfloat16().to("cuda"), None, family)
    base.require_trees()
    assert base._tree_fault is None


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
@pytest.mark.parametrize("shape", ["3,2,1", "dynamic:12"])
def test_trees_on_a_gpu_change_nothing_but_speed(kind: str, shape: str) -> None:
    """Greedy text as without trees; sampled text as on the CPU, since the draws are made there."""
    here, there = exact_decoder("cuda", kind), exact_decoder("cpu", kind)
    plain = here.generate(PROMPT, max_new_tokens=48, draft_length=0, ignore_eos=True)
    tree = here.generate(PROMPT, max_new_tokens=48, tree=shape, ignore_eos=True)
    assert tree.token_ids == plain.token_ids
    assert tree.stats.drafted > tree.stats.steps
    sampled = [d.generate(PROMPT, max_new_tokens=48, tree=shape, temperature=1.0, seed=3) for d in (here, there)]
    assert sampled[0].token_ids == sampled[1].token_ids
    assert sampled[0].stats.histogram == sampled[1].stats.histogram


def test_reproducible_text_is_the_same_for_every_k_and_on_every_device() -> None:
    texts = set()
    for decoder in (exact_decoder("cuda"), exact_decoder("cpu"), exact_decoder("cuda", "recurrent")):
        for more in ({"draft_length": 0}, {"draft_length": 1}, {"draft_length": 3}, {"tree": "2,2"}):
            request = {"max_new_tokens": 48, "temperature": 1.0, "reproducible": True, "ignore_eos": True} | more
            texts.add(tuple(decoder.generate(PROMPT, seed=5, **request).token_ids))
    assert len(texts) == 1
    other = exact_decoder("cuda").generate(PROMPT, seed=6, max_new_tokens=48, temperature=1.0, reproducible=True)
    assert tuple(other.token_ids) not in texts


def test_check_passes_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_base("qwen2", tmp_path)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(kind="medusa", draft_length=2), base), tmp_path / "heads")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the user"}\n{"prompt": "what is it?"}\n')
    code = main(
        ["check", "--heads", str(tmp_path / "heads"), "--prompts", str(tmp_path / "prompts.jsonl"), "--seed", "3"]
        + ["--samples", "600", "--max-new-tokens", "16", "--device", "cuda", "--dtype", "float32", "--json"]
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {finding["name"] for finding in document["checks"] if not finding["passed"]} == set()
    assert code == 0


def test_check_in_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    """What a user of a GPU gets by default. With few texts, float error must not look like a wrong law."""
    folder = tiny_base("qwen2", tmp_path).name
    base = FrozenBase.from_pretrained(folder, dtype="bfloat16", device="cuda")
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(kind="medusa", draft_length=2), base).to(torch.bfloat16)
    findings = check(Decoder(base, heads), CheckSettings(prompts=["the user"], samples=200, max_new_tokens=16))
    failed = {finding.name for finding in findings if not finding.passed}
    assert failed <= {"law, negative control: resample from p"}
