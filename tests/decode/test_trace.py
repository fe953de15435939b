"""Origins of tokens, pieces of text, and tables of rejected drafts, without a model."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.engine import Engine, Step
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.stream import Result
from decode.text import Prompt
from decode.trace import (
    ORIGINS,
    START,
    TracedText,
    by_category,
    histogram,
    judged,
    origin_counts,
    origins,
    pieces,
    rejected_pairs,
    trace,
    worst_contexts,
)
from mtp.sampling import RandomSource
from tests.decode.toys import TableDrafter, TableTarget, table


def from_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


def result_of(steps: Sequence[Step], stats: DecodeStats | None = None) -> Result:
    ids = [token for step in steps for token in step.tokens]
    return Result(from_bytes(ids), ids, "length", 3, stats or DecodeStats("token", 3), list(steps))


def step(text: str | bytes, accepted: int, rejected: str = "") -> Step:
    """A step over bytes of which the first `accepted` are drafts."""
    ids = text.encode() if isinstance(text, str) else text
    return Step(tuple(ids), tuple(i < accepted for i in range(len(ids))), None, rejected=tuple(rejected.encode()))


def traced(*steps: Step, prompt: Prompt = "why?", category: str | None = None) -> TracedText:
    return trace(result_of(steps), prompt, category, from_bytes)


# ---- origins -----------------------------------------------------------------------------------------------------


def test_the_four_origins() -> None:
    assert origins(step("abc", 2, rejected="x")) == ["accepted", "accepted", "recovered"]
    assert origins(step("abc", 2)) == ["accepted", "accepted", "bonus"]
    assert origins(step("a", 0, rejected="x")) == ["recovered"]
    assert origins(step("a", 0)) == ["plain"]
    assert origins(step("ab", 2)) == ["accepted", "accepted"]  # cut by a stop rule


@pytest.mark.parametrize("tree", [None, "2,2"])
@pytest.mark.parametrize("verify", ["token", "block"])
def test_counts_agree_with_those_of_the_engine(tree: str | None, verify: str) -> None:
    """Tokens of each origin, judged drafts and the histogram are the engine's own, which counts them another way."""
    asked = Request(temperature=1.0, tree=tree, verify=verify)  # type: ignore[arg-type]
    stats = DecodeStats(asked.reported_rule, 2, tree)
    engine = Engine(TableTarget(table(4, vocab=5)), TableDrafter(table(3, vocab=5)))
    limit = Stopping(room(2, 400, 300))
    steps = list(engine.run([0, 1], request=asked, stopping=limit, random=RandomSource(0), stats=stats))
    text = trace(result_of(steps, stats), [0, 1], None, lambda ids: "".join(map(str, ids)))
    counts = origin_counts([text])
    assert counts["accepted"] == stats.accepted == sum(one.kept for one in judged([text]))
    assert sum(counts.values()) == stats.committed == 300
    assert counts["recovered"] > 0
    assert counts["bonus"] > 0
    assert sum(histogram([text])) == stats.steps
    assert histogram([text]) == stats.histogram[: len(histogram([text]))]
    if tree is None:
        rejections = sum(reached - kept for reached, kept in zip(stats.reached_at, stats.accepted_at, strict=True))
        assert counts["recovered"] == rejections == sum(pair.count for pair in rejected_pairs([text]))


# ---- text --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(text=st.text(max_size=30), seed=st.integers(0, 99))
def test_pieces_add_up_and_hold_whole_characters(text: str, seed: int) -> None:
    draw, ids, steps = RandomSource(seed), text.encode(), []
    while ids:
        size = min(len(ids), 1 + int(4 * float(draw.uniform(()))))
        steps.append(step(ids[:size], int((size + 1) * float(draw.uniform(())))))
        ids = ids[size:]
    whole = traced(*steps)
    found = pieces(whole)
    assert "".join(piece.text for piece in found) == text
    assert "".join(token.text for token in whole.tokens) == text
    assert all(piece.text for piece in found)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece.text for piece in found)


@pytest.mark.parametrize("character", ["👩‍🚀", "👍🏽", "🇩🇪", "é", "❤️"])
def test_a_character_stays_in_one_piece_wherever_its_steps_end(character: str) -> None:
    for cut in range(1, len(character.encode())):
        ids = f"a{character}b".encode()
        shown = [piece.text for piece in pieces(traced(step(ids[: 1 + cut], 0), step(ids[1 + cut :], 2)))]
        assert sum(character in text for text in shown) == 1, shown


