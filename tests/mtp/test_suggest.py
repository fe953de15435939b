"""Did you mean …: what is close, what is not."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp.suggest import did_you_mean, nearest

KNOWN = ["--max-new-tokens", "--min-new-tokens", "--temperature", "--top-k", "--top-p", "--heads", "--prompts"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--max-new-token", "--max-new-tokens"),
        ("--max_new_tokens", "--max-new-tokens"),
        ("--Temprature", "--temperature"),
        ("--temp", "--temperature"),  # begins only one
        ("--head", "--heads"),
        ("--promtps", "--prompts"),
        ("--xyz", None),
        ("--", None),
        ("", None),
    ],
)
def test_what_was_meant(written: str, meant: str | None) -> None:
    assert nearest(written, KNOWN) == meant


@given(st.sampled_from(KNOWN), st.integers(0, 30), st.sampled_from(string.ascii_lowercase))
def test_one_letter_too_much_is_still_the_same_name(name: str, place: int, letter: str) -> None:
    written = name[: 2 + place] + letter + name[2 + place :]
    assert nearest(written, [name, "--verify", "--json"]) == name


def test_the_remedy() -> None:
    many = [*"abcdefghij", "token"]
    assert did_you_mean("tokn", ["block", "token"]) == "use one of block, token; did you mean 'token'?"
    assert did_you_mean("best", ["block", "token"]) == "use one of block, token."
    assert did_you_mean("tokn", many) == "did you mean 'token'?"
    assert did_you_mean("best", many) == f"use one of {', '.join(many)}."
