"""Shift arithmetic against three nested loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp.targets import TargetPlan, draft_inputs, neighbours, pad_for_drafts, plan_targets


def slow_plan(tokens: Tensor, supervised: Tensor, draft_length: int) -> set[tuple[int, int, int, int]]:
    """Every (row, anchor, k, predicted token): anchor t counts when token t+2 is supervised, k when t+k+1 is."""
    found = set()
    for b in range(len(tokens)):
        for t in range(tokens.shape[1] - 2):
            for k in range(1, draft_length + 1):
                target = t + k + 1
                if supervised[b, t + 2] and target < tokens.shape[1] and supervised[b, target]:
                    found.add((b, t, k, int(tokens[b, target])))
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31))
def test_plan_equals_the_loops(batch: int, length: int, draft_length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (batch, length), generator=generator)
    supervised = torch.rand(batch, length, generator=generator) < 0.6
    plan = plan_targets(tokens, supervised, draft_length)
    width = plan.anchors.shape[1]
    found = set()
    for row, (teacher, token) in enumerate(zip(plan.teacher.tolist(), plan.tokens.tolist(), strict=True)):
        b, s = divmod(teacher, length)
        for k in range(1, draft_length + 1):
            index = int(plan.hidden[row, k - 1])
            if index < 0:
                continue
            packed, j = divmod(index, draft_length)
            b_hidden, m = divmod(packed, width)
            anchor = int(plan.anchors[b_hidden, m])
            assert (b_hidden, j, anchor + k) == (b, k - 1, s)  # the teacher of (t, k) is position t + k
            found.add((b, anchor, k, token))
    assert found == slow_plan(tokens, supervised, draft_length)


def pairs(plan: TargetPlan, length: int, draft_length: int) -> set[tuple[int, int, int, int]]:
    """Every (row, anchor, k, predicted token) of a plan, and (row, teacher, 0, token) for its teachers."""
    found = set()
    for index, (flat, token) in enumerate(zip(plan.teacher.tolist(), plan.tokens.tolist(), strict=True)):
        row, teacher = divmod(flat, length)
        found.add((row, teacher, 0, token))
        for k, hidden in enumerate(plan.hidden[index].tolist(), start=1):
            if hidden >= 0:
                assert hidden % draft_length == k - 1
                owner, column = divmod(hidden // draft_length, plan.anchors.shape[1])
                assert owner == row
                found.add((row, int(plan.anchors[row, column]), k, token))
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_a_packed_row_is_planned_as_its_texts_are_alone(rows: list[list[int]], draft_length: int, seed: int) -> None:
    """No anchor, teacher or target of one text meets those of another, although every token counts as supervised."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(sum, rows)) + 2
    tokens = torch.randint(0, 50, (len(rows), width), generator=generator)
    supervised = torch.rand(len(rows), width, generator=generator) < 0.8
    segments = torch.zeros(len(rows), width, dtype=torch.long)
    expected, here = set(), []
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, start=1):
            own = slice(start, start + length)
            segments[row, own] = number
            alone = tokens[row : row + 1, own], supervised[row : row + 1, own]
            found = pairs(plan_targets(*alone, draft_length), length, draft_length)
            expected |= {(row, start + place, k, token) for _, place, k, token in found}
            here += [row * width + start + place for place in neighbours(*alone)[0].tolist()]
            start += length
        supervised[row, start:] = True  # padding is never a target, whatever is said of it
    assert pairs(plan_targets(tokens, supervised, draft_length, segments), width, draft_length) == expected
    assert neighbours(tokens, supervised, segments)[0].tolist() == here
    if any(len(lengths) > 1 for lengths in rows):  # negative control: without segments, texts meet
        everything = torch.ones_like(supervised)
        apart, mixed = plan_targets(tokens, everything, 1, segments), plan_targets(tokens, everything, 1)
        assert len(mixed.teacher) > len(apart.teacher)


def test_draft_position_k_reads_token_t_plus_k() -> None:
    inputs = draft_inputs(torch.arange(8).unsqueeze(0), 3)
    assert inputs.tolist() == [[[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7]]]
    assert pad_for_drafts(torch.ones(1, 4, dtype=torch.long), 3).shape == (1, 7)


def test_neighbours_are_the_anchors_that_decoding_drafts_from() -> None:
    supervised = torch.tensor([[False, False, True, True], [True, True, False, False]])
    here, after, next_tokens = neighbours(torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), supervised)
    assert (here.tolist(), after.tolist(), next_tokens.tolist()) == ([0, 1], [1, 2], [6, 7])


@pytest.mark.parametrize("length", [1, 2])
def test_sequences_too_short_for_a_draft_have_no_targets(length: int) -> None:
    plan = plan_targets(torch.zeros(1, length, dtype=torch.long), torch.ones(1, length, dtype=torch.bool), 2)
    assert len(plan.teacher) == 0
