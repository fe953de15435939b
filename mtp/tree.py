"""Acceptance rules for several candidates per place, and for trees of them: which path stays, and what follows it.

Knows: a tree of drafts, how siblings were drawn, probabilities, random draws. Refuses to know which model a row came
from, what the text means, how large a tree should be, or when to stop. One text at a time. Every rule is a pure
function of its arguments and of the random source, and exact: the committed text follows p. That holds as long as the
number of children of a row is settled before any of them is drawn; a child that is drawn and then thrown away bends it.

Shapes: N nodes, V vocabulary. Row 0 is the root, the last committed token; row n = 1...N is node n. Row n of p
[N + 1, V] is the law of the base after row n; row n of q [N + 1, V] is the law that the children of row n were drawn
from, and is ignored where there are none. All numbers of q and p are finite.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mtp.errors import UserError
from mtp.sampling import RandomSource

Drawing = Literal["with_replacement", "without_replacement", "top_k"]
"""How the siblings of a row come from its q: independent draws (SpecInfer, arXiv 2305.09781); one draw after another,
each from what the earlier ones left (RSD, arXiv 2402.14160); no draw, the likeliest (EAGLE-2, arXiv 2406.16858)."""
DRAWINGS: tuple[Drawing, ...] = get_args(Drawing)


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Drafts that share their beginnings. N = 0, nothing drafted, is a tree too."""

    tokens: Tensor
    """[N] token ids; node n is entry n - 1."""
    parents: tuple[int, ...]
    """N rows, each before its child's own; siblings stand in the order in which they were drawn."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == (len(self.parents),), (self.tokens.shape, self.parents)
        assert all(0 <= parent <= index for index, parent in enumerate(self.parents)), self.parents

    def children(self, row: int) -> list[int]:
        """Rows of the children of `row`, in the order in which they were drawn."""
        return [child for child, parent in enumerate(self.parents, start=1) if parent == row]

    @property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root to each of the N + 1 rows."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from the first below the root down to `row`; none for the root."""
        path = []
        while row:
            path.append(row)
            row = self.parents[row - 1]
        return tuple(reversed(path))

    def visible(self) -> Tensor:
        """[N + 1, N + 1] bool: what each row may attend to, that is itself and its ancestors."""
        visible = torch.eye(len(self.parents) + 1, dtype=torch.bool)
        for row, parent in enumerate(self.parents, start=1):
            visible[row] |= visible[parent]
        return visible.to(self.tokens.device)


@dataclass(frozen=True)
class TreeVerdict:
    """Outcome of one verification."""

    path: tuple[int, ...]
    """Rows that stay, from below the root downwards; may be empty."""
    next_token: int
    """The token after them."""
    residual_empty: bool
    """A residual had no mass (rounding), so the law before it was used in its place."""


TreeRule = Callable[[TokenTree, Drawing, Tensor, Tensor, RandomSource], TreeVerdict]


def draw_children(q: Tensor, count: int, drawing: Drawing, random: RandomSource) -> list[int]:
    """`count` siblings from q [V]; fewer where q has fewer possible tokens and the drawing does not repeat any."""
    if drawing == "with_replacement":
        return [int(random.categorical(q)) for _ in range(count)]
    count = min(count, int((q > 0).sum()))
    if drawing == "top_k":
        return [int(token) for token in q.topk(count).indices]
    drawn: list[int] = []
    for _ in range(count):
        drawn.append(int(random.categorical(_without(q, drawn))))
    return drawn


def sibling_law(q: Tensor, earlier: Sequence[int], token: int, drawing: Drawing) -> Tensor:
    """[V] float64: the law that a child was drawn from, given the tokens of its earlier siblings.

    A child of "top_k" could be no other token, so its law is one-hot. Without replacement, a child that nothing was
    left for has a law without mass, and no rule accepts it.
    """
    if drawing == "top_k":
        return torch.zeros_like(q, dtype=torch.float64).index_fill_(0, torch.tensor([token], device=q.device), 1.0)
    if drawing == "with_replacement" or not earlier:
        return q.double()
    left = _without(q, earlier).double()
    mass = left.sum()
    return torch.where(mass > 0, left / mass, left)


def verify_tree(
    rule: str, tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, random: RandomSource
) -> TreeVerdict:
    """Apply `rule` to `tree`, whose siblings came from q [N + 1, V] by `drawing`, with p [N + 1, V].

    An unknown rule is a UserError. N = 0 draws one token from p.
    """
    check_tree_rule(rule)
    assert drawing in DRAWINGS, drawing
    assert q.shape == p.shape == (len(tree.parents) + 1, p.shape[-1]), (q.shape, p.shape, tree.parents)
    return TREE_RULES[rule](tree, drawing, q, p, random)


def check_tree_rule(rule: str) -> None:
    """UserError unless `rule` is one of TREE_RULES."""
    if rule not in TREE_RULES:
        raise UserError(f"--verify is {rule!r}; for a tree use one of {', '.join(sorted(TREE_RULES))}.")


