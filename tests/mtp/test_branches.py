"""Heads that draft a tree: every branch gets the drafts that it would get alone, with kernels and without."""

import copy
import pickle
import random

import pytest
import torch
from torch import Tensor

from mtp.heads import Heads
from mtp.heads.recurrent import RecurrentHeads
from mtp.kernels import Kernels
from mtp.layers import use_kernels
from tests.mtp.heads_toys import VARIANTS, V, toy_heads

LENGTH = 4  # draft positions


def heads_with(variant: str, kernels: Kernels | None) -> Heads:
    heads = toy_heads(seed=1, draft_length=LENGTH, **VARIANTS[variant]).float()
    for parameter in heads.parameters():
        parameter.data.mul_(0.3)  # float32 rounding then stays small
    assert heads._embedding is not None
    assert heads._output_rows is not None
    heads.bind(heads._embedding.float(), heads._output_rows.float())
    use_kernels(heads, kernels)
    return heads


def features_of(heads: Heads, length: int, seed: int) -> Tensor:
    return torch.randn(1, length, heads.config.feature_size, generator=torch.Generator().manual_seed(seed))


def alone(heads: Heads, features: Tensor, text: Tensor, path: list[int]) -> Tensor:
    """Logits [len(path) + 1, V] of drafting along `path`, without kernels or branches."""
    use_kernels(heads, None)
    state = heads.new_state(1)
    heads.ingest(state, features, text)
    previous = [int(text[0, -1]), *path]
    return torch.cat([heads.draft(state, k, torch.tensor([token])) for k, token in enumerate(previous, start=1)])


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("medusa")])
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 3, 2), (5, 1, 4), (9, 2, 1)])  # up to 20 branches: more than at once
@pytest.mark.parametrize("with_kernels", [False, True])
@torch.no_grad()
def test_branches_draft_as_if_alone(
    variant: str, widths: tuple[int, ...], with_kernels: bool, kernels: Kernels
) -> None:
    heads, draw = heads_with(variant, kernels if with_kernels else None), random.Random(0)
    state, length = heads.new_state(1), 3
    features, text = features_of(heads, length, 0), torch.randint(V, (1, length))
    heads.ingest(state, features, text)
    for _ in range(2):  # again behind an anchor that takes the place of the drafts
        branches: object = state
        found, paths = heads.draft(state, 1, text[:, -1]), [[]]
        rows: list[tuple[list[int], Tensor]] = [([], found[0])]
        for k, width in enumerate(widths, start=2):
            origins = [parent for parent in range(len(paths)) for _ in range(width)]
            draw.shuffle(origins)
            paths = [[*paths[parent], draw.randrange(V)] for parent in origins]
            branches = heads.fork(branches, torch.tensor(origins))  # type: ignore[arg-type]
            found = heads.draft(branches, k, torch.tensor([path[-1] for path in paths]))
            rows += zip(paths, found, strict=True)
        for path, logits in rows:
            use_kernels(heads, None)
            torch.testing.assert_close(logits, alone(heads, features, text, path)[-1], atol=1e-3, rtol=1e-3)
        use_kernels(heads, kernels if with_kernels else None)
        features = torch.cat([features, features_of(heads, 2, 1)], dim=1)
        text = torch.cat([text, torch.randint(V, (1, 2))], dim=1)
        heads.ingest(state, features[:, -2:], text[:, -2:])


