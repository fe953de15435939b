"""Several candidates per place and trees of them: the law of the committed text, by walking every outcome.

`law_error` walks the draws of the tree and, for each tree, the draws of its verification. Every mutant runs through the
same function and must fail it by a margin.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.walk import Branching, walk
from mtp import tree as tree_module
from mtp.errors import UserError
from mtp.sampling import RandomSource
from mtp.tree import DRAWINGS, TREE_RULES, Drawing, TokenTree, TreeVerdict, draw_children, sibling_law, verify_tree
from mtp.verify import verify
from tests.decode.toys import Draws, table, total_variation, true_law

EXACT = 1e-12
CONTEXT = (1, 2)
SAMPLED: tuple[Drawing, ...] = ("with_replacement", "without_replacement")

Shape = tuple  # a row is the tuple of its children, each a row


def full(*widths: int) -> Shape:
    """A tree in which every row of one depth has equally many children."""
    return (full(*widths[1:]),) * widths[0] if widths else ()


RAGGED = ((full(1),), ())  # a chain of three beside a single node
LOPSIDED = ((), full(2))  # only the second sibling has children
SHAPES = {
    "2": full(2),
    "3": full(3),
    "1-2": full(1, 2),
    "2-1": full(2, 1),
    "2-2": full(2, 2),
    "ragged": RAGGED,
    "lopsided": LOPSIDED,
}


def probs(seed: int, vocab: int = 3, sharpness: float = 1.0, never: Sequence[tuple[int, int, int]] = ()) -> Tensor:
    """An order-2 Markov table of probabilities [V, V, V]; tokens `never` are impossible in their context."""
    logits = table(seed, vocab, sharpness)
    for cell in never:
        logits[cell] = -torch.inf
    return logits.softmax(dim=-1)


# Without zeros, V = 3.
P, Q = probs(2), probs(3)
# With zeros, V = 4: in p alone, in q alone, and in both. The children of the root may be any token. The seeds are such
# that every mutant below shows: where a single token is likelier under p than under q, the residual is one-hot and
# hides most of them.
PAIRS = list(product(range(4), repeat=2))
SPARSE_P = probs(6, 4, never=[(a, b, (a + b + 2) % 4) for a, b in PAIRS])
SPARSE_Q = probs(20, 4, never=[(a, b, (k * b + a + k - 1) % 4) for a, b in PAIRS for k in (1, 2) if (a, b) != CONTEXT])


def draft(
    shape: Shape, q: Tensor, drawing: Drawing, random: RandomSource, keep: Callable[[Tensor, list[int]], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents of a tree drawn row by row; where q has too few tokens for a row, its last children fall away.

    `keep` picks those that stay of the children drawn from a row: all of them, in an honest tree.
    """
    tokens, parents = [], []
    waiting = deque([(0, CONTEXT, shape)])
    while waiting:
        row, context, children = waiting.popleft()
        law = q[context]
        drawn = keep(law, draw_children(law, len(children), drawing, random) if children else [])
        for token, below in zip(drawn, children, strict=False):
            tokens.append(token)
            parents.append(row)
            waiting.append((len(tokens), (context[-1], token), below))
    return tuple(tokens), tuple(parents)


def rows_of(probabilities: Tensor, tree: TokenTree) -> Tensor:
    """[N + 1, V]: the law after each row of `tree`."""
    contexts = [CONTEXT]
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        contexts.append((contexts[parent][-1], token))
    return torch.stack([probabilities[context] for context in contexts])


def tree_of(tokens: tuple[int, ...], parents: tuple[int, ...]) -> TokenTree:
    return TokenTree(torch.tensor(tokens, dtype=torch.long), parents)


def keep_all(law: Tensor, drawn: list[int]) -> list[int]:
    return drawn


