"""Trees of drafts: several candidates per position, checked by one base forward.

Knows: two shapes of trees (fixed numbers of children, or the likeliest nodes by the drafter's own probability), how to
grow them level by level, and how a rule's verdict is read. Refuses to know: acceptance rules (`mtp.tree` has them) and
the base's masks (`FrozenBase.forward` has them).

Shapes: N nodes, M nodes of one level, R = N + 1 rows of the block, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.chain import Drafting, Outcome
from decode.laws import RowCheck
from decode.target import Target, TargetOutput
from decode.tree_shape import TREE_RULE, TreeShape
from mtp.sampling import RandomSource
from mtp.tree import Drawing, TokenTree, draw_children, verify_tree
from mtp.verify import Rule

_MAX_CHILDREN = 8  # of one node, and nodes of one level that get children, when the shape is dynamic


@dataclass
class Tree:
    """Nodes, the laws that children were drawn from, and how they were drawn. B is 1."""

    last: Tensor
    """[1] the last committed token: row 0."""
    tree: TokenTree
    drawing: Drawing
    q: Tensor
    """[R, V]; rows without children are 0."""
    unusable_q: bool = False
    block: Tensor = field(init=False)
    """[1, R]"""

    def __post_init__(self) -> None:
        self.block = torch.cat([self.last, self.tree.tokens.to(self.last.device)])[None]

    def forward(self, target: Target) -> TargetOutput:
        depths = torch.tensor(self.tree.depths, device=self.block.device)
        return target.forward_tree(self.block, self.tree.visible().to(self.block.device), depths)

    def suffixes(self) -> list[Tensor]:
        """The drafts on the way to each row."""
        return [self.block[0, self.tree.path(row)] for row in range(self.block.shape[1])]

    def judge(self, rule: str | Rule, p: Tensor, check: RowCheck, random: RandomSource) -> Outcome:
        """Apply the tree's form of a rule, given p [R, V]."""
        assert isinstance(rule, str), "functions judge chains only"
        verdict = verify_tree(TREE_RULE[rule], self.tree, self.drawing, self.q, p, random)
        rows = [0, *verdict.path]
        tokens: list[int] = self.block[0, list(verdict.path)].tolist()
        overlap: list[float] = torch.minimum(p[rows], self.q[rows]).sum(dim=-1).tolist()
        return Outcome(
            path=list(verdict.path),
            tokens=[*tokens, verdict.next_token],
            drafted=max(self.tree.depths),
            nodes=len(self.tree.parents),
            overlap=overlap + [0.0] * max(self.tree.depths),
            unusable_q=self.unusable_q,
            residual_empty=verdict.residual_empty,
            finite=check.finite[rows].tolist(),
            possible=check.possible[rows].tolist(),
            rejected=tuple(self.tree.tokens[[child - 1 for child in self.tree.children(rows[-1])]].tolist()),
        )


