"""What training costs: operations against a count by hand, and memory against a measured peak."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from mtp.losses import LossOptions
from mtp.objective import Taught, draft_sums
from mtp.sharding import load_sharded
from mtp.targets import pad_for_drafts, plan_targets
from tests.mtp.heads_toys import BLOCK, KINDS, D, K, V, toy_heads
from tests.tiny import save_tiny, tiny_base, tiny_model
from tests.train.ranks import Ranks
from train.cost import (
    Devices,
    Memory,
    base_bytes,
    check_memory,
    count_flops,
    estimate_memory,
    heads_bytes,
    held_bytes,
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


def test_heads_take_less_where_they_are_spread() -> None:
    """Weights, gradients and two states of 100 parameters are 1600 bytes alone."""
    assert heads_bytes(100, 2, Devices()) == 1600
    assert heads_bytes(100, 2, Devices(8)) == 2000, "a second copy of the gradients, which are averaged in it"
    assert heads_bytes(100, 2, Devices(8, sharded=True)) == 1600 // 8 + 800, "weights and gradients whole for a while"
    assert heads_bytes(100, 1, Devices(8, sharded=True)) < heads_bytes(100, 1, Devices(8))


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


def hold(folder: str) -> None:
    """In each of two processes: bytes held of a base that is spread, and how many layers are whole at a time."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    base = load_sharded(
        folder,
        mesh,
        revision=None,
        dtype="float32",
        trust_remote_code=False,
        home=None,
        on_progress=lambda _: None,
        wait=dist.barrier,
    )
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        spread = [isinstance(next(layer.parameters()), DTensor) for layer in base.layers]
        most = max(most, spread.count(False))

    for layer in base.layers:
        layer.self_attn.register_forward_pre_hook(look)
    hidden = base.forward(torch.arange(12).unsqueeze(0)).hidden
    measured = {"held": held_bytes(base), "told": base_bytes(base, Devices(2, True)), "most": most}
    measured |= {"layer": max(sum(p.nbytes for p in layer.parameters()) for layer in tiny_model("qwen2").model.layers)}
    measured |= {"fingerprint": base.fingerprint(), "hidden": float(hidden.double().sum()), "eos": base.eos_token_ids}
    print("HELD", json.dumps(measured))


def test_what_is_spread_takes_what_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """And computes the same as the whole, on both processes, of which one has read the weights."""
    save_tiny("qwen2", tmp_path / "qwen2")  # whose embedding is its output matrix
    whole = FrozenBase.from_pretrained(str(tmp_path / "qwen2"), dtype="float32", device="cpu")
    said = ranks.run(["tests.train.test_cost:hold", str(tmp_path / "qwen2")], tmp_path / "said")
    found = [json.loads(line.removeprefix("HELD ")) for line in said.splitlines() if line.startswith("HELD")]
    assert len(found) == 2
    hidden = whole.forward(torch.arange(12).unsqueeze(0)).hidden
    every = sum(p.nbytes for p in whole.model.parameters())
    assert base_bytes(whole, Devices(2)) == held_bytes(whole) == every
    for one in found:
        assert 1 <= one["most"] <= 2
        assert one["held"] + 2 * one["layer"] == pytest.approx(one["told"], rel=0.02)
        assert one["held"] < 0.8 * every, "else nothing is spread"
        assert one["fingerprint"] == whole.fingerprint()
        assert one["hidden"] == pytest.approx(float(hidden.double().sum()), rel=1e-5)
        assert tuple(one["eos"]) == whole.eos_token_ids


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_estimate_of_memory_holds_on_each_of_two(strategy: str, ranks: Ranks, tmp_path: Path) -> None:
    """As above; the processes are forks, but what they share counts in each."""
    text = (Path("README.md").read_text() + Path("LICENSE").read_text()) * 6
    lines = [json.dumps({"text": text[i * 3000 : i * 3000 + 4096]}) for i in range(12)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    options: dict[str, object] = {"data.train": tmp_path / "text.jsonl", "data.max_length": 512, "data.batch_size": 4}
    options |= {"data.val_size": 0, "data.cache_dir": "null", "trainer.max_steps": 2, "trainer.accelerator": "cpu"}
    options |= {"run.dir": tmp_path / "runs", "run.wandb_project": "null", "model.features.keep": "false"}
    options |= {"model.start_positions": 2000, "model.decode.prompts": "null", "trainer.devices": 2}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    whole = ["--config", "configs/smollm2-recurrent.yaml", *arguments, "--trainer.strategy", strategy]
    said = ranks.run(whole, tmp_path / "said")
    told = re.search(r"memory:?\s+about ([\d.]+) GB at 4 × 512 tokens on each of 2 devices", said)
    assert told is not None
    for peak in re.findall(r"PEAK (\d+)", said):
        assert 0.8 < float(told[1]) / (int(peak) / 1e9) < 2.0, (told[1], peak)