def law_error(
    rule: str,
    shape: Shape,
    drawing: Drawing,
    p: Tensor = P,
    q: Tensor = Q,
    keep: Callable[[Tensor, list[int]], list[int]] = keep_all,
) -> float:
    """Total variation between the law of the committed text and the product of p's conditionals."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    accepted = 0.0
    for (tokens, parents), chance in walk(lambda random: draft(shape, q, drawing, random, keep)).items():
        tree = tree_of(tokens, parents)
        for text, conditional in verification(rule, tree, drawing, rows_of(q, tree), rows_of(p, tree)).items():
            texts[text] += chance * conditional
            accepted += chance * conditional * (len(text) - 1)
    assert abs(sum(texts.values()) - 1) < EXACT
    assert accepted > 0, "a check in which nothing was accepted proves nothing"
    longest = max(map(len, texts))
    assert min(map(len, texts)) < longest, "nor does one in which nothing was rejected"
    return total_variation(extended(texts, longest, p), true_law(p, list(CONTEXT), longest))


def verification(
    rule: str, tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, walker: Callable[..., dict] = walk
) -> dict[tuple[int, ...], float]:
    """The law of the text that one verification commits: accepted tokens and the one after them."""

    def run(random: RandomSource) -> tuple[int, ...]:
        verdict = verify_tree(rule, tree, drawing, q, p, random)
        assert list(verdict.path) == list(tree.path(verdict.path[-1] if verdict.path else 0))
        return (*(int(tree.tokens[row - 1]) for row in verdict.path), verdict.next_token)

    return walker(run)


def extended(texts: dict[tuple[int, ...], float], length: int, p: Tensor) -> dict[tuple[int, ...], float]:
    """The law of texts of `length` tokens that go on from `texts` as p does."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for text, chance in texts.items():
        for rest in product(range(p.shape[-1]), repeat=length - len(text)):
            whole = (*CONTEXT, *text, *rest)
            law[whole[2:]] += chance * float(
                torch.stack([p[whole[at - 2 : at + 1]] for at in range(2 + len(text), len(whole))]).prod()
                if rest
                else 1
            )
    return law


# ---- exactness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_text_follows_the_base(rule: str, drawing: Drawing, shape: str) -> None:
    assert law_error(rule, SHAPES[shape], drawing, SPARSE_P, SPARSE_Q) < EXACT
    if shape != "3":  # all tokens of the vocabulary would be candidates, and nothing rejected
        assert law_error(rule, SHAPES[shape], drawing, P, Q) < EXACT


@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_text_follows_the_base_when_drafts_are_certain(rule: str, drawing: Drawing) -> None:
    """One-hot q: without replacement a row has one child, with replacement the same child again and again."""
    one_hot = torch.nn.functional.one_hot(Q.argmax(dim=-1), 3).double()
    assert law_error(rule, full(2, 1), drawing, P, one_hot) < EXACT


# ---- what they are built from ------------------------------------------------------------------------------------


def test_a_tree_knows_its_paths() -> None:
    tree = tree_of((5, 6, 7, 8), (0, 0, 2, 3))
    assert tree.children(0) == [1, 2]
    assert tree.children(1) == []
    assert tree.depths == (0, 1, 1, 2, 3)
    assert tree.path(4) == (2, 3, 4)
    assert tree.path(0) == ()
    seen = [[int(column) for column in row.nonzero()] for row in tree.visible()]
    assert seen == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4]]
    with pytest.raises(AssertionError):
        tree_of((1, 2), (0, 2))  # a row cannot be its own parent


@pytest.mark.parametrize("drawing", SAMPLED)
def test_siblings_are_drawn_from_the_law_they_are_judged_by(drawing: Drawing) -> None:
    law = torch.tensor([0.5, 0.3, 0.0, 0.2], dtype=torch.float64)
    drawn = walk(lambda random: tuple(draw_children(law, 3, drawing, random)))
    assert len(drawn) == (6 if drawing == "without_replacement" else 27)
    for tokens, chance in drawn.items():
        expected = 1.0
        for place, token in enumerate(tokens):
            expected *= float(sibling_law(law, tokens[:place], token, drawing)[token])
        assert chance == pytest.approx(expected, abs=1e-15)


