"""Cards: metadata that the Hub's own client reads, what was stated and nothing invented, amended without loss."""

from dataclasses import replace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from mtp.card import PLACE, CardFacts, amend_card, check_license, hub_name, make_card, named_base, read_metadata
from mtp.config import BaseRef
from mtp.errors import UserError
from tests.mtp.heads_toys import toy_config

ON_HUB = BaseRef(name="org/base", revision="a" * 40, fingerprint="0123456789abcdef")
LOCAL = BaseRef(name="/home/me/secret/base", fingerprint="0123456789abcdef")
EMBEDDED = BaseRef(name="smollm2-135m", fingerprint="0123456789abcdef")
FACTS = CardFacts(
    license="apache-2.0",
    datasets=("org/answers",),
    data=("4,411 answers of the base",),
    recipe=(("optimiser", "muon"),),
    acceptance=(("k", "1", "2"), ("α_k", "0.5", "0.4")),
    measured="τ is 1.7.",
)


def test_the_card_holds_all_that_is_known() -> None:
    config = toy_config("recurrent", torch.arange(0, 40, 2), base=ON_HUB)
    card = ModelCard(make_card(config, FACTS))
    assert card.data.to_dict() == {
        "license": "apache-2.0",
        "base_model": "org/base",
        "datasets": ["org/answers"],
        "library_name": "mtp-heads",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "multi-token-prediction"],
    }
    for part in (
        f"| base | `org/base`, revision `{'a' * 40}` |",
        "`0123456789abcdef`",
        "| α_k | 0.5 | 0.4 |",
        "τ is 1.7.",
        "- 4,411 answers of the base",
        "| optimiser | muon |",
        f"--heads {PLACE} --prompt",
        "20 of 64 tokens",
    ):
        assert part in card.text, part


def test_nothing_is_invented() -> None:
    card = make_card(toy_config("medusa", base=LOCAL))
    assert read_metadata(card).keys() == {"library_name", "pipeline_tag", "tags"}
    for absent in ("/home/me", "## Acceptance", "## Data", "## Recipe", "apache", "license:"):
        assert absent not in card, absent


@pytest.mark.parametrize(
    ("base", "found"), [(ON_HUB, "org/base"), (LOCAL, None), (EMBEDDED, "HuggingFaceTB/SmolLM2-135M-Instruct")]
)
def test_what_the_hub_calls_the_base(base: BaseRef, found: str | None) -> None:
    assert hub_name(base) == found


def test_a_base_that_only_this_machine_has_must_be_named() -> None:
    assert named_base(ON_HUB, None) == ON_HUB
    assert named_base(EMBEDDED, None) == EMBEDDED
    assert named_base(LOCAL, "org/base@v2") == replace(LOCAL, name="org/base", revision="v2")
    assert named_base(LOCAL, "org/base").revision == "main"
    with pytest.raises(UserError, match="only this machine has under that name; say where .* --base-model OWNER/NAME"):
        named_base(LOCAL, None)
    with pytest.raises(UserError, match="--base-model is 'base'; name a base on the Hub as owner/name"):
        named_base(LOCAL, "base")


def test_a_card_is_amended_and_otherwise_kept() -> None:
    config = toy_config("medusa", base=LOCAL)
    mine = "---\nlanguage: de\ntags: mine\nextra:\n  deep: [1, 2]\n---\n# Meine\n\nüber `base`\n"
    amended = amend_card(mine, config, license="mit", base=ON_HUB, place="you/heads")
    assert read_metadata(amended) == {
        "library_name": "mtp-heads",
        "pipeline_tag": "text-generation",
        "language": "de",
        "tags": ["mine", "speculative-decoding", "multi-token-prediction"],
        "extra": {"deep": [1, 2]},
        "license": "mit",
        "base_model": "org/base",
    }
    assert amended.endswith("# Meine\n\nüber `org/base`\n")
    again = amend_card(amended, replace(config, base=ON_HUB))
    assert (read_metadata(again), again.split("---\n")[2]) == (read_metadata(amended), amended.split("---\n")[2])
    assert "license: mit" in amend_card("no metadata", config, license="mit")
    written = amend_card(make_card(config, FACTS), config, base=ON_HUB, place="you/heads")
    assert PLACE not in written
    assert f"| base | `org/base`, revision `{'a' * 40}` |" in written
    assert read_metadata(written)["license"] == "apache-2.0"


def test_odd_texts_stay_what_they_are() -> None:
    for odd in ("yes", "1e3", "a: b", "#x", "é", "'", "- x"):
        card = make_card(toy_config("medusa", base=replace(ON_HUB, name=odd)), CardFacts(datasets=(odd,)))
        assert read_metadata(card)["datasets"] == [odd]
        assert yaml.safe_load(card.split("---")[1])["base_model"] == odd


@pytest.mark.parametrize("card", ["---\ntags: [a\n---\n", "---\n- a\n---\n", "---\n\t: x\n---\n"])
def test_metadata_that_cannot_be_read(card: str) -> None:
    with pytest.raises(UserError, match="has metadata that cannot be read .*; correct the lines between its two ---"):
        amend_card(card, toy_config("medusa"))


@pytest.mark.parametrize(
    ("license", "near"),
    [
        *((near, near) for near in ("apache-2.0", "mit", "openrail++", "lppl-1.3c", "llama3.1", "other", "unknown")),
        ("Apache 2.0", "apache-2.0"),
        ("apache", "apache-2.0"),
        ("apache-2", "apache-2.0"),
        ("MIT", "mit"),
        ("mit ", "mit"),
        ("ccby-4.0", "cc-by-4.0"),
        ("nonsense", None),
        ("", None),
        ("a\nb: c", None),
    ],
)
def test_a_licence_is_one_of_the_hubs_words(license: str, near: str | None) -> None:
    if license == near:
        assert check_license(license) == license
        return
    with pytest.raises(UserError, match="use one of the Hub's identifiers, such as apache-2.0") as told:
        check_license(license, "run.license")
    assert str(told.value).startswith(f"run.license is {license!r}; ")
    assert str(told.value).endswith("-licenses)." if near is None else f"; did you mean {near!r}?")