@torch.no_grad()
def test_a_fork_goes_on_from_a_chain(kernels: Kernels) -> None:
    heads = heads_with("recurrent", kernels)
    features, text, state = features_of(heads, 3, 0), torch.tensor([[1, 2, 3]]), heads.new_state(1)
    heads.ingest(state, features, text)
    for k, token in enumerate((3, 4), start=1):
        heads.draft(state, k, torch.tensor([token]))
    found = heads.draft(heads.fork(state, torch.tensor([0, 0])), 3, torch.tensor([5, 6]))
    for row, token in enumerate((5, 6)):
        torch.testing.assert_close(found[row], alone(heads, features, text, [4, token])[-1], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_a_branch_that_saw_its_sibling_would_be_noticed(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with a mask that hides nothing, drafts differ."""
    heads = heads_with("recurrent", kernels)
    features, text, state = features_of(heads, 3, 0), torch.tensor([[1, 2, 3]]), heads.new_state(1)
    heads.ingest(state, features, text)
    heads.draft(state, 1, text[:, -1])
    rows = heads._rows  # type: ignore[operator]
    monkeypatch.setattr(heads, "_rows", lambda *given: rows(*given[:-1], torch.ones_like(given[-1])))
    found = heads.draft(heads.fork(state, torch.tensor([0, 0])), 2, torch.tensor([5, 6]))
    assert float((found[0] - alone(heads, features, text, [5])[-1]).abs().max()) > 1e-2


@torch.no_grad()
def test_heads_may_change_move_and_be_copied_after_kernels_drafted(kernels: Kernels) -> None:
    """Neither old numbers nor old places are read again."""
    heads = heads_with("recurrent", None)
    for parameter in heads.parameters():
        parameter.copy_(parameter.bfloat16())
    use_kernels(heads, kernels, compacted=True)
    features, text = features_of(heads, 3, 0), torch.tensor([[1, 2, 3]])

    def drafts(of: Heads) -> Tensor:
        state = of.new_state(1)
        of.ingest(state, features, text)
        return torch.cat([of.draft(state, k, torch.tensor([k])) for k in (1, 2, 3)])

    before = drafts(heads)
    changed = copy.deepcopy(heads)
    assert drafts(changed).equal(before)
    for parameter in changed.parameters():
        parameter.mul_(1.5)
    found = drafts(changed)
    use_kernels(changed, None)
    torch.testing.assert_close(found, drafts(changed), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(found, before, atol=1e-2)
    heads.double().float()  # the same numbers elsewhere
    assert drafts(heads).equal(before)
    assert drafts(pickle.loads(pickle.dumps(heads))).allclose(before, atol=1e-4)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("medusa, ")])
@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("count", [1, 3, 40])  # more texts than rows at once
@torch.no_grad()
def test_several_texts_draft_as_if_alone(variant: str, with_kernels: bool, count: int, kernels: Kernels) -> None:
    """Bit for bit, texts of different lengths, and again behind what is verified then: some of them more than fits."""
    heads = heads_with(variant, kernels if with_kernels else None)
    together, single = ([heads.new_state(1) for _ in range(count)] for _ in range(2))
    for turn in range(2):
        lengths = [1 + (index + turn) % 4 for index in range(count)]
        features = [features_of(heads, length, 100 * turn + index) for index, length in enumerate(lengths)]
        texts = [torch.randint(V, (1, length)) for length in lengths]
        heads.ingest_several(together, features, texts)
        for state, read, text in zip(single, features, texts, strict=True):
            heads.ingest(state, read, text)
        previous = torch.cat([text[:, -1] for text in texts])
        for k in range(1, LENGTH + 1):
            drafts = heads.draft_several(together, k, previous)
            alone = torch.cat([heads.draft(state, k, previous[i : i + 1]) for i, state in enumerate(single)])
            assert torch.equal(drafts, alone)
            previous = drafts.argmax(-1)


@torch.no_grad()
def test_a_text_that_read_anothers_keys_would_be_noticed(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_with("recurrent", kernels)
    assert isinstance(heads, RecurrentHeads)
    states = [heads.new_state(1) for _ in range(2)]
    reads = [features_of(heads, 3, seed) for seed in range(2)]
    texts = [torch.randint(V, (1, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    heads.ingest_several(states, reads, texts)
    honest = heads.draft_several(states, 1, texts[0][0, -2:]), heads.draft_several(states, 2, texts[0][0, -2:])
    real = RecurrentHeads._text
    monkeypatch.setattr(RecurrentHeads, "_text", lambda self, state, *more: real(self, states[0], *more))
    swapped = heads.draft_several(states, 1, texts[0][0, -2:]), heads.draft_several(states, 2, texts[0][0, -2:])
    assert torch.equal(honest[0], swapped[0])
    assert not torch.allclose(honest[1][1], swapped[1][1], atol=1e-4)