def test_the_likeliest_are_not_drawn() -> None:
    law = torch.tensor([0.1, 0.5, 0.0, 0.4])
    assert draw_children(law, 2, "top_k", Draws(0.5)) == [1, 3]
    assert sibling_law(law, [1], 3, "top_k").tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("drawing", "count"), [("with_replacement", 5), ("without_replacement", 3), ("top_k", 3)])
def test_children_run_out_with_the_support_unless_they_may_repeat(drawing: Drawing, count: int) -> None:
    law = torch.tensor([0.1, 0.5, 0.0, 0.4])
    drawn = draw_children(law, 5, drawing, RandomSource(0))
    assert len(drawn) == count
    assert set(drawn) <= {0, 1, 3}
    assert draw_children(law, 0, drawing, RandomSource(0)) == []


def test_a_child_that_nothing_was_left_for_is_never_accepted() -> None:
    """Padding after the support has run out costs nothing and changes nothing."""
    q, p = torch.tensor([0.0, 1.0, 0.0]).expand(4, 3), P[1, 2].expand(4, 3)
    assert sibling_law(q[0], [1], 0, "without_replacement").tolist() == [0, 0, 0]
    for rule in ("recursive", "traversal"):
        law = verification(rule, tree_of((1, 0, 1), (0, 0, 0)), "without_replacement", q, p)
        assert law == pytest.approx(verification(rule, tree_of((1,), (0,)), "without_replacement", q[:2], p[:2]))


# ---- identities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", TREE_RULES)
def test_nothing_drafted_draws_from_the_base(rule: str) -> None:
    law = verification(rule, tree_of((), ()), "top_k", Q[1, 2][None], P[1, 2][None])
    assert law == pytest.approx({(token,): float(P[1, 2, token]) for token in range(3)})


@pytest.mark.parametrize("drawing", SAMPLED)
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_equal_laws_accept_the_first_child_always(rule: str, drawing: Drawing) -> None:
    for seed in range(50):
        random = RandomSource(seed)
        tree = tree_of(*draft(full(2, 2), P, drawing, random, keep_all))
        verdict = verify_tree(rule, tree, drawing, rows_of(P, tree), rows_of(P, tree), random)
        first = tree.children(0)[0]
        assert verdict.path == (first, tree.children(first)[0])
        assert not verdict.residual_empty


@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_disjoint_supports_accept_nothing(rule: str, drawing: Drawing) -> None:
    p, q = P.clone(), Q.clone()
    p[..., 0], q[..., 1:] = 0, 0
    tree = tree_of(*draft(full(2, 1), q, drawing, RandomSource(0), keep_all))
    law = verification(rule, tree, drawing, rows_of(q, tree), rows_of(p, tree))
    assert law.keys() == {(1,), (2,)}
    assert law[1,] == pytest.approx(float(p[1, 2, 1] / p[1, 2].sum()))


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_the_likeliest_k_are_accepted_with_their_share_of_the_base(rule: str) -> None:
    for seed, count in product(range(5), (1, 2, 3)):
        p, q = probs(seed, 4, 2), probs(seed + 50, 4, 2)
        likeliest = q[CONTEXT].topk(count).indices
        share = mean_length(rule, full(count), "top_k", p, q)
        assert share == pytest.approx(float(p[CONTEXT][likeliest].sum()), abs=EXACT)


