"""The heads that come with the package: small enough, whole, found by name, and of the embedded base."""

from pathlib import Path

import pytest
import torch

from mtp.errors import UserError
from mtp.hub import CARD, WEIGHTS, find_heads, load_heads, save_heads, shipped_heads
from tests.mtp.heads_toys import toy_heads

NAME = "smollm2-135m"


def test_the_heads_are_found_by_name_and_within_their_limits() -> None:
    assert NAME in shipped_heads()
    folder = find_heads(NAME)
    heads = load_heads(folder)
    assert heads.config.kind == "recurrent"
    assert heads.config.base.name == NAME
    assert heads.config.draft_length >= 4
    assert sum(parameter.numel() for parameter in heads.parameters()) <= 6_000_000
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    assert all(bool(tensor.isfinite().all()) for tensor in heads.state_dict().values() if tensor.is_floating_point())


def test_the_card_tells_data_recipe_figures_and_commands() -> None:
    card = (find_heads(NAME) / CARD).read_text()
    for word in (
        "base_model:",
        "configs/smollm2-recurrent.yaml",
        "mtp-decode bench",
        "did not help",
        "acceptance length",
    ):
        assert word in card, word


def test_a_folder_is_taken_as_it_is() -> None:
    assert find_heads("runs/mine/heads") == Path("runs/mine/heads")
    with pytest.raises(UserError, match=f"--heads nowhere is not a folder.*{NAME}"):
        load_heads(find_heads("nowhere"))


def test_weights_written_as_bfloat16_come_back_within_its_rounding(tmp_path: Path) -> None:
    heads = toy_heads("recurrent", torch.arange(0, 20, 2))
    save_heads(heads, tmp_path / "whole")
    save_heads(heads, tmp_path / "half", dtype=torch.bfloat16)
    whole, half = load_heads(tmp_path / "whole"), load_heads(tmp_path / "half")
    for name, tensor in whole.state_dict().items():
        other = half.state_dict()[name]
        assert other.dtype == tensor.dtype
        if tensor.is_floating_point():
            assert torch.allclose(other, tensor, rtol=2**-8, atol=1e-9), name
        else:
            assert torch.equal(other, tensor), name
    sizes = [(tmp_path / folder / WEIGHTS).stat().st_size for folder in ("whole", "half")]
    assert sizes[1] < sizes[0]
