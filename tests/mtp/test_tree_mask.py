"""One forward over a tree of tokens: the same as its paths read alone, on every family, or a refusal by name.

Comparisons are in float64, where a wrong mask, position or key differs by 1e-3 or more, rounding by less than 1e-12.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.target import BaseTarget
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.tree import TokenTree
from mtp.tree_mask import TreeMask
from tests.tiny import CONTEXT, FAMILIES, NUM_LAYERS, VOCAB_SIZE, exact_base, tiny_model

ALL_STATES = tuple(range(NUM_LAYERS + 1))
SLIDING = ("mistral", "gemma3")
TREES = tuple(family for family in FAMILIES if family not in SLIDING)


@pytest.fixture(scope="module")
def bases() -> dict[str, FrozenBase]:
    return {family: exact_base(family) for family in FAMILIES}


def random_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def random_tree(rng: random.Random, nodes: int) -> TokenTree:
    """Any parents, so that rows of one path lie apart; siblings may share a token."""
    parents = tuple(rng.randint(max(0, row - 6), row) for row in range(nodes))
    return TokenTree(random_tokens(nodes, rng.randrange(2**31)), parents)


def mask(tree: TokenTree) -> TreeMask:
    return TreeMask(tree.visible(), torch.tensor(tree.depths))


def read_alone(base: FrozenBase, text: Tensor) -> Tensor:
    """All states of a text [n] without a cache."""
    return base.forward(text[None], feature_layers=ALL_STATES).features[0]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


# ---- the same as the paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", TREES)
def test_every_node_is_as_if_its_path_were_read_alone(bases: dict[str, FrozenBase], family: str, seed: int) -> None:
    base, rng = bases[family], random.Random(f"{family} {seed}")
    base.require_trees()
    prompt = random_tokens(rng.randint(1, 20), seed)
    tree = random_tree(rng, rng.randint(6, 20))
    block = torch.cat([random_tokens(1, seed + 100), tree.tokens])
    cache = base.new_cache()
    base.forward(prompt[None], cache=cache)
    output = base.forward(block[None], cache=cache, feature_layers=ALL_STATES, tree=mask(tree))
    assert cache.length == len(prompt) + len(block)
    for row in range(len(block)):
        path = [0, *tree.path(row)]
        alone = base.forward(torch.cat([prompt, block[path]])[None], feature_layers=ALL_STATES)
        assert_same(output.features[0, row], alone.features[0, -1])
        assert_same(output.hidden[0, row], alone.hidden[0, -1])
        assert_same(base.logits(output.hidden[0, row]), base.logits(alone.hidden[0, -1]))


@pytest.mark.parametrize("family", TREES)
@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_comparison_notices_a_causal_mask_and_wrong_positions(
    bases: dict[str, FrozenBase], family: str, fault: str
) -> None:
    """The negative control: the same nodes as a chain, or each at the place of its row."""
    base, prompt = bases[family], random_tokens(7, 0)
    tree = TokenTree(random_tokens(4, 1), (0, 0, 2, 2))
    block = torch.cat([random_tokens(1, 2), tree.tokens])
    wrong = mask(tree)
    if fault == "mask":
        wrong = TreeMask(torch.ones(5, 5, dtype=torch.bool).tril(), wrong.depths)
    else:
        wrong = TreeMask(wrong.visible, torch.arange(5))
    cache = base.new_cache()
    base.forward(prompt[None], cache=cache)
    seen = base.forward(block[None], cache=cache, feature_layers=ALL_STATES, tree=wrong).features[0, 4]
    alone = read_alone(base, torch.cat([prompt, block[[0, *tree.path(4)]]]))[-1]
    assert (seen - alone).abs().max() > 1e-3


@pytest.mark.parametrize("family", TREES)
def test_a_chain_is_the_tree_without_branches(bases: dict[str, FrozenBase], family: str) -> None:
    base, prompt, block = bases[family], random_tokens(5, 3), random_tokens(6, 4)
    chain = TokenTree(block[1:], tuple(range(5)))
    seen = []
    for tree in (None, mask(chain)):
        cache = base.new_cache()
        base.forward(prompt[None], cache=cache)
        seen.append(base.forward(block[None], cache=cache, feature_layers=ALL_STATES, tree=tree).features)
    assert_same(*seen)


@pytest.mark.parametrize("family", TREES)
def test_float32_through_the_target(family: str) -> None:
    """What decoding really calls: logits and features of `BaseTarget`, whose products take the fast way round."""
    base = FrozenBase.from_model(tiny_model(family), None, family)
    target, tree, prompt = BaseTarget(base), random_tree(random.Random(family), 12), random_tokens(9, 5)
    block = torch.cat([random_tokens(1, 6), tree.tokens])
    target.start((1, 3))
    target.forward(prompt[None], 0)
    output = target.forward_tree(block[None], tree.visible(), torch.tensor(tree.depths))
    for row in range(len(block)):
        alone = base.forward(torch.cat([prompt, block[[0, *tree.path(row)]]])[None], feature_layers=(1, 3))
        torch.testing.assert_close(output.features[0, row], alone.features[0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.logits[0, row], base.logits(alone.hidden[0, -1]), atol=1e-4, rtol=1e-4)


# ---- keep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TREES)
def test_a_cache_that_kept_a_path_goes_on_as_if_it_was_fed_the_path(bases: dict[str, FrozenBase], family: str) -> None:
    """Several trees in a row, far enough for the buffers of 128 positions to grow, and a chain at the end."""
    base, rng = bases[family], random.Random(family)
    cache, committed = base.new_cache(), random_tokens(122, 7)
    base.forward(committed[None], cache=cache)
    apart = False
    for _ in range(6):
        tree = random_tree(rng, rng.randint(4, 14))
        block = torch.cat([random_tokens(1, rng.randrange(2**31)), tree.tokens])
        seen = base.forward(block[None], cache=cache, feature_layers=ALL_STATES, tree=mask(tree)).features[0]
        path = [0, *tree.path(rng.randrange(len(block)))]
        apart |= path != list(range(len(path)))
        length = len(committed)
        cache.keep(length, [length + row for row in path])
        committed = torch.cat([committed, block[path]])
        assert cache.length == cache.native.get_seq_length() == len(committed)
        assert_same(seen[path], read_alone(base, committed)[length:])
    assert apart
    assert 128 < len(committed) < CONTEXT
    more = random_tokens(5, 8)
    step = base.forward(more[None], cache=cache, feature_layers=ALL_STATES).features[0]
    assert_same(step, read_alone(base, torch.cat([committed, more]))[-5:])


def test_the_comparison_notices_a_wrong_path(bases: dict[str, FrozenBase]) -> None:
    base, prompt, tree = bases["llama"], random_tokens(6, 9), TokenTree(random_tokens(3, 10), (0, 0, 2))
    block, more = torch.cat([random_tokens(1, 11), tree.tokens]), random_tokens(1, 12)
    expected = read_alone(base, torch.cat([prompt, block[[0, 2, 3]], more]))[-1]
    errors = []
    for rows in ([0, 2, 3], [0, 1, 3], [0, 1, 2]):
        cache = base.new_cache()
        base.forward(prompt[None], cache=cache)
        base.forward(block[None], cache=cache, tree=mask(tree))
        cache.keep(6, [6 + row for row in rows])
        step = base.forward(more[None], cache=cache, feature_layers=ALL_STATES).features[0, 0]
        errors.append(float((step - expected).abs().max()))
    assert errors[0] < 1e-10
    assert min(errors[1:]) > 1e-3


def test_keep_all_and_keep_what_is_not_there(bases: dict[str, FrozenBase]) -> None:
    base, text = bases["qwen2"], random_tokens(8, 13)
    cache = base.new_cache()
    cache.keep(0, [])  # an empty cache has no buffers yet
    base.forward(text[None], cache=cache)
    cache.keep(5, [5, 6, 7])
    assert cache.length == 8
    for places in ([8], [2]):
        with pytest.raises(AssertionError):
            cache.keep(3, places)
    cache.keep(2, [2, 3])
    step = base.forward(text[None, 4:], cache=cache, feature_layers=ALL_STATES).features[0]
    assert_same(step, read_alone(base, text)[4:])


def test_keep_no_row_of_the_tree(bases: dict[str, FrozenBase]) -> None:
    base, text = bases["qwen2"], random_tokens(8, 13)
    cache = base.new_cache()
    base.forward(text[None], cache=cache)
    cache.keep(3, [])
    step = base.forward(text[None, 3:], cache=cache, feature_layers=ALL_STATES).features[0]
    assert_same(step, read_alone(base, text)[3:])


# ---- refusals --------------------------------------------------------------------------------------------------------


def fake(change: Callable[[dict[str, Any]], None]) -> FrozenBase:
    """A base whose attention gets other arguments than it was given."""
    base = exact_base("llama")
    forward = base._inner.forward

    def changed(**arguments: Any) -> Any:
        change(arguments)
        return forward(**arguments)

    base._inner.forward = changed
    return base


def ignore_mask(arguments: dict[str, Any]) -> None:
    arguments.pop("attention_mask", None)


def ignore_positions(arguments: dict[str, Any]) -> None:
    arguments.pop("position_ids", None)


def refuse_mask(arguments: dict[str, Any]) -> None:
    if arguments.get("attention_mask") is not None and arguments["attention_mask"].ndim == 4:
        raise ValueError("masks have two dimensions here")


def nan_with_mask(arguments: dict[str, Any]) -> None:
    if arguments.get("attention_mask") is not None:
        arguments["attention_mask"] = arguments["attention_mask"] * float("inf")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (ignore_mask, "does not follow the mask"),
        (ignore_positions, "does not follow the mask"),
        (nan_with_mask, "does not follow the mask"),
        (refuse_mask, r"takes no mask of a tree \(ValueError\)"),
    ],
)
def test_a_base_that_does_not_heed_the_mask_is_refused(change: Callable[[dict[str, Any]], None], reason: str) -> None:
    with pytest.raises(UserError, match=f"--tree cannot be used with base 'tiny-llama': .*{reason}.*leave --tree out"):
        fake(change).require_trees()


@pytest.mark.parametrize("family", SLIDING)
def test_a_sliding_window_is_refused(bases: dict[str, FrozenBase], family: str) -> None:
    with pytest.raises(UserError, match=f"base 'tiny-{family}': some of its layers see a sliding window only"):
        bases[family].require_trees()


GPT_NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 64,
}
OTHERS = {
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, "it takes no positions"),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4}, "it takes no positions"),
    "falcon": ({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, "takes no mask"),
    "gpt_neo": (GPT_NEO | {"window_size": 4}, "sliding window"),
}


def other(kind: str, fields: dict[str, Any]) -> FrozenBase:
    common = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **common, **fields, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FrozenBase.from_model(AutoModelForCausalLM.from_config(config).double(), None, f"tiny-{kind}")


@pytest.mark.parametrize("kind", OTHERS)
def test_alibi_and_local_attention_are_refused_by_name(kind: str) -> None:
    """Distances counted in rows, not places, are wrong in a tree."""
    fields, reason = OTHERS[kind]
    with pytest.raises(UserError, match=rf"base 'tiny-{kind}': .*{reason}"):
        other(kind, fields).require_trees()


def test_local_attention_with_a_longer_window_is_refused_too() -> None:
    """`gpt_neo` slides over rows inside its attention; 16 here, 256 in its checkpoints."""
    with pytest.raises(UserError, match="sliding window"):
        other("gpt_neo", GPT_NEO | {"window_size": 16}).require_trees()


@pytest.mark.parametrize("change", [None, ignore_mask], ids=["able", "unable"])
def test_the_probe_runs_once(change: Callable[[dict[str, Any]], None] | None) -> None:
    calls: list[int] = []

    def count(arguments: dict[str, Any]) -> None:
        calls.append(1)
        if change is not None:
            change(arguments)

    base = fake(count)
    for _ in range(3):
        if change is None:
            base.require_trees()
        else:
            with pytest.raises(UserError):
                base.require_trees()
    assert len(calls) == 4  # the prompt, the tree, and its two paths
