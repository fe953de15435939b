"""mtp/heads/README.md, followed to the letter: a copy of the project gets a new kind, which then passes the tests of
all kinds, is trained from the command line, decodes losslessly, and is saved and loaded."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from mtp.config import Kind
from mtp.heads import build_heads
from tests.mtp.heads_toys import toy_heads

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "mtp" / "heads" / "README.md").read_text(encoding="utf-8")
SCRIPT = """
import sys
from pathlib import Path
import pytest
import mtp
from decode import Decoder
from mtp.hub import load_heads
from tests.train.runs import train

here = Path.cwd()
assert Path(mtp.__file__).is_relative_to(here), mtp.__file__
chosen = ["tests/mtp/test_heads.py", "tests/mtp/test_hub.py"]
assert pytest.main(["-q", "-p", "no:cacheprovider", "-k", "gru", *chosen]) == 0
Path("work").mkdir()
run = train(Path("work"), model__heads={"kind": "gru", "draft_length": 3, "draft_vocab_size": 40})
heads = load_heads(run / "heads")
assert type(heads).__name__ == "GruHeads"
assert all(float(p.abs().max()) > 0 for p in heads.parameters()), "W was trained away from zero"
decoder = Decoder.from_pretrained(run / "heads")
for settings in ({}, {"temperature": 1.0, "seed": 3, "reproducible": True}):
    drafted = decoder.generate("what is 3 and 4?", max_new_tokens=24, **settings)
    plain = decoder.generate("what is 3 and 4?", max_new_tokens=24, draft_length=0, **settings)
    assert drafted.token_ids == plain.token_ids, settings
    assert drafted.stats.drafted > 0 == plain.stats.drafted, "the one drafts, the other does not"
print("all is well")
"""


def blocks(language: str) -> list[str]:
    """The contents of fenced blocks of a language, in order; "" are those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_guide_adds_an_architecture(tmp_path: Path) -> None:
    word, module = blocks("python")
    assert 60 <= len(module.splitlines()) <= 100, "one file, about 100 lines"
    for package in ("mtp", "decode", "train", "tests"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "pictures"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    config = tmp_path / "mtp" / "config.py"
    before = config.read_text(encoding="utf-8")
    after = re.sub(r"^Kind = .*\n", word, before, flags=re.MULTILINE)
    assert len([1 for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]) == 1, "one line"
    config.write_text(after, encoding="utf-8")
    (tmp_path / "mtp" / "heads" / "gru.py").write_text(module, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.endswith("all is well\n")


def test_the_commands_of_the_guide_are_those_of_the_project() -> None:
    lines = [line for block in blocks("") for line in block.splitlines()]
    assert [line.split()[0] for line in lines] == ["python", "mtp-train", "mtp-decode"]
    for path in re.findall(r"(?:tests|configs|mtp)/[\w/.]+\.(?:py|yaml)", GUIDE):
        assert (ROOT / path).is_file() or path == "mtp/heads/gru.py", path


def test_a_kind_without_its_file_is_found_out() -> None:
    """What the guide asks for in two places cannot be half done unseen."""
    for kind in get_args(Kind):
        assert type(toy_heads(kind)).__name__ == f"{kind.capitalize()}Heads"
    with pytest.raises(ModuleNotFoundError):
        build_heads(SimpleNamespace(kind="nothing"))  # type: ignore[arg-type]
