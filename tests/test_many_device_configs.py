"""The configs for several devices: every key is one that mtp-train knows, and has a comment with its true default."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.fit import parse
from train.inspect_cli import InspectCLI

PATHS = [Path("configs/one-node-8-gpus.yaml"), Path("configs/fsdp-70b-several-nodes.yaml")]
# Trainer's own defaults are null where Lightning decides; and this needs the machine to know.
IN_WORDS = {"trainer.precision": "32-true", "trainer.val_check_interval": 1.0, "trainer.accumulate_grad_batches": 1}
OF_THE_MACHINE = {"data.cache_dir", "data.train"}


def keys(path: Path) -> Iterator[tuple[str, str]]:
    """Each key with a value of its own, dotted, and the comment on its line."""
    place: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r"( *)([\w]+): *([^#]*)(?:# (.*))?$", line)
        if found is None:
            assert not line.strip() or line.lstrip().startswith("#"), line
            continue
        place = [(depth, key) for depth, key in place if depth < len(found[1])] + [(len(found[1]), found[2])]
        if found[3].strip():
            yield ".".join(key for _, key in place), found[4] or ""


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_key_is_known_and_its_default_told(path: Path) -> None:
    cli = parse(["--config", str(path)], InspectCLI)  # unknown keys and values are errors; nothing is fetched
    defaults = cli.parser.get_defaults()
    seen = dict(keys(path))
    assert len(seen) > 25
    for key, comment in seen.items():
        told = re.search(r"; (?:default (\S+)|no default)", comment)
        assert told is not None, f"{key}: {comment}"
        if key in OF_THE_MACHINE:
            continue
        assert told[1] is not None, key
        word = told[1].rstrip(",:")
        default: Any = IN_WORDS[key] if key in IN_WORDS else defaults[key]
        assert plain(word) == default, f"{key}: {comment}"


def plain(word: str) -> Any:
    value = yaml.safe_load(word)
    try:
        return float(value) if isinstance(value, str) and "e" in value else value
    except ValueError:
        return value


def test_an_unknown_key_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(PATHS[0].read_text().replace("draft_length:", "draft_lenght:"))
    with pytest.raises(Exception, match="draft_lenght"):
        parse(["--config", str(path)], InspectCLI)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_commands_in_it_name_it(path: Path) -> None:
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert sum(f"--config {path}" in line for line in comments) >= 2
    assert any("torchrun" in line for line in comments)
    assert any("srun" in line for line in comments)