def mean_length(rule: str, shape: Shape, drawing: Drawing, p: Tensor, q: Tensor) -> float:
    """How many nodes stay on average, over all trees and verifications."""

    class Ending(Branching):
        """Does not branch on the token after the path, which no length depends on."""

        def categorical(self, probs: Tensor) -> Tensor:
            return torch.tensor(0)

    def walk_lengths(run: Callable[[RandomSource], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("decode.walk.Branching", Ending)
            return walk(run)

    mean = 0.0
    for (tokens, parents), chance in walk(lambda random: draft(shape, q, drawing, random, keep_all)).items():
        tree = tree_of(tokens, parents)
        law = verification(rule, tree, drawing, rows_of(q, tree), rows_of(p, tree), walk_lengths)
        mean += chance * sum(conditional * (len(text) - 1) for text, conditional in law.items())
    return mean


@pytest.mark.parametrize("count", [2, 3])
def test_no_repetition_accepts_at_least_as_often(count: int) -> None:
    gains = []
    for seed in range(12):
        p, q = probs(seed, 4, 2), probs(seed + 50, 4, 2)
        without = mean_length("recursive", full(count), "without_replacement", p, q)
        gains.append(without - mean_length("recursive", full(count), "with_replacement", p, q))
    assert min(gains) > -EXACT
    assert max(gains) > 0.01


@pytest.mark.parametrize("drawing", SAMPLED)
def test_traversal_keeps_at_least_as_many_as_recursion(drawing: Drawing) -> None:
    gains = []
    for seed in range(12):
        p, q = probs(seed, 3, 1.5), probs(seed + 50, 3, 1.5)
        shape = (full(1, 1), full(1, 2), RAGGED, full(2, 1))[seed % 4]
        gain = mean_length("traversal", shape, drawing, p, q) - mean_length("recursive", shape, drawing, p, q)
        gains.append(gain)
    assert min(gains) > -EXACT
    assert max(gains) > 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_draw_all_rules_are_one(shape: str) -> None:
    """Where the text leaves a fixed tree is settled by the text alone, so no rule can keep more than another."""
    tree = tree_of(*draft(SHAPES[shape], SPARSE_Q, "top_k", RandomSource(0), keep_all))
    q, p = rows_of(SPARSE_Q, tree), rows_of(SPARSE_P, tree)
    match, recursive, traversal = (verification(rule, tree, "top_k", q, p) for rule in sorted(TREE_RULES))
    assert total_variation(match, recursive) < EXACT
    assert total_variation(match, traversal) < EXACT


@pytest.mark.parametrize("drawing", SAMPLED)
@pytest.mark.parametrize(("rule", "chain_rule"), [("recursive", "token"), ("traversal", "block"), ("match", "match")])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_on_a_chain_they_are_the_rules_for_chains(rule: str, chain_rule: str, drafts: int, drawing: Drawing) -> None:
    """For every draft, the same law of the committed text, and so of how many stay."""
    for tokens in product(range(3), repeat=drafts):
        tree = tree_of(tokens, tuple(range(drafts)))
        q, p = rows_of(Q, tree), rows_of(P, tree)

        def chain(random: RandomSource, tokens: tuple[int, ...] = tokens, q: Tensor = q, p: Tensor = p) -> tuple:
            verdict = verify(chain_rule, torch.tensor([tokens]), q[None, :-1], p[None], random)
            return (*tokens[: int(verdict.num_accepted)], int(verdict.next_token))

        assert total_variation(verification(rule, tree, drawing, q, p), walk(chain)) < EXACT


# ---- draws at both ends, and rounding ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 2.0**-54, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_forbidden_tokens_stay_impossible_at_both_ends_of_a_draw(rule: str, drawing: Drawing, value: float) -> None:
    """All trees of two siblings with a child each, p with one or two zeros in every row."""
    p = torch.tensor([[0.0, 0.7, 0.3], [0.0, 0.0, 1.0], [0.4, 0.6, 0.0]])
    q = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1], [0.3, 0.3, 0.4]])
    for siblings, below in product(permutations(range(3), 2), product(range(3), repeat=2)):
        tree = tree_of((*siblings, *below), (0, 0, 1, 2))
        rows = [0, *(1 + token % 2 for token in tree.tokens.tolist())]
        verdict = verify_tree(rule, tree, drawing, q[rows], p[rows], Draws(value))
        row = 0
        for child in verdict.path:
            assert p[rows[row], tree.tokens[child - 1]] > 0
            row = child
        assert p[rows[row], verdict.next_token] > 0


