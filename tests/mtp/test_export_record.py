"""What an exported folder says of itself: who wrote it, for which versions, what was tried; a newer one is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.export import export
from mtp.formats.tensors import CARD, RECORD, RECORD_VERSION
from tests.mtp.format_toys import base_for_formats, heads_on


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return base_for_formats(tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_says_who_wrote_it_for_whom(name: str, base: FrozenBase, tmp_path: Path) -> None:
    heads = heads_on(base, "medusa" if "medusa" in name else "recurrent")
    folder = export(heads, base, name, tmp_path / "out").folder
    record, card = json.loads((folder / RECORD).read_text()), (folder / CARD).read_text()
    assert record["format"] == name
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["transformers"] == transformers.__version__
    assert record["base"]["fingerprint"] == base.fingerprint()
    for told in (FORMATS[name].tested, FORMATS[name].written_for, f"transformers {transformers.__version__}"):
        assert told in card
    assert ("vllm serve" in card) == (name in ("eagle3", "speculators", "vllm-medusa"))
    assert ("python -m vllm.entrypoints.openai.api_server --model MODEL" in card) == ("vllm serve" in card)
    assert ModelCard(card).data.to_dict()["tags"]


RECORDS: dict[str, tuple[str, str]] = {
    "newer": (
        json.dumps({"record_version": RECORD_VERSION + 1, "more": 1, "versions": {"mtp": "9.1"}}),
        rf"record_version is {RECORD_VERSION + 1}, and this version of mtp reads {RECORD_VERSION}; .* mtp 9.1: update",
    ),
    "not JSON": ("{", "is not what export writes; copy the folder again, or remove that file"),
    "a list": ("[]", "is not what export writes"),
    "no version": ("{}", "is not what export writes"),
}


@pytest.mark.parametrize("name", ["eagle3", "custom_generate"])
def test_a_folder_of_a_newer_version_is_refused(name: str, base: FrozenBase, tmp_path: Path) -> None:
    folder = export(heads_on(base, "recurrent"), base, name, tmp_path / "out").folder
    FORMATS[name].read(folder)
    for text, message in RECORDS.values():
        (folder / RECORD).write_text(text)
        with pytest.raises(UserError, match=message):
            FORMATS[name].read(folder)
    (folder / RECORD).unlink()  # folders of other software have none
    FORMATS[name].read(folder)
