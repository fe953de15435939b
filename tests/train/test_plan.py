"""The plan on paper: its sizes are those of real models, its operations those counted, its memory the estimate's."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtp.config import HeadsOptions
from mtp.heads import Heads
from mtp.initialise import new_heads
from mtp.losses import LossOptions
from mtp.objective import draft_sums
from mtp.targets import pad_for_drafts, plan_targets
from tests.tiny import VOCAB_SIZE, tiny_base
from train.cost import Devices, base_bytes, count_flops, estimate_memory
from train.plan import H100, LLAMA_8B, LLAMA_70B, ROWS, Sizes, memory, plan, table
from train.teaching import from_base

TOKENS = 500e6
TINY = Sizes(
    name="tiny", layers=4, hidden=32, intermediate=48, queries=32, keys=16, vocab=VOCAB_SIZE, draft_vocab=VOCAB_SIZE
)


@pytest.mark.parametrize("sizes", [LLAMA_8B, LLAMA_70B], ids=lambda sizes: sizes.name)
def test_parameters_are_those_of_the_model(sizes: Sizes) -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.queries // 128,
        num_key_value_heads=sizes.keys // 128,
        vocab_size=sizes.vocab,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sizes.base == sum(p.numel() for p in model.parameters())
    assert sizes.base == pytest.approx(float(sizes.name.split()[0]) * 1e9, rel=0.03)


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    return new_heads(
        HeadsOptions(kind="recurrent", draft_length=4, feature_layers=(1, 2, 3)), tiny_base("llama", tmp_path)
    )


def test_heads_have_the_parameters_of_the_plan(heads: Heads) -> None:
    assert TINY.heads == sum(p.numel() for p in heads.parameters())


def test_operations_are_those_counted(heads: Heads, tmp_path: Path) -> None:
    """Within a tenth: the first and the last tokens of a row are no anchors."""
    base, length = tiny_base("llama", tmp_path), 128
    tokens = torch.randint(VOCAB_SIZE, (2, length))
    plan_ = plan_targets(tokens, torch.ones_like(tokens, dtype=torch.bool), 4)

    def work() -> None:
        lesson = from_base(base, heads.config.feature_layers, {"tokens": tokens}, plan_, None)
        hidden = heads.unroll(lesson.features, pad_for_drafts(tokens, 4), plan_.anchors)
        draft_sums(hidden, plan_, heads.project, lesson.teach, plan_.tokens, LossOptions()).total.backward()

    counted = count_flops(work) / tokens.numel()
    assert TINY.flops(length) == pytest.approx(counted, rel=0.1)
    assert TINY.flops(2 * length) != pytest.approx(counted, rel=0.1)


def test_memory_is_the_estimate_of_a_model_that_is_there(heads: Heads, tmp_path: Path) -> None:
    """But for the precision of the base, which is 32 bits here."""
    base = tiny_base("llama", tmp_path)
    for devices in (Devices(), Devices(8), Devices(8, sharded=True)):
        there = estimate_memory(base, heads, 64, 256, devices=devices)
        paper = memory(TINY, devices, 2, 64) + base_bytes(base, devices) / 2
        assert paper == pytest.approx(there.of(128), rel=0.02)


def test_a_plan_follows_what_it_is_made_of() -> None:
    one = plan(LLAMA_8B, H100, "ddp", TOKENS, 4, 2048)
    assert one.traffic == 0
    assert one.hours == pytest.approx(TOKENS * LLAMA_8B.flops(2048) / (989e12 * 0.35) / 3600)
    assert one.memory < H100.memory
    for sizes, machine, strategy, batch, length in ROWS:
        assert plan(sizes, machine, strategy, TOKENS, batch, length).memory < 0.9 * machine.memory, "it fits"
    whole = plan(LLAMA_70B, H100, "ddp", TOKENS, 1, 2048)
    assert whole.memory > H100.memory, "and without sharding it does not"


def test_the_table_in_the_readme_is_this_one() -> None:
    readme = Path("README.md").read_text(encoding="utf-8")
    missing = [line for line in table(TOKENS) if line not in readme]
    assert not missing, "\n".join(table(TOKENS))