def test_a_lax_draw_would_accept_a_forbidden_token() -> None:
    """Why `bernoulli` is strict: u = 0 against a chance of 0. The mutant `<=` emits a token of probability 0."""
    tree, p, q = tree_of((0,), (0,)), torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0]]).expand(2, 2)

    class Lax(Draws):
        def bernoulli(self, prob: Tensor) -> Tensor:
            return self.uniform(prob.shape) <= prob

    assert verify_tree("recursive", tree, "top_k", q, p, Draws(0.0)).path == ()
    assert verify_tree("recursive", tree, "top_k", q, p, Lax(0.0)).path == (1,)


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_an_empty_residual_falls_back_and_is_reported(rule: str) -> None:
    """Rounding can leave p <= q everywhere while the draw still rejects; nothing impossible may come out."""
    q = torch.tensor([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0]])
    p = torch.tensor([[0.59, 0.4, 0.0], [1.0, 0.0, 0.0]])
    tree = tree_of((0,), (0,))
    verdict = verify_tree(rule, tree, "without_replacement", q, p, Draws(1 - 2.0**-53))
    assert verdict == TreeVerdict((), 1, True)
    assert verify_tree(rule, tree, "without_replacement", q, p, Draws(0.5)) == TreeVerdict((1,), 0, False)


def test_a_row_that_nothing_more_goes_through_is_no_rounding() -> None:
    """A weight below 1 and an empty residual: the row is rejected for good, and the verdict says nothing of it."""
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    p = torch.tensor([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]])
    # The first node has weight 0.4, its child min(1, 0.4 * 0.9 / 0.5); relu(0.4 p - q) is empty.
    verdict = verify_tree("traversal", tree_of((0, 0), (0, 1)), "without_replacement", q, p, Draws(0.999))
    assert verdict == TreeVerdict((), 1, False)


def test_a_residual_of_next_to_no_mass_is_one_nevertheless() -> None:
    """1e-20 + 1 - 1 would be 0, and the weight infinite."""
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([1 - 2.0**-53, 1e-20, 0.0], [1.0, 0.0, 0.0]))
    target, weight, empty = tree_module._after_rejection(torch.ones((), dtype=torch.float64), p, q)
    assert (target.tolist(), float(weight), empty) == ([0, 1, 0], 1, False)
    for rule in ("recursive", "traversal"):
        tree, rows = tree_of((0, 0), (0, 0)), (q.expand(3, 3), p.expand(3, 3))
        assert verify_tree(rule, tree, "with_replacement", *rows, Draws(1 - 2.0**-53)) == TreeVerdict((), 1, False)


def test_float32_probabilities_that_do_not_quite_sum_to_one() -> None:
    """Softmax rounds; drafts with q = p are still always accepted, by draws as near to 1 as they come."""
    law = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    for token, rule in product(range(0, 1000, 50), ("recursive", "traversal")):
        tree = tree_of((token, 0), (0, 0))
        rows = law.expand(3, 1000)
        verdict = verify_tree(rule, tree, "without_replacement", rows, rows, Draws(1 - 2.0**-53))
        assert verdict.path == (1,)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), vocab=st.integers(1, 5), nodes=st.integers(0, 6), data=st.data())
@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_verdict_is_always_possible(
    rule: str, drawing: Drawing, seed: int, vocab: int, nodes: int, data: st.DataObject
) -> None:
    """Whatever the tree and the laws, even tokens that these laws could not have given."""
    parents = tuple(data.draw(st.integers(0, node)) for node in range(nodes))
    generator = torch.Generator().manual_seed(seed)
    p, q = ((torch.randn(nodes + 1, vocab, generator=generator) * 2).softmax(dim=-1) for _ in range(2))
    p = torch.where(p < p.amax(-1, keepdim=True) / 3, 0.0, p)
    q = torch.where(q < q.amax(-1, keepdim=True) / 3, 0.0, q)
    tree = TokenTree(torch.randint(vocab, (nodes,), generator=generator), parents)
    verdict = verify_tree(rule, tree, drawing, q, p / p.sum(-1, keepdim=True), RandomSource(seed))
    row = 0
    for child in verdict.path:
        assert tree.parents[child - 1] == row
        assert p[row, tree.tokens[child - 1]] > 0
        row = child
    assert p[row, verdict.next_token] > 0