def recursive_rule(tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, random: RandomSource) -> TreeVerdict:
    """From the root downwards: the first sibling that passes stays, then its children are judged. Exact.

    A child with law s stays while u < R(x) / s(x), where R is p at first and norm(relu(R - s)) after each sibling that
    did not stay. On a chain it is the token rule. SpecInfer (Miao et al. 2023, arXiv 2305.09781) for independent draws;
    RSD (Jeon et al. 2024, arXiv 2402.14160) for draws without replacement.
    """
    row, target, one = 0, p[0].double(), p.new_ones((), dtype=torch.float64)
    judged, fell_back = _offers(tree, drawing, q, row), False
    while (offer := next(judged, None)) is not None:
        child, token, law = offer
        if random.bernoulli(_chance(one, target, law, token)):
            row, target = child, p[child].double()
            judged = _offers(tree, drawing, q, row)
        else:
            target, _, empty = _after_rejection(one, target, law)
            fell_back |= empty
    return TreeVerdict(tree.path(row), int(random.categorical(target)), fell_back)


def traversal_rule(tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, random: RandomSource) -> TreeVerdict:
    """From the leaves to the root: the first row that passes stays, with its whole path. Exact.

    The weight w of a row is the chance that it stays or a row below it does, given all that was rejected so far; the
    token after it then has law `target`. A child takes its share of both (`_chance`), and its rejection leaves the rest
    (`_after_rejection`). The root has weight 1. On a chain it is the block rule. Weng et al. 2025 (arXiv 2505.12398).
    """
    fell_back = False

    def traverse(row: int, weight: Tensor) -> tuple[int, Tensor] | None:
        """The row that stays at or below `row`, and the law of the token after it; None if none does."""
        nonlocal fell_back
        if weight <= 0:  # nothing below it can stay either, so its rows need no look
            return None
        target = p[row].double()
        for child, token, law in _offers(tree, drawing, q, row):
            if found := traverse(child, _chance(weight, target, law, token)):
                return found
            target, weight, empty = _after_rejection(weight, target, law)
            fell_back |= empty  # it leaves weight 1: this row or one below it stays, so the verdict depends on it
        return (row, target) if row == 0 or random.bernoulli(weight) else None

    found = traverse(0, p.new_ones((), dtype=torch.float64))
    assert found is not None
    return TreeVerdict(tree.path(found[0]), int(random.categorical(found[1])), fell_back)


def match_rule(tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, random: RandomSource) -> TreeVerdict:
    """Draw once from p at each row visited, go down to the child that equals the draw, commit a draw that none equals.

    Exact for candidates from anywhere, as long as they do not depend on these draws: q and `drawing` play no part.
    SpecInfer (arXiv 2305.09781) calls it naive sampling. Drawing again after a mismatch would bend the law.
    """
    del q, drawing
    tokens, row = tree.tokens.tolist(), 0
    while True:
        draw = int(random.categorical(p[row]))
        same = [child for child in tree.children(row) if tokens[child - 1] == draw]
        if not same:
            return TreeVerdict(tree.path(row), draw, False)
        row = same[0]


TREE_RULES: dict[str, TreeRule] = {"match": match_rule, "recursive": recursive_rule, "traversal": traversal_rule}
"""All of them keep the law of p, for every drawing. With "top_k" their verdicts have the same law."""


def _offers(tree: TokenTree, drawing: Drawing, q: Tensor, row: int) -> Iterator[tuple[int, int, Tensor]]:
    """Children of `row` in the order of their drawing: row, token, and the law [V] it was drawn from."""
    earlier: list[int] = []
    for child in tree.children(row):
        token = int(tree.tokens[child - 1])
        yield child, token, sibling_law(q[row], earlier, token, drawing)
        earlier.append(token)


def _without(q: Tensor, tokens: Sequence[int]) -> Tensor:
    """q [V] with `tokens` struck out, not normalised."""
    return q.index_fill(0, torch.tensor(tokens, dtype=torch.long, device=q.device), 0.0)


def _chance(weight: Tensor, target: Tensor, law: Tensor, token: int) -> Tensor:
    """min(1, w target(x) / s(x)), a float64 scalar; 0 for an x that the target forbids or that s could not give."""
    # A law without x has either run out of tokens or is not the one x was drawn from: never a reason to accept.
    return torch.where(law[token] > 0, (weight * target[token] / law[token]).clamp(max=1.0), 0.0)


def _after_rejection(weight: Tensor, target: Tensor, law: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Target [V], weight, and whether the residual was empty, once a child drawn from `law` s [V] did not stay.

    The child took min(s, w target), so relu(w target - s) is left, with mass S. Its chance not to stay was 1 - w + S,
    and what is left is divided by that: the target becomes residual / S and the weight S / (1 - w + S). A weight of 1
    stays 1, which is the step of the recursive rule. Nothing is ever raised above 0.
    """
    residual = (weight * target - law).relu_()
    mass = residual.sum()
    if mass > 0:
        return residual / mass, mass / (mass + (1 - weight)), False  # in this order: a mass of 1e-20 must not be lost
    if weight < 1:  # nothing more goes through this row
        return target, torch.zeros_like(weight), False
    return target, weight, True  # no such rejection is possible: it was rounding