def test_neighbouring_flags_are_not_glued() -> None:
    shown = [piece.text for piece in pieces(traced(step("🇩🇪", 0), step("🇫🇷", 0)))]
    assert shown == ["🇩🇪", "🇫🇷"]


def test_a_part_of_a_character_has_a_name() -> None:
    first, second = "é".encode()
    names = [token.name for token in traced(step(bytes([97, first]), 1), step(bytes([second]), 0)).tokens]
    assert names == ["a", f"token {first}", f"token {second}"]


def test_pieces_change_with_origin_and_step() -> None:
    found = pieces(traced(step("abcd", 3), step("e", 0, rejected="x"), step("f", 0)))
    assert [(piece.text, piece.origin, piece.step) for piece in found] == [
        ("abc", "accepted", 1),
        ("d", "bonus", 1),
        ("e", "recovered", 2),
        ("f", "plain", 3),
    ]
    assert found[2].rejected == ("x",)


def test_prompts_of_every_form() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    assert traced(prompt="why?").prompt == "why?"
    assert traced(prompt=messages).prompt == "system: be brief\nuser: why?"
    assert traced(prompt=list(b"why?")).prompt == "why?"


def test_a_trace_survives_json() -> None:
    text = traced(step("aé", 2), step("b", 0, rejected="xy"), category="story")
    document = json.loads(json.dumps(text.to_json()))
    assert TracedText.from_json(document) == text
    document["steps"][0][0][2] = "imagined"
    with pytest.raises(ValueError, match="origin"):
        TracedText.from_json(document)


# ---- tables ------------------------------------------------------------------------------------------------------

STORY = traced(step("ab", 1, rejected="x"), step("bc", 1, rejected="x"), category="story")
LETTER = traced(step("ab", 1, rejected="x"), step("cdef", 3), step("g", 0), category="letter")


def test_what_was_judged() -> None:
    found = [(one.context, one.before, one.position, one.kept, one.drafts, one.committed) for one in judged([STORY])]
    assert found == [
        (START, "", 1, True, ("a",), "a"),
        ("a", "a", 2, False, ("x",), "b"),
        ("b", "ab", 1, True, ("b",), "b"),
        ("b", "abb", 2, False, ("x",), "c"),
    ]


def test_pairs_are_counted_over_texts() -> None:
    pairs = rejected_pairs([STORY, LETTER])
    assert [(pair.draft, pair.recovered, pair.count) for pair in pairs] == [("x", "b", 2), ("x", "c", 1)]
    assert pairs[0].categories == {"story": 1, "letter": 1}
    assert pairs[0].positions == {2: 2}
    assert pairs[0].before == "a"


def test_siblings_of_a_tree_are_pairs_of_their_own() -> None:
    assert [pair.draft for pair in rejected_pairs([traced(step("a", 0, rejected="xy"))])] == ["x", "y"]


def test_worst_contexts_come_first() -> None:
    shares = worst_contexts([STORY, LETTER])
    assert [(share.name, share.kept, share.judged) for share in shares] == [("a", 0, 2), ("b", 2, 3)]
    assert shares[0].example is not None
    assert shares[0].example.drafts == ("x",)
    many = worst_contexts([traced(step("b", 0, "x"), step("b", 0, "x"), step("b", 0, "x"))])
    assert many[0].name == "b"  # two rejections say more than the one at the start


def test_categories_with_the_lowest_acceptance_length_first() -> None:
    rows = by_category([LETTER, STORY, traced(step("a", 0))])
    assert [(row.category, row.texts, row.steps, row.tokens) for row in rows] == [
        (None, 1, 1, 1),
        ("story", 1, 2, 4),
        ("letter", 1, 3, 7),
    ]
    assert rows[0].acceptance == 0
    assert rows[1].acceptance == 1 / 2
    assert rows[2].accept_len == pytest.approx(7 / 3)


def test_nothing_decoded() -> None:
    assert rejected_pairs([]) == worst_contexts([]) == by_category([]) == histogram([]) == []
    assert origin_counts([]) == dict.fromkeys(ORIGINS, 0)
    assert pieces(traced()) == []