def test_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="--verify is 'block'; for a tree use one of match, recursive, traversal"):
        verify_tree("block", tree_of((), ()), "top_k", torch.ones(1, 2), torch.ones(1, 2), RandomSource(0))


# ---- mutants -----------------------------------------------------------------------------------------------------


def soft_law(q: Tensor, earlier: list[int], token: int, drawing: Drawing) -> Tensor:
    """q itself for every child: right only for independent draws.

    Without replacement, the second child came from what the first left over, which gives it more chance than q says; a
    likeliest token was no draw at all, so judging it by q accepts it too often.
    """
    return q.double()


@pytest.mark.parametrize("drawing", ["without_replacement", "top_k"])
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_judging_children_by_the_raw_q_is_exposed(monkeypatch: pytest.MonkeyPatch, rule: str, drawing: Drawing) -> None:
    assert law_error(rule, full(2), drawing, SPARSE_P, SPARSE_Q) < EXACT
    monkeypatch.setattr(tree_module, "sibling_law", soft_law)
    assert law_error(rule, full(2), drawing, SPARSE_P, SPARSE_Q) > 0.01
    assert law_error(rule, full(2), "with_replacement", SPARSE_P, SPARSE_Q) < EXACT


def redraw_after_mismatch(tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, random: RandomSource) -> TreeVerdict:
    """The first draw already failed to be a child, so the committed token must be that one, no child. A new draw may be
    a child again, and children come out too often."""
    honest = tree_module.match_rule(tree, drawing, q, p, random)
    row = honest.path[-1] if honest.path else 0
    return TreeVerdict(honest.path, int(random.categorical(p[row])), False)


def best_of_two_paths(tree: TokenTree, drawing: Drawing, q: Tensor, p: Tensor, random: RandomSource) -> TreeVerdict:
    """Each path judged alone is exact; keeping the longer one favours the texts that are accepted easily."""
    verdicts = []
    for leaf in (row for row in range(1, len(tree.parents) + 1) if not tree.children(row)):
        path = tree.path(leaf)
        tokens = torch.tensor([[int(tree.tokens[row - 1]) for row in path]])
        rows = [0, *path]
        verdict = verify("token", tokens, q[None, rows[:-1]], p[None, rows], random)
        verdicts.append(TreeVerdict(path[: int(verdict.num_accepted)], int(verdict.next_token), False))
    return max(verdicts, key=lambda verdict: len(verdict.path))


@pytest.mark.parametrize(
    ("rule", "mutant", "shape", "drawing"),
    [
        ("match", redraw_after_mismatch, "2", "without_replacement"),
        ("match", redraw_after_mismatch, "2", "top_k"),
        ("recursive", best_of_two_paths, "2", "without_replacement"),
        ("recursive", best_of_two_paths, "2-1", "with_replacement"),
        ("recursive", best_of_two_paths, "1-2", "with_replacement"),  # the shared node is judged once per path
    ],
)
def test_a_wrong_rule_is_exposed(
    monkeypatch: pytest.MonkeyPatch, rule: str, mutant: tree_module.TreeRule, shape: str, drawing: Drawing
) -> None:
    assert law_error(rule, SHAPES[shape], drawing, SPARSE_P, SPARSE_Q) < EXACT
    monkeypatch.setitem(TREE_RULES, rule, mutant)
    assert law_error(rule, SHAPES[shape], drawing, SPARSE_P, SPARSE_Q) > 0.01


Rest = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, bool]]


def rebuilt(weight: Tensor, target: Tensor, law: Tensor) -> tuple[Tensor, Tensor, bool]:
    """What the mutants below differ from, written anew; no mutant."""
    residual = (weight * target - law).relu()
    mass = residual.sum()
    return residual / mass if mass > 0 else target, mass / (mass + 1 - weight) if mass + 1 > weight else weight, False


