"""What is given on command lines and in YAML: each mistake is named with its place, what is allowed and a remedy."""

from argparse import ArgumentError
from pathlib import Path

import pytest

from mtp.errors import UserError
from train.fit import TrainCLI
from train.given import check_given, explain, meant_by
from train.schema import groups, schema
from train.words import as_yaml, type_in_words


def check(*arguments: str) -> list[tuple[str, object]]:
    return [(one.key, one.value) for one in check_given(arguments, schema(), TrainCLI.options)]


def test_what_is_right_is_read_from_files_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("seed_everything: 3\nmodel:\n  heads: {kind: medusa}\ndata:\n  train: {a.jsonl: 2.0}\n")
    found = check("--config", str(path), "--data.limit=4", "--model.loss", "{kl: 1.0}", "--trainer.callbacks+=X")
    assert ("model.heads.kind", "medusa") in found
    assert ("data.train", {"a.jsonl": 2.0}) in found
    assert ("data.limit", 4) in found
    assert ("model.loss.kl", 1.0) in found
    assert check("--print_config", "--trainer.callbacks.patience", "3")


WRONG = {
    "a key": (["--model.heads.draft_lenght", "3"], "did you mean --model.heads.draft_length?"),
    "a key with =": (["--trainer.max_stepps=3"], "did you mean --trainer.max_steps?"),
    "another place": (["--model.lr", "3"], "did you mean --model.optimizer.lr?"),
    "a part left out": (["--optimizer.lr", "3"], "did you mean --model.optimizer.lr?"),
    "an option": (["--cofnig", "x"], "did you mean --config?"),
    "null": (["--data.batch_size", "null"], "allowed is a whole number: remove it for the default, 8"),
    "null without default": (["--data.train", "null"], "give a value"),
    "no value": (["--model.heads.kind"], "--model.heads.kind has no value"),
    "a file alone": (["configs/demo.yaml"], "write --config configs/demo.yaml"),
    "a word alone": (["--data.limit", "3", "4"], "'4' belongs to no option"),
    "no such file": (["--config", "configs/dem.yaml"], "did you mean configs/demo.yaml?"),
    "in a group": (["--model.heads", "{kin: medusa}"], "did you mean --model.heads.kind?"),
    "nothing like it": (["--qqq", "1"], "--help-all lists every key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_with_what_was_meant(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(UserError) as error:
        check(*arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


IN_FILES = {
    "model:\n  heads:\n    knid: medusa\n": ":3) does not exist; did you mean model.heads.kind?",
    "run:\n  name: a\n  name: b\n": "run.name is given a second time",
    "run:\n": "run is empty",
    "data: 3\n": "data is 3",
    "- 1\n": "holds no keys",
    "run: {name: [}\n": "is not YAML",
    "run:\n  name: null\n": "run.name is null",
}


@pytest.mark.parametrize("text", IN_FILES)
def test_a_mistake_in_a_file_is_named_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        check("--config", str(path))
    assert IN_FILES[text] in str(error.value)
    assert "bad.yaml" in str(error.value)


def test_a_wrong_type_is_explained_and_what_nobody_knows_is_passed_on() -> None:
    given = check_given(["--model.heads.kind", "hydra9"], schema(), TrainCLI.options)
    refused = ArgumentError(None, 'Parser key "model.heads.kind":\n  Expected a Literal. Got value: hydra9')
    told = explain(refused, given, schema())
    assert told.startswith("model.heads.kind is 'hydra9' (--model.heads.kind); allowed is one of medusa, recurrent")
    assert told.endswith("did you mean hydra?")
    missing = ArgumentError(None, "the following arguments are required: data.train")
    assert explain(missing, [], schema()).startswith("data.train is missing; ")
    assert explain(ArgumentError(None, "else"), [], schema()) == "else"


def test_types_and_defaults_in_words() -> None:
    assert type_in_words(int | None) == "a whole number or null"
    assert type_in_words(tuple[float, float]) == "a list of 2: a number, a number"
    assert type_in_words(tuple[int, ...]) == "a list, each a whole number"
    assert [as_yaml(x) for x in (None, True, 1e-4, 1.0, (0.5, 0.5), "x", ...)] == [
        "null", "true", "0.0001", "1", "[0.5, 0.5]", "x", "none, it must be given",
    ]  # fmt: skip


def test_every_key_of_ours_is_explained() -> None:
    ours = {name: key for name, key in schema().items() if not name.startswith("trainer.")}
    assert not [name for name, key in ours.items() if not key.help]
    assert groups(["a.b.c"]) == {"a", "a.b"}
    assert meant_by("model.heads.kindd", list(schema())) == "model.heads.kind"
    assert meant_by("zzzzz", list(schema())) is None
