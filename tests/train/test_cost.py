"""What training costs: operations against a count by hand, and memory against a measured peak."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from mtp.losses import LossOptions
from mtp.objective import Taught, draft_sums
from mtp.targets import pad_for_drafts, plan_targets
from tests.mtp.heads_toys import BLOCK, KINDS, D, K, V, toy_heads
from tests.tiny import tiny_base
from train.cost import (
    Memory,
    check_memory,
    count_flops,
    estimate_memory,
    matrix_peak,
)

CPU = torch.device("cpu")


def test_operations_of_recurrent_heads_are_those_counted_by_hand() -> None:
    """Two operations per multiplication; backward costs twice forward, once where the input needs no gradient."""
    heads, rows, length = toy_heads("recurrent"), 2, 20
    tokens, features = torch.zeros(rows, length, dtype=torch.long), torch.randn(rows, length, 3 * D).double()
    plan = plan_targets(tokens, torch.ones(rows, length, dtype=torch.bool), K)
    p = torch.full((V,), 1 / V, dtype=torch.double)

    def work() -> None:
        hidden = heads.unroll(features, pad_for_drafts(tokens, K), plan.anchors)
        teach = lambda rows: Taught(p.expand(len(rows), V), rows * 0)  # noqa: E731
        draft_sums(hidden, plan, heads.project, teach, plan.tokens, LossOptions(chunk=7)).total.backward()

    every, anchors, taught = rows * length, plan.anchors.numel(), len(plan.teacher)
    width, kv_width = BLOCK.num_attention_heads * BLOCK.head_dim, BLOCK.num_key_value_heads * BLOCK.head_dim
    keys = (every + (K - 1) * anchors) * 2 * D * 2 * kv_width
    queries, output = K * anchors * 2 * D * width, K * anchors * width * D
    attention = K * anchors * length * width * 2
    mlp = K * anchors * 3 * D * BLOCK.intermediate_size
    fuse, project = every * 3 * D * D, taught * K * D * V
    by_hand = 2 * (3 * (keys + queries + output + attention + mlp) + 2 * (fuse + project))
    counted = count_flops(work)
    assert counted == pytest.approx(by_hand, rel=0.02)
    assert counted != pytest.approx(by_hand - 2 * 2 * project, rel=0.02), "negative control: a missing part shows"
    assert count_flops(lambda: None) == 0


def test_the_peak_is_a_speed() -> None:
    """Not much slower than a product timed here, and the same for a second look."""
    peak = matrix_peak(CPU, torch.float32, seconds=0.05)
    assert 1e8 < peak < 1e15
    assert matrix_peak(CPU, torch.float32, seconds=0.05) == pytest.approx(peak, rel=0.9)


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_grows_with_what_costs(kind: str, tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    small, large = (
        new_heads(HeadsOptions(kind=kind, draft_length=k), base)  # type: ignore[arg-type]
        for k in (1, 5)
    )
    one, five = (estimate_memory(base, heads, 64, 16) for heads in (small, large))
    assert one.fixed < five.fixed
    assert one.per_token < five.per_token
    assert estimate_memory(base, large, 64, 32).fixed > five.fixed
    assert estimate_memory(base, large, 64, 16, states=1).fixed < five.fixed
    longer = estimate_memory(base, large, 640, 16).per_token
    assert (longer > five.per_token) == (kind == "recurrent"), "only these keep all scores of their attention"
    assert five.of(100) == five.fixed + 100 * five.per_token


@pytest.mark.parametrize("batch_size", [1, 3, 4, 64])
def test_a_batch_that_is_too_large_is_refused_with_one_that_fits(batch_size: int) -> None:
    memory, length, free = Memory(fixed=2 * 10**9, per_token=10**6), 512, 4 * 10**9
    if batch_size <= 3:
        assert f"{batch_size} × 512" in check_memory(memory, batch_size, length, free)
        return
    with pytest.raises(UserError, match=f"data.batch_size {batch_size} × data.max_length 512") as caught:
        check_memory(memory, batch_size, length, free)
    found = re.search(
        r"set data.batch_size to (\d+) \(and trainer.accumulate_grad_batches to (\d+)\)", str(caught.value)
    )
    assert found is not None
    fits, accumulate = int(found[1]), int(found[2])
    check_memory(memory, fits, length, free)
    assert fits * accumulate >= batch_size
    with pytest.raises(UserError):  # the largest that does
        check_memory(memory, fits + 1, length, free)


@pytest.mark.parametrize("free", [10**9, 10**8, 2 * 10**9 + 1])
def test_where_not_even_one_row_fits_other_remedies_are_named(free: int) -> None:
    with pytest.raises(UserError, match="lower data.max_length or use a smaller base") as caught:
        check_memory(Memory(fixed=2 * 10**9, per_token=10**6), 4, 512, free)
    assert "batch_size to" not in str(caught.value)


def test_where_nobody_tells_what_is_free_nothing_is_refused() -> None:
    assert check_memory(Memory(fixed=10**15, per_token=10**9), 4, 512, None).startswith("memory: about")


MEASURE = """
import resource, sys
from train.cli import main
code = main(sys.argv[1:])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "length"), [(4, 512), (1, 2048)])
def test_the_estimate_of_memory_holds(batch_size: int, length: int, tmp_path: Path) -> None:
    """A process of its own trains five positions of the embedded base on plain text, where every token counts."""
    text = (Path("README.md").read_text() + Path("LICENSE").read_text()) * 6
    lines = [json.dumps({"text": text[i * 3000 : i * 3000 + length * 8]}) for i in range(12)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    options: dict[str, object] = {"data.train": tmp_path / "text.jsonl", "data.max_length": length}
    options |= {"data.batch_size": batch_size, "data.val_size": 0, "data.cache_dir": "null", "trainer.max_steps": 2}
    options |= {"run.dir": tmp_path / "runs", "run.wandb_project": "null", "trainer.accelerator": "cpu"}
    options |= {
        "model.features.keep": "false",
        "model.start_positions": 2000,
        "model.decode.prompts": "null",
        "model.heads.draft_length": 5,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-c", MEASURE, "--config", "configs/smollm2-recurrent.yaml", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = re.search(rf"memory  about ([\d.]+) GB at {batch_size} × {length} tokens", done.stdout)
    peak = re.search(r"PEAK (\d+)", done.stdout)
    assert told is not None
    assert peak is not None
    measured = int(peak[1]) / 1e9
    assert measured <= 4.0
    assert 0.8 < float(told[1]) / measured < 2.0, (told[1], measured)
