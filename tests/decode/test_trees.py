"""Trees of drafts on real bases and heads: the text of chains, every q that of its own path, what is counted."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import engine as engine_module
from decode.chain import Drafting
from decode.drafters import HeadsDrafter
from decode.engine import Engine
from decode.laws import Laws
from decode.request import Request
from decode.stats import DecodeStats
from decode.target import BaseTarget
from decode.tree_shape import TreeShape
from decode.trees import Tree, draft_tree
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.heads import Heads
from mtp.initialise import new_heads
from mtp.sampling import RandomSource, to_probs
from tests.decode.toys import TableDrafter, TableTarget, decode, table
from tests.tiny import exact_base

pytestmark = pytest.mark.usefixtures("one_thread")
K = 3
SHAPES = ("3,2,1", "1,4", "2,2,2", "dynamic:1", "dynamic:6", "dynamic:20")
KINDS = ("medusa", "recurrent")


def heads_of(base: FrozenBase, kind: str) -> Heads:
    """Medusa heads start as the base's own prediction, and recurrent ones are made to: some drafts are accepted."""
    torch.manual_seed(0)
    init = "base" if kind == "recurrent" else "random"
    return new_heads(HeadsOptions(kind=kind, draft_length=K, init=init), base).double()  # type: ignore[arg-type]


class Target(BaseTarget):
    """Counts the steps that kept other rows than the first ones."""

    kept = 0

    def keep(self, length: int, positions: Sequence[int]) -> None:
        self.kept += 1
        super().keep(length, positions)


def run(
    base: FrozenBase, drafter: HeadsDrafter, request: Request, new_tokens: int, target: BaseTarget | None = None
) -> tuple[tuple[int, ...], DecodeStats]:
    depth = (TreeShape.parse(request.tree).depth if request.tree else None) or K
    return decode(Engine(target or BaseTarget(base), drafter), [5, 6, 7], new_tokens, depth, request=request)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Every tree that the engine draws in a test."""
    trees: list[Tree] = []

    def recorded(*arguments: Any) -> Tree:
        trees.append(draft_tree(*arguments))
        return trees[-1]

    monkeypatch.setattr(engine_module, "draft_tree", recorded)
    return trees


# ---- the text, and the heads' state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_is_the_same_with_and_without_trees(kind: str, seed: int) -> None:
    base = exact_base("qwen2" if seed % 2 else "llama", seed)
    drafter = HeadsDrafter(heads_of(base, kind))
    plain, _ = run(base, drafter, Request(draft_length=0), 60)
    accepted = 0
    for shape in SHAPES if kind == "medusa" else ("3,2,1", "dynamic:12"):
        text, stats = run(base, drafter, Request(tree=shape), 60)
        assert text == plain
        assert stats.committed == 60
        accepted += stats.accepted
    assert accepted > (20 if kind == "medusa" else 0)


class Recorder(HeadsDrafter):
    """Notes the logits of every node's children, and the text and path they belong to."""

    def start(self, prompt: Tensor) -> None:
        super().start(prompt)
        self.text = prompt[:, :1]
        self.paths: list[list[int]] = [[]]
        self.seen: list[tuple[Tensor, list[int], Tensor]] = []

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        super().ingest(features, next_tokens)
        self.text = torch.cat([self.text, next_tokens], dim=1)
        self.paths = [[]]

    def fork(self, origins: Tensor) -> None:
        super().fork(origins)
        self.paths = [list(self.paths[origin]) for origin in origins.tolist()]

    def draft(self, k: int, previous: Tensor) -> Tensor:
        logits = super().draft(k, previous)
        for path, token, row in zip(self.paths, previous.tolist(), logits, strict=True):
            if k > 1:
                path.append(token)
            assert len(path) == k - 1
            self.seen.append((self.text, list(path), row))
        return logits


