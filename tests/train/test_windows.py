"""Windows: within bounds, every supervised token in exactly one of them, with context before it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.windows import CONTEXT, windows


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(2, 30))
def test_every_target_counts_once(marks: list[bool], max_length: int) -> None:
    marks[0] = False  # nothing predicts it
    found = windows(torch.tensor(marks), max_length)
    counted: list[int] = []
    for start, first, end in found:
        assert 0 <= start <= first < end <= len(marks)
        assert end - start == min(max_length, len(marks))
        if len(marks) > max_length:
            assert marks[first]
            assert first - start >= max(1, max_length // CONTEXT) or start == 0
        counted += [place for place in range(first, end) if marks[place]]
    assert counted == [place for place, mark in enumerate(marks) if mark]


def marked(size: int, *targets: range) -> torch.Tensor:
    marks = torch.zeros(size, dtype=torch.bool)
    for target in targets:
        marks[target.start : target.stop] = True
    return marks


def test_what_users_expect() -> None:
    assert windows(marked(80, range(60, 80)), 100) == [(0, 0, 80)]
    assert windows(marked(300, range(20, 60)), 100) == [(0, 20, 100)]  # the right of it holds no target
    assert windows(marked(300, range(280, 300)), 100) == [(200, 280, 300)]  # the left of a long prompt goes
    assert windows(marked(260, range(20, 260)), 100) == [(0, 20, 100), (75, 100, 175), (150, 175, 250), (160, 250, 260)]
    assert windows(marked(500, range(10, 30), range(400, 420)), 100) == [(0, 10, 100), (375, 400, 475)]
    assert windows(marked(50), 100) == windows(marked(500), 100) == []
