"""The parts of the proof that need no vLLM; these are among the tests of `make test`."""

import socket
import sys
from pathlib import Path

import pytest
import torch

from decode import Decoder
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from tests.serving.ours import Difference, count, difference, follow
from tests.serving.proof import Case, arguments, main
from tests.serving.server import HOST, Counts, find_port, read_counts, serve
from tests.tiny import exact_base

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="base"} 7.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="base"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="base",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="base",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="base",position="1"} 1.7e+09
"""


def case(ours: Counts, vllm: Counts, **changes: object) -> Case:
    """One that holds, but for what is changed."""
    told = {"heads": "h", "format": "eagle3", "k": 2, "texts": 3, "differences": [], "ours_differ": [], "answers": True}
    return Case(**(told | changes), ours=ours, vllm=vllm)  # type: ignore[arg-type]


def test_metrics_are_read_and_subtracted() -> None:
    assert read_counts(METRICS) == Counts(7, [5, 2])
    assert read_counts("") == Counts(0, [])
    assert read_counts(METRICS).since(Counts(3, [2, 2])) == Counts(4, [3, 0])
    assert read_counts(METRICS).since(read_counts("")) == Counts(7, [5, 2])


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
def test_our_steps_behind_the_first_token(kind: str) -> None:
    """The text is plain decoding's, and each step gives its accepted drafts and one token more."""
    base = exact_base("llama")
    decoder = Decoder(base, new_heads(HeadsOptions(kind=kind, draft_length=3), base).double())  # type: ignore[arg-type]
    prompt = [5, 9, 12, 7]
    text, accepted = follow(decoder, prompt, 20)
    assert text == decoder.generate(prompt, max_new_tokens=20, draft_length=0, ignore_eos=True).token_ids
    assert 20 <= 1 + sum(accepted) + len(accepted) < 20 + 1 + 3
    assert count([0, 2, 1, 3], 3) == Counts(4, [3, 2, 1])


def test_where_texts_part_and_how_near_the_tokens_were() -> None:
    base = exact_base("llama")
    decoder, prompt = Decoder(base), [5, 9, 12, 7]
    text = decoder.generate(prompt, max_new_tokens=6, draft_length=0, ignore_eos=True).token_ids
    assert difference(decoder, prompt, text, list(text)) is None
    other = [*text[:4], (text[4] + 1) % base.vocab_size, text[5]]
    found = difference(decoder, prompt, text, other)
    assert found is not None
    assert (found.place, found.tokens) == (4, (text[4], other[4]))
    logits = base.logits(base.forward(torch.tensor([[*prompt, *text[:4]]])).hidden)[0, -1]
    assert found.gap == pytest.approx(float(logits[text[4]] - logits[other[4]]))
    assert found.gap > 0


def test_what_holds() -> None:
    ours, tie, gap = Counts(100, [50, 20]), Difference(1, (2, 3), 1e-4), Difference(1, (2, 3), 0.5)
    assert case(ours, ours).passed
    assert case(ours, Counts(100, [51, 19]), differences=[tie]).passed
    for wrong in (Counts(100, [53, 20]), Counts(100, [50, 17])):
        assert not case(ours, wrong).passed
    assert not case(Counts(9, [0, 0]), Counts(9, [0, 0])).passed
    for changes in ({"differences": [gap]}, {"ours_differ": [gap]}, {"answers": False}):
        assert not case(ours, ours, **changes).passed


def test_what_vllm_is_told() -> None:
    model, more = arguments("vllm-medusa", Path("heads"), "base", 3)
    assert model == "base"
    assert more[1] == '{"method": "medusa", "model": "heads", "num_speculative_tokens": 3}'
    assert arguments("speculators", Path("heads"), "base", 3) == (Path("heads"), [])


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--vllm", sys.executable, "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: --port is {port}, which cannot be used (")
    assert "use another, or 0 for any" in said
    assert find_port(0) > 0


def test_a_server_that_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here by an interpreter without vLLM."""
    assert main(["--vllm", str(tmp_path / "python")]) == 1
    assert "name the python of its environment" in capsys.readouterr().err
    with (
        pytest.raises(UserError, match="vLLM ended with 1 before it could answer:\n.*Error"),
        serve(Path(sys.executable), "base", [], port=0, log=tmp_path / "log", wait=60),
    ):
        pass