def forgetting_to_subtract(weight: Tensor, target: Tensor, law: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The rejected child has had its share of the target already, and gets it once more."""
    return target, rebuilt(weight, target, law)[1], False


def residual_not_normalised(weight: Tensor, target: Tensor, law: Tensor) -> tuple[Tensor, Tensor, bool]:
    """That an earlier sibling was rejected is known by now; without dividing by its chance, later ones pass too rarely.

    The last residual is drawn from in proportion, so one child alone does not show it.
    """
    return (weight * target - law).relu(), rebuilt(weight, target, law)[1], False


def token_residual(weight: Tensor, target: Tensor, law: Tensor) -> tuple[Tensor, Tensor, bool]:
    """relu(target - s) at a row of weight below 1: the child took no more than w target has, so less is left of it."""
    residual = (target - law).relu()
    return residual / residual.sum() if residual.sum() > 0 else target, rebuilt(weight, target, law)[1], False


def weight_not_updated(weight: Tensor, target: Tensor, law: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The row's own chance was shared with its children: once they are rejected, it is smaller than before."""
    return rebuilt(weight, target, law)[0], weight, False


@pytest.mark.parametrize(
    ("rule", "shape", "mutant"),
    [
        ("recursive", "2", forgetting_to_subtract),
        ("recursive", "2", residual_not_normalised),
        ("traversal", "2", forgetting_to_subtract),
        ("traversal", "2", residual_not_normalised),
        ("traversal", "1-2", token_residual),
        ("traversal", "2-1", token_residual),
        ("traversal", "1-2", weight_not_updated),
        ("traversal", "2-1", weight_not_updated),
    ],
)
@pytest.mark.parametrize("drawing", SAMPLED)
def test_a_wrong_residual_is_exposed(
    monkeypatch: pytest.MonkeyPatch, rule: str, shape: str, mutant: Rest, drawing: Drawing
) -> None:
    monkeypatch.setattr(tree_module, "_after_rejection", rebuilt)
    assert law_error(rule, SHAPES[shape], drawing, SPARSE_P, SPARSE_Q) < EXACT
    monkeypatch.setattr(tree_module, "_after_rejection", mutant)
    assert law_error(rule, SHAPES[shape], drawing, SPARSE_P, SPARSE_Q) > 0.002


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_judging_siblings_in_another_order_is_exposed(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Without replacement only the first sibling came from q itself. Independent and undrawn siblings do not mind."""
    honest = TokenTree.children
    monkeypatch.setattr(TokenTree, "children", lambda tree, row: honest(tree, row)[::-1])
    assert law_error(rule, full(2), "without_replacement", SPARSE_P, SPARSE_Q) > 0.01
    assert law_error(rule, full(2), "with_replacement", SPARSE_P, SPARSE_Q) < EXACT
    assert law_error(rule, full(2), "top_k", SPARSE_P, SPARSE_Q) < EXACT


def drop_unlikely(law: Tensor, drawn: list[int]) -> list[int]:
    """Only the likely draws stay, so those that do follow another law than the one they are judged by."""
    return [token for token in drawn if law[token] > 0.3]


def drop_repeated(law: Tensor, drawn: list[int]) -> list[int]:
    """A repeated draw is never accepted, but that it was made is part of the law of what is left."""
    return list(dict.fromkeys(drawn))


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize(
    ("keep", "drawing"), [(drop_unlikely, "without_replacement"), (drop_repeated, "with_replacement")]
)
def test_throwing_drawn_children_away_is_exposed(
    rule: str, keep: Callable[[Tensor, list[int]], list[int]], drawing: Drawing
) -> None:
    assert law_error(rule, full(3), drawing, SPARSE_P, SPARSE_Q) < EXACT
    assert law_error(rule, full(3), drawing, SPARSE_P, SPARSE_Q, keep) > 0.002
    # What was never drawn may fall away: the likeliest k are no draws.
    assert law_error(rule, full(3), "top_k", SPARSE_P, SPARSE_Q, keep) < EXACT
