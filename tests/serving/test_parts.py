"""The parts of the proof that need no vLLM; these are among the tests of `make test`."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from decode import Decoder
from mtp.config import BaseRef, HeadsOptions
from mtp.errors import UserError
from mtp.formats.export import export
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.mtp.format_toys import base_for_formats, heads_on
from tests.mtp.heads_toys import toy_heads
from tests.serving.ours import Difference, count, difference, follow
from tests.serving.proof import Case, arguments, check_one_base, main, spoil
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


def test_a_control_has_to_be_noticed_by_its_drafts_and_not_by_its_texts() -> None:
    ours, gap = Counts(100, [50, 20]), Difference(1, (2, 3), 0.5)
    assert case(ours, Counts(100, [20, 3]), control=True).passed
    assert case(ours, Counts(100, [0, 0]), control=True).passed
    assert not case(ours, Counts(100, [49, 19]), control=True).passed
    assert not case(ours, Counts(100, [20, 3]), control=True, differences=[gap]).passed
    assert not case(ours, Counts(100, [20, 3]), control=True, answers=False).passed


def test_how_a_folder_is_spoiled(tmp_path: Path) -> None:
    """It can still be read, as nothing in it says which layers are right."""
    base = base_for_formats(tmp_path / "base")
    folder = export(heads_on(base, "recurrent", feature_layers=(1, 2, 3)), base, "eagle3", tmp_path / "out").folder
    spoil(folder)
    document = json.loads((folder / "config.json").read_text())
    assert document["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


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


GONE = """import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        if "busy" in sys.argv:
            self.send_response(400); self.end_headers(); self.wfile.write(b"too long")
        else:
            print("OutOfMemoryError: no room", flush=True); os._exit(9)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()"""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "vLLM no longer answers .*It said:\nOutOfMemoryError: no room"),
        (["busy"], "vLLM refuses /v1/chat/completions with 400: too long"),
    ],
)
def test_a_server_that_dies_under_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], told: str
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{GONE}")
    fake.chmod(0o755)
    with serve(fake, "base", more, port=0, log=tmp_path / "log", wait=60) as server:
        assert server.counts() == Counts(0, [])
        with pytest.raises(UserError, match=re.compile(told, re.DOTALL)):
            server.answer([{"role": "user", "content": "hello"}], 3)


@pytest.mark.parametrize("says", ["exit 0", "echo", "echo hello", "echo 1 2 3 4", "printf '\\377'", "exit 3"])
def test_a_program_that_is_no_python_with_vllm(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.serving.proof.check_one_base", lambda heads: None)
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{says}\n")
    fake.chmod(0o755)
    assert main(["--vllm", str(fake)]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: --vllm \S+ cannot import vLLM \(.+\); name the python of its environment.\n", said), (
        said
    )


def test_heads_of_several_bases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for name, base in (("one", "org/a"), ("same", "org/a"), ("other", "org/b")):
        told = BaseRef(name=base, fingerprint=f"{base}'s")
        folders.append(str(save_heads(toy_heads("medusa", base=told), tmp_path / name)))
    check_one_base(folders[:2])
    assert main(["--vllm", "/bin/true", "--heads", *folders]) == 1
    said = capsys.readouterr().err
    assert f"--heads {folders[0]} are for the base org/a, and {folders[2]} for org/b" in said
    assert "give heads of one base" in said


def test_a_server_that_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here by an interpreter without vLLM."""
    assert main(["--vllm", str(tmp_path / "python")]) == 1
    assert "name the python of its environment" in capsys.readouterr().err
    with (
        pytest.raises(UserError, match="vLLM ended with 1 before it could answer:\n.*Error"),
        serve(Path(sys.executable), "base", [], port=0, log=tmp_path / "log", wait=60),
    ):
        pass
