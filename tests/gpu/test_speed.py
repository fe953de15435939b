"""Speed on an accelerator: the same bench as on a CPU, and the parts of it that depend on the device.

`pytest -m gpu tests/gpu/test_speed.py -s` prints the table of the heads that ship, in float32 and bfloat16.
"""

import json
from pathlib import Path

import pytest
import torch

from decode import Decoder
from decode.cli import main
from mtp.config import HeadsOptions
from mtp.initialise import new_heads
from tests.tiny import tiny_base

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bench_of_the_heads_that_ship(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompts", "configs/prompts/demo_heldout.jsonl", "--limit", "6", "--max-new-tokens", "128"]
    sides = ["--against", "plain,transformers,lookup", "--device", "cuda", "--dtype", dtype, "--json"]
    assert main(["bench", "--heads", "smollm2-135m", *prompts, *sides]) == 0
    shown = capsys.readouterr()
    with capsys.disabled():
        print(shown.err)
    report = json.loads(shown.out.splitlines()[-1])
    assert report["device"].startswith("cuda")
    assert report["results"][0]["accept_len"] > 1
    assert report["costs"]["forward_bandwidth"] <= 1.2 * report["costs"]["read_bandwidth"]


def test_draft_length_auto_and_lookup_on_a_gpu(tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path).to("cuda")
    heads = new_heads(HeadsOptions(draft_length=3), base)
    decoder = Decoder(base, heads.to("cuda").bind(base.embedding, base.output_matrix))
    plain = decoder.generate("the user", max_new_tokens=40, draft_length=0, ignore_eos=True)
    for options in ({"draft_length": "auto"}, {"lookup": 4}):
        assert decoder.generate("the user", max_new_tokens=40, ignore_eos=True, **options).token_ids == plain.token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_cuda_graphs(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The base's own argmax at every place, or one that ties with it; and a step takes less time than without."""
    said: list[str] = []
    where = {"device": "cuda", "dtype": dtype, "on_progress": said.append}
    decoders = [Decoder.from_pretrained("smollm2-135m", compile=mode, **where) for mode in ("on", "off")]  # type: ignore[arg-type]
    recorded, base = decoders[0].base, decoders[1].base
    assert not said
    assert recorded.kernels is None
    assert recorded.steps is not None
    seconds = []
    for decoder in decoders:
        decoder.generate("Why is the sky blue?", max_new_tokens=16)  # what is recorded is recorded here
        stats = decoder.generate("Why is the sky blue?", max_new_tokens=128, ignore_eos=True).stats
        seconds.append(stats.seconds["verify"] / stats.steps)
    result = decoders[0].generate([1, 4093, 198, 1], max_new_tokens=128, ignore_eos=True)
    tokens = torch.tensor([[1, 4093, 198, 1, *result.token_ids]], device="cuda")
    logits = base.logits(base.forward(tokens).hidden)[0, 3:-1]
    chosen = logits.gather(1, tokens[0, 4:, None])[:, 0]
    assert float((logits.max(-1).values - chosen).max()) < (0.01 if dtype == "float32" else 0.5)
    with capsys.disabled():
        print(
            f"\n{dtype}: a forward takes {1e3 * seconds[0]:.2f} ms as a CUDA graph, {1e3 * seconds[1]:.2f} ms without"
        )
    assert seconds[0] < seconds[1]