def fresh_logits(base: FrozenBase, heads: Heads, text: Tensor, path: Sequence[int]) -> Tensor:
    """Logits behind a chain `path` from a state that has only read `text` [1, n]."""
    fresh = HeadsDrafter(heads)
    fresh.start(text)
    fresh.ingest(base.forward(text[:, :-1], feature_layers=fresh.feature_layers).features, text[:, 1:])
    logits = fresh.draft(1, text[:, -1])
    for k, token in enumerate(path, start=2):
        logits = fresh.draft(k, torch.tensor([token]))
    return logits[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["3,2,1", "2,2,2", "dynamic:12"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_every_q_is_that_of_its_own_path(drawn: list[Tree], kind: str, shape: str, temperature: float) -> None:
    """Also after steps that kept a branch: the first drafts of each step then come from a state of kept rows."""
    base = exact_base("qwen2")
    heads = heads_of(base, kind)
    recorder = Recorder(heads)
    request = Request(temperature=temperature, tree=shape)
    target = Target(base)
    run(base, recorder, request, 40, target)
    assert target.kept > 1 or (kind, temperature) == ("recurrent", 0.0)  # random heads never name the likeliest token
    assert len({len(path) for _, path, _ in recorder.seen}) == K
    for context, path, row in recorder.seen:
        torch.testing.assert_close(fresh_logits(base, heads, context, path), row, atol=1e-5, rtol=1e-5)
    _check_rows(drawn, recorder, request)


def _check_rows(drawn: list[Tree], recorder: Recorder, request: Request) -> None:
    """Row r of a tree's q is the law behind the path of r."""
    laws = {(tuple(text[0].tolist()), tuple(path)): row for text, path, row in recorder.seen}
    contexts = sorted({len(text[0]) for text, _, _ in recorder.seen})
    text = max((text for text, _, _ in recorder.seen), key=lambda text: text.shape[1])[0].tolist()
    assert len(contexts) == len(drawn)
    for length, tree in zip(contexts, drawn, strict=True):
        for row in range(len(tree.tree.parents) + 1):
            path = tuple(int(tree.block[0, node]) for node in tree.tree.path(row))
            if tree.tree.children(row):
                expected = to_probs(laws[tuple(text[:length]), path], request.drafting)
                torch.testing.assert_close(tree.q[row], expected, atol=1e-12, rtol=1e-12)
            elif tree.drawing != "top_k":
                assert not tree.q[row].any()


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["3,2,1", "2,3", "1", "8,1,2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_static_shape_has_its_numbers_of_children(drawn: list[Tree], shape: str, temperature: float) -> None:
    base = exact_base("llama")
    widths = [int(width) for width in shape.split(",")]
    _, stats = run(base, HeadsDrafter(heads_of(base, "medusa")), Request(temperature=temperature, tree=shape), 20)
    assert len(drawn) >= stats.steps - 1
    for tree in drawn[:-3]:  # the last ones may be cut by the length
        for row, depth in enumerate(tree.tree.depths):
            tokens = [int(tree.block[0, child]) for child in tree.tree.children(row)]
            assert len(tokens) == (widths[depth] if depth < len(widths) else 0)
            assert len(set(tokens)) == len(tokens)
            if not temperature:
                assert tokens == tree.q[row].topk(len(tokens)).indices.tolist()


def test_fewer_children_where_q_has_fewer_tokens(drawn: list[Tree]) -> None:
    base = exact_base("llama")
    run(base, HeadsDrafter(heads_of(base, "medusa")), Request(temperature=1.0, top_k=2, tree="4,3"), 8)
    assert {
        len(tree.tree.children(row)) for tree in drawn for row, depth in enumerate(tree.tree.depths) if not depth
    } == {2}


def table_tree(nodes: int, depth: int, seed: int, vocab: int = 3) -> tuple[Tree, Tensor]:
    """A dynamic tree behind the text 0, 1 of a table, and the table's laws."""
    drafter = TableDrafter(table(seed, vocab), max_draft_length=depth)
    drafter.start(torch.tensor([[0, 1]]))
    drafter.ingest(torch.zeros(1, 1, 1), torch.tensor([[1]]))
    text, request = torch.tensor([0, 1]), Request(temperature=1.0, verify="match", tree=f"dynamic:{nodes}")
    shape, laws = TreeShape(nodes=nodes), Laws(request, None, None)
    tree = draft_tree(Drafting(drafter, text, laws, vocab, request, RandomSource(0)), shape, depth)
    return tree, drafter.logits.softmax(-1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (2, 3), (5, 2), (8, 3), (8, 1)])
def test_a_dynamic_tree_keeps_the_likeliest_nodes(nodes: int, depth: int, seed: int) -> None:
    """Against all paths of the table. Up to 8 nodes, nothing that belongs to the tree can be left out on the way."""
    tree, law = table_tree(nodes, depth, seed)
    chances = {}
    for level in range(1, depth + 1):
        for path in product(range(3), repeat=level):
            text, chance = [0, 1, *path], 1.0
            for a, b, c in zip(text, text[1:], text[2:], strict=False):
                chance *= float(law[a, b, c])
            chances[path] = chance
    likeliest = sorted(chances, key=lambda path: -chances[path])[:nodes]
    found = [tuple(int(tree.block[0, node]) for node in tree.tree.path(row)) for row in range(1, len(tree.tree.depths))]
    assert sorted(found) == sorted(likeliest)
    assert tree.drawing == "top_k"


@pytest.mark.parametrize("nodes", [20, 40])
def test_a_large_dynamic_tree_is_connected_and_not_too_large(nodes: int) -> None:
    tree, law = table_tree(nodes, 4, 1, vocab=9)
    assert len(tree.tree.parents) == nodes
    chance = [1.0]
    for row in range(1, nodes + 1):
        parent = tree.tree.parents[row - 1]
        assert parent < row
        chance.append(chance[parent] * float(tree.q[parent, tree.block[0, row]]))
    assert min(chance[1:]) > 0
    first = law[0, 1].sort(descending=True).values
    kept = len(tree.tree.children(0))
    assert kept == 8 or float(first[kept]) <= min(chance[1:])


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_counts_are_those_of_the_trees(drawn: list[Tree], shape: str, temperature: float) -> None:
    base = exact_base("qwen2")
    request = Request(temperature=temperature, tree=shape)
    text, stats = run(base, HeadsDrafter(heads_of(base, "medusa")), request, 41)
    assert stats.tree == shape
    assert stats.rule == ("greedy" if not temperature else "traversal")
    assert stats.drafted == sum(len(tree.tree.parents) for tree in drawn)
    assert stats.steps == sum(stats.histogram)
    assert stats.committed == len(text) == sum(size * count for size, count in enumerate(stats.histogram, start=1))
    assert stats.accepted == stats.committed - stats.steps == sum(stats.accepted_at)
    depths = [max(tree.tree.depths) for tree in drawn]
    assert stats.drafted_at == [sum(depth > k for depth in depths) for k in range(stats.draft_length)]
    assert stats.accepted_at == [sum(stats.histogram[k + 1 :]) for k in range(stats.draft_length)]
    assert all(a <= r <= d for a, r, d in zip(stats.accepted_at, stats.reached_at, stats.drafted_at, strict=True))
    assert all(0 <= value <= 1 for value in stats.alpha)


@pytest.mark.parametrize("shape", ["3,2,1", "dynamic:9"])
@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5])
def test_the_length_limit_cuts_the_tree(monkeypatch: pytest.MonkeyPatch, shape: str, new_tokens: int) -> None:
    """A step commits at most its depth and one more, so near the end the tree has fewer levels; at the end none."""
    drawn: list[tuple[int, Tree]] = []

    def recorded(*arguments: Any) -> Tree:
        tree = draft_tree(*arguments)
        drawn.append((new_tokens - (len(arguments[0].committed) - 3), tree))  # what was left, and the tree
        return tree

    monkeypatch.setattr(engine_module, "draft_tree", recorded)
    base = exact_base("qwen2")
    text, stats = run(base, HeadsDrafter(heads_of(base, "medusa")), Request(tree=shape), new_tokens)
    assert len(text) == stats.committed == new_tokens
    assert bool(drawn) == (new_tokens > 1)
    for left, tree in drawn:
        depth = max(tree.tree.depths)
        assert depth == min(K, left - 1) if shape == "3,2,1" else 0 < depth <= min(K, left - 1)
        if left == 2:
            assert len(tree.tree.parents) == (3 if shape == "3,2,1" else 8)  # no row has more than 8 children
    assert stats.drafted <= sum(len(tree.tree.parents) for _, tree in drawn)


def test_an_end_of_sequence_inside_a_path_takes_its_tail_out_of_the_counts() -> None:
    counting = torch.full((12, 12, 12), -torch.inf, dtype=torch.float64)
    for b in range(12):
        counting[:, b, (b + 1) % 12] = 0.0
    engine = Engine(TableTarget(counting), TableDrafter(counting))
    request = Request(temperature=1.0, tree="2,2,2")
    for eos in range(2, 10):
        text, stats = decode(engine, [0, 1], 20, K, request=replace(request), eos=(eos,))
        assert text == tuple(range(2, eos + 1))
        assert stats.committed == len(text)
        whole, rest = divmod(len(text), K + 1)
        assert stats.accepted == whole * K + rest
        assert stats.drafted == stats.accepted  # q has one token, so no row has a second child
