"""Which examples an epoch holds and in which rows: once each, by weight, packed without loss, shared among ranks."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from train.order import drawn, epoch_examples, epoch_order, pack, rank_share

PARTS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.1, 0.5, 1.0, 1.7, 2.0, 3.0])), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 50), min_size=1, max_size=120), st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_index_once_in_full_batches(lengths: list[int], size: int, seed: int, epoch: int) -> None:
    batches = epoch_order(lengths, size, seed=seed, epoch=epoch)
    assert sorted(i for batch in batches for row in batch for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 for batch in batches for row in batch)
    assert [len(b) for b in sorted(batches, key=len, reverse=True)][:-1] == [size] * (len(batches) - 1)
    assert batches == epoch_order(lengths, size, seed=seed, epoch=epoch)


def test_order_depends_on_seed_and_epoch_and_saves_padding() -> None:
    lengths = [(i * 37) % 400 + 10 for i in range(512)]
    orders = [epoch_order(lengths, 8, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    padded = sum(max(lengths[i] for (i,) in batch) * len(batch) for batch in orders[0])
    assert padded < 1.15 * sum(lengths)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7))
def test_ranks_share_all_batches_and_get_equally_many(count: int, world_size: int) -> None:
    batches = [[[i]] for i in range(count)]
    shares = [rank_share(batches, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    steps = [batch for step in zip(*shares, strict=True) for batch in step]
    assert steps[:count] == batches
    assert steps[count:] == [[]] * (len(steps) - count)
    assert len(steps) < count + world_size


@settings(max_examples=100, deadline=None)
@given(PARTS, st.integers(0, 5))
def test_a_mixture_shows_each_example_as_often_as_its_weight_says(parts: list[tuple[int, float]], seed: int) -> None:
    """In each epoch, and after any number of them, no example of a source is more than one ahead of another."""
    total: Counter[int] = Counter()
    for epoch in range(7):
        indices = epoch_examples(parts, seed=seed, epoch=epoch)
        assert indices == epoch_examples(parts, seed=seed, epoch=epoch)
        assert len(indices) == sum(map(drawn, parts))
        total.update(indices)
        first = 0
        for count, weight in parts:
            seen = [total[i] for i in range(first, first + count)]
            if count:
                assert max(seen) - min(seen) <= 1
                assert sum(seen) == (epoch + 1) * max(1, round(count * weight))
            first += count
    assert set(total) <= set(range(sum(count for count, _ in parts)))


def test_half_a_source_comes_now_and_the_other_half_next() -> None:
    first, second, third = (epoch_examples([(10, 0.5)], seed=1, epoch=epoch) for epoch in range(3))
    assert sorted(first + second) == list(range(10))
    assert third == first
    assert first != epoch_examples([(10, 0.5)], seed=2, epoch=0)
    assert Counter(epoch_examples([(4, 2.0)], seed=1, epoch=0)) == dict.fromkeys(range(4), 2)
    assert epoch_examples([(4, 1.0), (3, 1.0)], seed=1, epoch=5) == list(range(7))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=600), st.integers(40, 60))
def test_packing_loses_nothing_and_never_overfills(lengths: list[int], row_length: int) -> None:
    order = list(range(len(lengths)))
    rows = pack(order, lengths, row_length)
    assert sorted(i for row in rows for i in row) == order
    assert all(0 < sum(lengths[i] for i in row) <= row_length for row in rows)
    assert rows == pack(order, lengths, row_length)


def test_packing_fills_rows_and_depends_on_seed_and_epoch() -> None:
    lengths = [(i * 37) % 200 + 10 for i in range(1000)]
    orders = [epoch_order(lengths, 4, seed=s, epoch=e, row_length=512) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    for batches in orders:
        assert sorted(i for batch in batches for row in batch for i in row) == list(range(1000))
        assert {len(batch) for batch in batches[:-1]} == {4}
        assert sum(lengths) / (512 * sum(map(len, batches))) > 0.97
