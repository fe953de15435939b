"""The ways in which training of heads is known to go wrong without a crash, and the message that each ends with.

A table: the fault, how it is provoked, and what is said. What has no message is a property instead, and tested where it
belongs: parameter counts (`tests/mtp/test_heads.py`), normalisation by global counts and a base that stays as it was
(`test_module.py`), separate metrics (`test_module.py`), and exact resuming (`test_cli.py`).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import train.self_test as self_test
from decode.cli import main as decode_main
from mtp.base import BaseOutput, FrozenBase
from mtp.heads import MedusaHeads
from mtp.hub import CONFIG, WEIGHTS, file_hash
from tests.train.runs import job, train
from train import chat, prepare
from train.cli import main

Provoke = Callable[[Path, pytest.MonkeyPatch], int]


def fit(folder: Path, *arguments: str, **changes: Any) -> int:
    changes = {"model__decode__prompts": None, "trainer__max_steps": 1, **changes}
    return main(["--config", str(job(folder, **changes)), *arguments])


def records(folder: Path, lines: list[dict[str, Any]]) -> str:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def talk(answer: str, question: str = "what is the ant?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def nothing_supervised(folder: Path, patch: pytest.MonkeyPatch) -> int:
    lines = [{"messages": [{"role": "user", "content": "what is the ant?"}]}] * 3
    return fit(folder, data__train=records(folder, lines), data__val_size=0)


def all_supervised(folder: Path, patch: pytest.MonkeyPatch) -> int:
    whole = chat.encode_turns

    def everything(*given: Any) -> Any:
        turns = whole(*given)
        for item in (item for items in turns for item in items):
            item.spans[:] = [(0, end) for _, end in item.spans]
        return turns

    patch.setattr(chat, "encode_turns", everything)
    return fit(folder)


def mask_late(folder: Path, patch: pytest.MonkeyPatch) -> int:
    whole = chat.encode_turns

    def moved(*given: Any) -> Any:
        turns = whole(*given)
        for item in (item for items in turns for item in items):
            item.spans[:] = [(start + 1, end) for start, end in item.spans]
        return turns

    patch.setattr(chat, "encode_turns", moved)
    return fit(folder)


def some_records_are_empty(folder: Path, patch: pytest.MonkeyPatch) -> int:
    lines = [talk(f"the ant is {i}.", f"what is {i}?") for i in range(8)] + [{"text": "a"}] * 3
    return fit(folder, data__train=records(folder, lines), data__val_size=2)


def targets_late(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """The tiny base is random, so what it knows is put in its mouth: p is sure of the token one place on."""

    class Sure(FrozenBase):
        def forward(self, tokens: torch.Tensor, **given: Any) -> BaseOutput:
            self._shown = tokens
            return super().forward(tokens, **given)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            shown = getattr(self, "_shown", None)
            if shown is None or hidden.shape[:2] != shown.shape:
                return super().logits(hidden)
            return 20.0 * torch.nn.functional.one_hot(shown, self.vocab_size).float()

    patch.setattr(self_test, "check_head", lambda base, batch: "")
    patch.setattr(prepare, "load_base", lambda options, *_: Sure.from_pretrained(options.name, device="cpu"))
    return fit(folder)


def last_head_untrained(folder: Path, patch: pytest.MonkeyPatch) -> int:
    whole = MedusaHeads._unroll

    def cut(self: MedusaHeads, *given: Any) -> torch.Tensor:
        states = whole(self, *given)
        return torch.cat([states[:, :, :-1], states[:, :, -1:].detach()], dim=2)

    patch.setattr(MedusaHeads, "_unroll", cut)
    return fit(folder, model__heads__kind="medusa")


def no_final_norm(folder: Path, patch: pytest.MonkeyPatch) -> int:
    class Without(FrozenBase):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden * torch.linspace(0.1, 3.0, hidden.shape[-1]))

    patch.setattr("mtp.base.probe", lambda *_: torch.nn.Identity())
    patch.setattr(prepare, "load_base", lambda options, *_: Without.from_pretrained(options.name, device="cpu"))
    return fit(folder)


def another_layer_when_serving(folder: Path, patch: pytest.MonkeyPatch) -> int:
    forward = FrozenBase.forward

    def off_by_one(self: FrozenBase, tokens: torch.Tensor, **given: Any) -> BaseOutput:
        if given.get("cache") is not None:
            given["feature_layers"] = [max(0, layer - 1) for layer in given["feature_layers"]]
        return forward(self, tokens, **given)

    patch.setattr(FrozenBase, "forward", off_by_one)
    return fit(folder, model__heads__kind="medusa")


def damaged_heads(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> int:
    heads = train(folder, trainer__max_steps=1, model__decode__prompts=None) / "heads"
    tensors = load_file(heads / WEIGHTS)
    change(tensors)
    save_file(tensors, heads / WEIGHTS)
    document = json.loads((heads / CONFIG).read_text())
    (heads / CONFIG).write_text(json.dumps(document | {"weights_sha256": file_hash(heads / WEIGHTS)}))
    return decode_main(["generate", "--heads", str(heads), "--prompt", "what is the ant?"])


def vocabulary_of_other_heads(folder: Path, patch: pytest.MonkeyPatch) -> int:
    return damaged_heads(folder, lambda tensors: tensors.update(draft_ids=tensors["draft_ids"] + 1))


def a_tensor_renamed(folder: Path, patch: pytest.MonkeyPatch) -> int:
    return damaged_heads(folder, lambda tensors: tensors.update(fc2=tensors.pop("fc.weight")))


def order_of_what_has_none(folder: Path, patch: pytest.MonkeyPatch) -> int:
    return fit(folder, model__heads__concat_order="hidden_embed")


def weights_missing(folder: Path, patch: pytest.MonkeyPatch) -> int:
    job(folder)
    path = folder / "llama" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    return fit(folder)


def text_of_somebody_else(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """A random base never wrote such answers."""
    return fit(folder)


def more_drafts_than_trained(folder: Path, patch: pytest.MonkeyPatch) -> int:
    heads = train(folder, trainer__max_steps=1, model__decode__prompts=None) / "heads"
    return decode_main(["generate", "--heads", str(heads), "--prompt", "what is the ant?", "--draft-length", "3"])


def little_memory(folder: Path, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(prepare, "free_memory", lambda device: 10**8)
    return fit(folder)


def little_disk(folder: Path, patch: pytest.MonkeyPatch) -> int:
    usage = shutil.disk_usage(folder)
    patch.setattr("train.feature_store.shutil.disk_usage", lambda path: usage._replace(free=1000))
    return fit(folder, model__features={"keep": True, "dir": str(folder / "kept")})


def resumed_with_other_data(folder: Path, patch: pytest.MonkeyPatch) -> int:
    run = train(folder, trainer__max_steps=3, model__decode__prompts=None)
    return fit(folder, "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), trainer__max_steps=6, data__batch_size=3)


MODES: dict[str, tuple[Provoke, int, str]] = {
    "1 mask all 0": (nothing_supervised, 2, "none of 3 records can be trained on"),
    "1 mask all 1": (all_supervised, 2, "an answer begins at the first token"),
    "2 mask off by one": (mask_late, 2, "the tokens do not decode to the answer"),
    "3 nothing left of a record": (some_records_are_empty, 0, "dropped: nothing in it is supervised (first:"),
    "4 target off by one": (targets_late, 2, "targets are out of step"),
    "4 last head never trained": (last_head_untrained, 2, "loss of draft position 2 of 2 gives no finite gradient"),
    "5 missing final norm": (no_final_norm, 2, "an output road that mtp does not know"),
    "6 feature layer off by one when serving": (
        another_layer_when_serving,
        2,
        "q of decoding differs from q of training",
    ),
    "7 draft vocabulary of other heads": (vocabulary_of_other_heads, 2, "its draft vocabulary is not the one of"),
    "8 draft vocabulary larger than the tokens seen": (lambda folder, _: fit(folder), 0, "never supervised in the"),
    "10 concatenation order": (order_of_what_has_none, 2, "heads.concat_order is hidden_embed, which recurrent heads"),
    "11 keys that do not fit": (a_tensor_renamed, 2, "fc.weight is missing; fc2 is not known"),
    "12 frozen weights not loaded": (weights_missing, 2, "lacks 1 of its weights (model.norm.weight)"),
    "13 off-policy data": (text_of_somebody_else, 0, "learn more from its own answers: mtp-train regenerate"),
    "14 recursion deeper than trained": (
        more_drafts_than_trained,
        2,
        "--draft-length is 3, but these heads were trained",
    ),
    "17 out of memory": (little_memory, 2, "of memory and 0.1 GB are free"),
    "18 disk": (little_disk, 2, "features.keep needs"),
    "19 resumed with other batches": (resumed_with_other_data, 2, "batch_size was 4 and is 3"),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_fault_is_told(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    provoke, code, message = MODES[mode]
    assert provoke(tmp_path, monkeypatch) == code
    told = capsys.readouterr()
    assert message in (told.err if code else " ".join(told.out.split()))


def test_a_sound_run_is_told_none_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The negative control of the whole table."""
    assert fit(tmp_path, model__heads__draft_vocab_size=None) == 0
    told = capsys.readouterr()
    for mode, (_, _, message) in MODES.items():
        if mode.startswith("13"):  # see the base that knows its text in test_self_test.py
            continue
        assert message not in told.err + " ".join(told.out.split()), mode
    assert told.out.count("self-test: ") == 5, "four checks and what is said of the text"


@pytest.mark.xfail(
    strict=True, reason="an answer is looked for inside its span, so a span that begins one token early passes"
)
def test_a_mask_that_begins_early_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = chat.encode_turns

    def moved(*given: Any) -> Any:
        turns = whole(*given)
        for item in (item for items in turns for item in items):
            item.spans[:] = [(start - 1, end) for start, end in item.spans]
        return turns

    monkeypatch.setattr(chat, "encode_turns", moved)
    assert fit(tmp_path) == 2
