"""Heads on disk: the round trip is exact, and everything that is not whole is refused with a message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp.config import HeadsConfig
from mtp.errors import UserError
from mtp.hub import CONFIG, WEIGHTS, file_hash, load_heads, read_config, save_heads, write_tensors
from tests.mtp.heads_toys import KINDS, toy_heads

VOCABULARY = torch.arange(0, 40, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_heads(toy_heads("recurrent", VOCABULARY).float(), tmp_path / "heads")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_round_trip(kind: str, vocabulary: torch.Tensor | None, tmp_path: Path) -> None:
    heads = toy_heads(kind, vocabulary).float()
    loaded = load_heads(save_heads(heads, tmp_path / "a" / "heads"))
    assert loaded.config == heads.config == read_config(tmp_path / "a" / "heads")
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert {path.name for path in (tmp_path / "a" / "heads").iterdir()} == {CONFIG, WEIGHTS, "README.md"}


def test_saving_again_replaces_the_folder_and_leaves_nothing_else(folder: Path) -> None:
    (folder / "leftover").write_text("old")
    save_heads(toy_heads("medusa").float(), folder)
    assert load_heads(folder).config.kind == "medusa"
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]
    assert not (folder / "leftover").exists()


def test_a_failed_save_leaves_the_old_heads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = file_hash(folder / WEIGHTS)
    monkeypatch.setattr("mtp.hub.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_heads(toy_heads("medusa").float(), folder)
    assert file_hash(folder / WEIGHTS) == before
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / CONFIG).read_text())
    change(document)
    (folder / CONFIG).write_text(json.dumps(document))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors and, as somebody who knows the format would, the digest with them."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    edit_config(folder, lambda d: d.update(weights_sha256=file_hash(folder / WEIGHTS)))


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "is not a folder"),
    "no config": (lambda f: (f / CONFIG).unlink(), "has no config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no model.safetensors"),
    "empty weights": (lambda f: (f / WEIGHTS).write_bytes(b""), "cannot be read"),
    "cut weights": (truncate, "cannot be read"),
    "one bit flipped": (flip, "does not match the weights_sha256"),
    "pickle instead": (lambda f: torch.save({}, f / WEIGHTS), "cannot be read"),
    "config not JSON": (lambda f: (f / CONFIG).write_text("{"), "is not JSON"),
    "config a list": (lambda f: (f / CONFIG).write_text("[]"), "lacks weights_sha256"),
    "unknown key": (lambda f: edit_config(f, lambda d: d.update(draft_lenght=3)), "did you mean 'draft_length'"),
    "missing key": (lambda f: edit_config(f, lambda d: d.pop("hidden_size")), "lacks hidden_size"),
    "text as a number": (lambda f: edit_config(f, lambda d: d.update(hidden_size="32")), "int is needed"),
    "boolean number": (lambda f: edit_config(f, lambda d: d.update(draft_length=True)), "int is needed"),
    "null": (lambda f: edit_config(f, lambda d: d.update(kind=None)), "a value is needed"),
    "unknown kind": (lambda f: edit_config(f, lambda d: d.update(kind="hydra2")), "allowed are medusa, recurrent"),
    "other kind": (lambda f: edit_config(f, lambda d: d.update(kind="medusa")), "goes with no block"),
    "no block": (lambda f: edit_config(f, lambda d: d.update(block=None)), "goes with a block"),
    "absurd size": (lambda f: edit_config(f, lambda d: d.update(hidden_size=10**9)), "hidden_size is 1000000000"),
    "newer format": (
        lambda f: edit_config(f, lambda d: d.update(format_version=99, of_tomorrow=1)),
        "format_version is 99; this version of mtp reads 1: update mtp",
    ),
    "unknown key in block": (lambda f: edit_config(f, lambda d: d["block"].update(rope=1)), "unknown key 'rope'"),
    "other draft length": (lambda f: edit_config(f, lambda d: d.update(draft_length=5)), "was edited"),
    "other fingerprint": (lambda f: edit_config(f, lambda d: d["base"].update(fingerprint="x")), "was edited"),
    "other sizes": (lambda f: edit_config(f, lambda d: d.update(hidden_size=16)), "instead of"),
    "missing tensor": (lambda f: edit_weights(f, lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    "extra tensor": (lambda f: edit_weights(f, lambda t: t.update(more=torch.ones(1))), "more is not known"),
    "wrong type": (
        lambda f: edit_weights(f, lambda t: t.update({"fc.weight": t["fc.weight"].int()})),
        "fc.weight is of type int32 instead of float32",
    ),
    "vocabulary of another type": (
        lambda f: edit_weights(f, lambda t: t.update(draft_ids=t["draft_ids"].int())),
        "draft_ids is of type int32 instead of int64",
    ),
    "other vocabulary": (lambda f: edit_weights(f, lambda t: t["draft_ids"].add_(1)), "draft vocabulary"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str, folder: Path) -> None:
    harm, message = DAMAGE[damage]
    harm(folder)
    with pytest.raises(UserError, match=message):
        load_heads(folder)


def test_a_base_may_be_moved_and_older_heads_have_no_digest_of_settings(folder: Path) -> None:
    edit_config(folder, lambda d: d["base"].update(name="elsewhere", revision="abc"))
    assert load_heads(folder).config.base.name == "elsewhere"
    edit_config(folder, lambda d: [d.pop("settings_sha256"), d.update(draft_length=5)])
    assert load_heads(folder).config.draft_length == 5


def test_config_round_trips_through_json() -> None:
    config = toy_heads("recurrent", VOCABULARY).config
    assert HeadsConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_folders_of_the_users_are_left_alone(tmp_path: Path) -> None:
    """Also one that is called as an old copy might be."""
    for name in ("heads", "heads.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("x")
    save_heads(toy_heads("medusa"), tmp_path / "heads")
    assert (tmp_path / "heads.old" / "thesis.tex").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", "heads.old"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "heads")
    for _ in range(2):
        save_heads(toy_heads("medusa"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load_heads(tmp_path / "disk" / "heads").config.kind == "medusa"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["heads"]


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="model.safetensors cannot be written"):
        write_tensors({"x": torch.ones(2)}, tmp_path / "nowhere" / "model.safetensors")