class _Grower:
    """Asks the drafter for one level after the other."""

    def __init__(self, given: Drafting) -> None:
        assert given.drafter is not None
        self.given, self.drafter, self.last = given, given.drafter, given.last
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: dict[int, Tensor] = {}
        self.dtype = torch.float32
        self.unusable = False

    def laws_of(self, level: int, parents: Sequence[int], origins: Sequence[int]) -> list[Tensor | None]:
        """q [V] for the children of each of `parents` (rows), None where it is no law.

        `origins`: where each parent's own parent stood in the previous call's list.
        """
        if level > 1:
            self.drafter.fork(torch.tensor(list(origins), device=self.last.device))
        previous = self.last if level == 1 else self.last.new_tensor([self.tokens[row - 1] for row in parents])
        logits = self.drafter.draft(level, previous)
        suffixes = [self._path(row) for row in parents]
        q, usable = self.given.laws.q(logits, self.given.vocab_size, self.given.committed, suffixes)
        laws: list[Tensor | None] = []
        for row, law, good in zip(parents, q, usable.tolist(), strict=True):
            self.unusable = self.unusable or not good
            self.dtype = law.dtype
            if good:
                self.rows[row] = law
            laws.append(law if good else None)
        return laws

    def add(self, parent: int, token: int) -> int:
        """A new node; returns its row."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens)

    def _path(self, row: int) -> Tensor:
        path: list[int] = []
        while row:
            path.insert(0, self.tokens[row - 1])
            row = self.parents[row - 1]
        return self.last.new_tensor(path)

    def finish(self, drawing: Drawing, keep: Sequence[int] | None = None) -> Tree:
        """The tree of all nodes, or of the rows `keep`, which hold the parent of each of theirs."""
        old = list(range(1, len(self.tokens) + 1)) if keep is None else sorted(keep)
        new = {0: 0} | {row: index for index, row in enumerate(old, start=1)}
        tokens = self.last.new_tensor([self.tokens[row - 1] for row in old])
        tree = TokenTree(tokens, tuple(new[self.parents[row - 1]] for row in old))
        absent = torch.zeros(self.given.vocab_size, dtype=self.dtype, device=self.last.device)
        q = torch.stack([self.rows.get(row, absent) for row in [0, *old]])
        return Tree(self.last, tree, drawing, q, self.unusable)


def draft_tree(given: Drafting, shape: TreeShape, count: int) -> Tree:
    """A tree of up to `count` levels behind the text."""
    grower = _Grower(given)
    if shape.nodes:
        return _grow_dynamic(grower, shape.nodes, count)
    # Match needs no law for the children, so the likeliest are best; the others judge drawn children.
    drawing: Drawing = "top_k" if TREE_RULE[given.request.rule] == "match" else "without_replacement"
    return _grow_static(grower, shape.widths[:count], drawing, given.random)


def _grow_static(grower: _Grower, widths: Sequence[int], drawing: Drawing, random: RandomSource) -> Tree:
    """Every node of level l gets widths[l] children, fewer where q has fewer tokens."""
    parents, origins = [0], [0]
    for level, width in enumerate(widths, start=1):
        next_parents, next_origins = [], []
        for index, (parent, law) in enumerate(zip(parents, grower.laws_of(level, parents, origins), strict=True)):
            for token in [] if law is None else draw_children(law, width, drawing, random):
                next_parents.append(grower.add(parent, int(token)))
                next_origins.append(index)
        parents, origins = next_parents, next_origins
        if not parents:
            break
    return grower.finish(drawing)


def _grow_dynamic(grower: _Grower, nodes: int, count: int) -> Tree:
    """The `nodes` likeliest nodes by the product of q along the path. EAGLE-2, arXiv 2406.16858, section 4.

    Nothing is drawn, so the shape is a function of the text alone and may depend on every q.
    """
    width = min(nodes, _MAX_CHILDREN)
    score = {0: 1.0}
    frontier, origins = [0], [0]
    for level in range(1, count + 1):
        children: list[tuple[float, int, int]] = []
        laws = grower.laws_of(level, frontier, origins)
        for index, (parent, likeliest) in enumerate(zip(frontier, _likeliest(laws, width, grower), strict=True)):
            for prob, token in likeliest:
                row = grower.add(parent, token)
                score[row] = score[parent] * prob
                children.append((-score[row], row, index))
        # A child is no likelier than its parent: below the least likely node of a full tree, none would be kept.
        least = sorted(score.values(), reverse=True)[: nodes + 1][-1] if len(score) > nodes else 0.0
        best = [child for child in sorted(children)[:width] if -child[0] > least]
        frontier, origins = [row for _, row, _ in best], [index for _, _, index in best]
        if not frontier:
            break
    # A parent's product is never below its child's, and its row is smaller: it is kept whenever the child is.
    keep = sorted(score.keys() - {0}, key=lambda row: (-score[row], row))[:nodes]
    return grower.finish("top_k", keep)


def _likeliest(laws: Sequence[Tensor | None], width: int, grower: _Grower) -> list[list[tuple[float, int]]]:
    """The `width` most probable tokens of each law, with their probabilities; none of probability 0."""
    known, ids = [law for law in laws if law is not None], grower.given.laws.draft_ids
    if not known:
        return [[] for _ in laws]
    table = torch.stack(known)
    table = table if ids is None else table[:, ids]
    top = table.topk(min(width, table.shape[1]))
    tokens: list[list[int]] = (top.indices if ids is None else ids[top.indices]).tolist()
    found = iter([list(zip(*pair, strict=True)) for pair in zip(top.values.tolist(), tokens, strict=True)])
    return [[] if law is None else [pair for pair in next(found) if pair[0] > 0] for law in laws]
