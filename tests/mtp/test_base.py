"""FrozenBase on small random models of eight architectures, and on the embedded base.

Comparisons of cached with uncached runs are in float64, where a wrong position, mask or stale key differs by 1e-3 or
more and rounding by less than 1e-12.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.output import project
from tests.tiny import (
    FAMILIES,
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    exact_base,
    save_tiny,
    tiny_base,
    tiny_model,
    tiny_tokenizer,
)

ALL_STATES = tuple(range(NUM_LAYERS + 1))
SLIDING = ("mistral", "gemma3")


@pytest.fixture(scope="module")
def bases() -> dict[str, FrozenBase]:
    return {family: exact_base(family) for family in FAMILIES}


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def states(base: FrozenBase, tokens: Tensor, **arguments: Any) -> Tensor:
    return base.forward(tokens, feature_layers=ALL_STATES, **arguments).features


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_run_with_rollbacks_equals_recomputation(bases: dict[str, FrozenBase], family: str) -> None:
    """Prompt of 6 (shorter than the window of 8), 20 committed tokens, each step of 1…5 rolled back by 0…4."""
    base, rng = bases[family], random.Random(family)
    cache, committed = base.new_cache(), random_tokens(2, 6)
    states(base, committed, cache=cache)
    while committed.shape[1] < 26:
        drafted = random_tokens(2, rng.randint(1, 5), seed=rng.randrange(2**31))
        run = torch.cat([committed, drafted], dim=1)
        seen = states(base, drafted, cache=cache)
        assert_same(seen, states(base, run)[:, committed.shape[1] :])
        assert cache.length == run.shape[1]
        committed = run[:, : run.shape[1] - rng.randint(0, min(4, drafted.shape[1]))]
        cache.rollback(committed.shape[1])
        assert cache.length == cache.native.get_seq_length() == committed.shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_comparison_notices_a_missing_rollback(bases: dict[str, FrozenBase], family: str) -> None:
    base, tokens, other = bases[family], random_tokens(1, 12), random_tokens(1, 3, seed=1)
    cache = base.new_cache()
    states(base, torch.cat([tokens, other], dim=1), cache=cache)
    seen = states(base, tokens[:, -1:], cache=cache)
    assert (seen - states(base, tokens)[:, -1:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_to_any_length_and_reuse(bases: dict[str, FrozenBase], family: str) -> None:
    """Also back to nothing, and beyond the first buffer of 128 positions."""
    base, tokens = bases[family], random_tokens(1, 150)
    expected, cache = states(base, tokens), base.new_cache()
    for start, end in [(0, 20), (0, 127), (126, 131), (128, 150), (3, 150)]:
        cache.rollback(start)
        assert_same(states(base, tokens[:, start:end], cache=cache), expected[:, start:end])


def test_rollback_outside_the_cache_is_refused(bases: dict[str, FrozenBase]) -> None:
    cache = bases["llama"].new_cache()
    bases["llama"].forward(random_tokens(1, 4), cache=cache)
    for length in (-1, 5):
        with pytest.raises(UserError, match=f"rollback length {length} is outside 0…4"):
            cache.rollback(length)


def test_rollback_does_not_copy(bases: dict[str, FrozenBase]) -> None:
    cache = bases["llama"].new_cache()
    bases["llama"].forward(random_tokens(1, 4), cache=cache)
    before = [layer.keys.data_ptr() for layer in cache.layers]
    cache.rollback(2)
    bases["llama"].forward(random_tokens(1, 6), cache=cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == before


def test_two_caches_do_not_share_state(bases: dict[str, FrozenBase]) -> None:
    base, first, second = bases["llama"], random_tokens(1, 8), random_tokens(1, 8, seed=1)
    caches = base.new_cache(), base.new_cache()
    for t in range(8):
        one, two = (
            states(base, tokens[:, t : t + 1], cache=cache)
            for tokens, cache in zip((first, second), caches, strict=True)
        )
    assert_same(one, states(base, first)[:, -1:])
    assert_same(two, states(base, second)[:, -1:])


def test_select_keeps_rows_of_the_batch(bases: dict[str, FrozenBase]) -> None:
    base, tokens, new = bases["llama"], random_tokens(3, 9), random_tokens(2, 2, seed=1)
    cache = base.new_cache()
    base.forward(tokens, cache=cache)
    cache.rollback(7)
    cache.select(torch.tensor([2, 0]))
    expected = states(base, torch.cat([tokens[[2, 0], :7], new], dim=1))[:, 7:]
    assert_same(states(base, new, cache=cache), expected)


STATEFUL = {
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 32},
    "lfm2": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "layer_types": ["conv", "full_attention"],
    },
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_base_whose_state_cannot_be_rolled_back_is_refused_by_name(kind: str) -> None:
    config = AutoConfig.for_model(kind, **STATEFUL[kind], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    base = FrozenBase.from_model(AutoModelForCausalLM.from_config(config), None, f"tiny-{kind}")
    with pytest.raises(UserError, match=rf"'tiny-{kind}' keeps its past in .*\w+.*cannot be rolled back"):
        base.new_cache()


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(bases: dict[str, FrozenBase], family: str) -> None:
    """A row behind five pads, with a cache: prompt, one rejected draft, one step."""
    base, long, short = bases[family], random_tokens(1, 14), random_tokens(1, 9, seed=1)
    tokens = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, :5] = False
    cache = base.new_cache()
    prompt = states(base, tokens[:, :11], cache=cache, attention_mask=mask[:, :11])
    states(
        base, random_tokens(2, 2, seed=2), cache=cache, attention_mask=torch.cat([mask[:, :11], mask[:, -2:]], dim=1)
    )
    cache.rollback(11)
    step = states(base, tokens[:, 11:], cache=cache, attention_mask=mask)
    assert_same(torch.cat([prompt, step], dim=1)[0], states(base, long)[0])
    assert_same(torch.cat([prompt, step], dim=1)[1, 5:], states(base, short)[0])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SLIDING])
def test_masked_position_inside_the_cache_is_as_if_absent(bases: dict[str, FrozenBase], family: str) -> None:
    """What lets rows of a batch accept different numbers of drafts (a window would count the absent position)."""
    base, tokens = bases[family], random_tokens(1, 10)
    mask = torch.ones_like(tokens)
    mask[:, 4:6] = 0
    cache = base.new_cache()
    states(base, tokens[:, :7], cache=cache, attention_mask=mask[:, :7])
    step = states(base, tokens[:, 7:], cache=cache, attention_mask=mask)
    assert_same(step, states(base, tokens[:, [0, 1, 2, 3, 6, 7, 8, 9]])[:, 5:])


# ---- features and logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_logits_are_those_of_transformers(bases: dict[str, FrozenBase], family: str) -> None:
    base, tokens = bases[family], random_tokens(2, 13)
    expected = base.model(input_ids=tokens, output_hidden_states=True)
    output = base.forward(tokens, feature_layers=ALL_STATES)
    assert output.features.shape == (2, 13, HIDDEN_SIZE * len(ALL_STATES))
    for layer, state in enumerate(output.features.chunk(len(ALL_STATES), dim=-1)):
        assert_same(state, expected.hidden_states[layer])
    assert_same(output.hidden, expected.hidden_states[-1])
    assert_same(base.logits(output.hidden), expected.logits)


def test_feature_layers_keep_the_order_asked_for(bases: dict[str, FrozenBase]) -> None:
    base, tokens = bases["llama"], random_tokens(1, 5)
    every = states(base, tokens).chunk(len(ALL_STATES), dim=-1)
    for asked in [(3, 1), (4, 0), (2,), (4,), (2, 2)]:
        assert_same(
            base.forward(tokens, feature_layers=asked).features, torch.cat([every[layer] for layer in asked], dim=-1)
        )
    assert base.forward(tokens).features.shape == (1, 5, 0)


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS + 1])
def test_unknown_feature_layer_is_refused_and_leaves_no_hook(bases: dict[str, FrozenBase], layer: int) -> None:
    base = exact_base("llama")  # fresh: transformers leaves hooks of its own behind output_hidden_states
    with pytest.raises(UserError, match=f"feature_layers: id {layer} is outside 0…{NUM_LAYERS}"):
        base.forward(random_tokens(1, 3), feature_layers=(0, layer))
    assert not any(module._forward_pre_hooks for module in base.model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_logits_are_float32_in_every_precision(family: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    base = FrozenBase.from_pretrained(str(save_tiny(family, tmp_path)), dtype=dtype, device="cpu")
    tokens = random_tokens(1, 7)
    logits = base.logits(base.forward(tokens).hidden)
    assert base.dtype == getattr(torch, dtype)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, base.model(input_ids=tokens).logits.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("phi", {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}),  # output bias
        ("cohere", {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "logit_scale": 0.25}),
        ("granite", {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "logits_scaling": 8.0}),
        ("gemma2", {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}),
    ],
)
def test_scale_cap_and_bias_of_the_logits(kind: str, fields: dict[str, Any]) -> None:
    common = {"num_hidden_layers": 2, "vocab_size": 64, "initializer_range": 0.5, "num_key_value_heads": 4}
    config = AutoConfig.for_model(kind, **common, **fields, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    if model.get_output_embeddings().bias is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    base = FrozenBase.from_model(model, None, kind)
    tokens = random_tokens(1, 9)
    expected = model(input_ids=tokens).logits
    torch.testing.assert_close(base.logits(base.forward(tokens).hidden), expected, atol=1e-4, rtol=1e-4)
    assert (base.output_bias is not None) == (kind == "phi")


@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_for_few_rows_is_the_product(rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, matrix = (torch.randn(n, 24, generator=generator) for n in (rows, 50))
    bias = torch.randn(50, generator=generator) if with_bias else None
    actual = project(hidden[:, None], matrix, bias)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, torch.nn.functional.linear(hidden[:, None], matrix, bias))


def test_unknown_treatment_of_logits_is_refused() -> None:
    model = tiny_model("llama")
    forward = model.forward

    def doubled(*positional: Any, **named: Any) -> Any:
        output = forward(*positional, **named)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(UserError, match="turns its last state into logits in a way"):
        FrozenBase.from_model(model, None, "doubled")


# ---- frozen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_base_is_frozen_and_unchanged_by_running(bases: dict[str, FrozenBase], family: str) -> None:
    base = bases[family]
    before = base.checksum()
    parent = nn.ModuleDict({"base": base.model, "head": nn.Linear(2, 2)})
    parent.train()
    assert parent["head"].training
    assert not any(module.training for module in base.model.modules())
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    output = base.forward(random_tokens(1, 6), cache=base.new_cache(), feature_layers=(1,))
    assert not output.hidden.requires_grad
    assert base.checksum() == before


def test_features_can_be_inputs_of_training(bases: dict[str, FrozenBase]) -> None:
    """Neither features nor logits are inference tensors; the logits carry gradients back to the state they read."""
    base = bases["llama"]
    features = base.forward(random_tokens(1, 4), feature_layers=(0, 2)).features
    head = nn.Linear(features.shape[-1], HIDDEN_SIZE, dtype=torch.float64)
    base.logits(head(features)).sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in base.model.parameters())


def test_shared_tensors_are_the_bases_own_storage(bases: dict[str, FrozenBase]) -> None:
    base = bases["llama"]
    assert base.embedding.data_ptr() == base.model.get_input_embeddings().weight.data_ptr()
    assert base.output_matrix.data_ptr() == base.model.get_output_embeddings().weight.data_ptr()
    assert not base.output_matrix.requires_grad
    assert bases["qwen2"].embedding.data_ptr() == bases["qwen2"].output_matrix.data_ptr()  # tied


@pytest.mark.parametrize("family", FAMILIES)
def test_facts(bases: dict[str, FrozenBase], family: str) -> None:
    base = bases[family]
    assert (base.hidden_size, base.vocab_size, base.num_layers, base.context_length) == (32, 64, 4, 256)
    assert base.eos_token_ids == (2,)
    assert len(base.tokenizer) < base.vocab_size
    normed = base.final_norm(base.forward(random_tokens(1, 3)).hidden)
    assert normed.shape == (1, 3, HIDDEN_SIZE)
    assert "Norm" in type(base.final_norm).__name__
    assert base.last_block is base._layers[-1]


# ---- identity --------------------------------------------------------------------------------------------------------


def test_fingerprint_survives_precision_and_sees_other_weights(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "a")
    prints = {
        FrozenBase.from_pretrained(str(folder), dtype=dtype, device="cpu").fingerprint()
        for dtype in ("float32", "bfloat16", "auto")
    }
    assert len(prints) == 1
    assert tiny_base("llama", tmp_path, seed=1).fingerprint() not in prints
    assert tiny_base("qwen3", tmp_path).fingerprint() not in prints


def test_checksum_sees_a_single_changed_element() -> None:
    base = exact_base("llama")
    before = base.checksum()
    with torch.no_grad():
        base.model.get_output_embeddings().weight[17, 5] += 1e-12
    assert base.checksum() != before


def test_tokenizer_fingerprint_sees_vocabulary_special_tokens_and_template() -> None:
    base = exact_base("llama")
    prints = [base.tokenizer_fingerprint()]
    for change in (
        lambda t: t.add_tokens(["zebra"]),
        lambda t: setattr(t, "eos_token", "<|endoftext|>"),
        lambda t: setattr(t, "chat_template", "{{ messages }}"),
    ):
        base.tokenizer = tiny_tokenizer()
        assert base.tokenizer_fingerprint() == prints[0]
        change(base.tokenizer)
        prints.append(base.tokenizer_fingerprint())
    assert len(set(prints)) == len(prints)


# ---- the embedded base -----------------------------------------------------------------------------------------------


def test_embedded_base_knows_the_capital_of_france(smollm2: FrozenBase) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = smollm2.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    cache, tokens, answer = smollm2.new_cache(), encoded["input_ids"], []
    while len(answer) < 12:
        tokens = smollm2.logits(smollm2.forward(tokens, cache=cache).hidden[:, -1:]).argmax(-1)
        if int(tokens) in smollm2.eos_token_ids:
            break
        answer.append(int(tokens))
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris."


def test_embedded_base_has_its_sizes_and_tokenizer(smollm2: FrozenBase) -> None:
    assert (smollm2.num_layers, smollm2.hidden_size, smollm2.vocab_size) == (30, 576, 49152)
    assert (smollm2.context_length, smollm2.eos_token_ids, smollm2.dtype) == (8192, (2,), torch.float32)
    assert smollm2.embedding.data_ptr() == smollm2.output_matrix.data_ptr()
    # Numbers are cut into digits before anything else, so the two line breaks are one token.
    assert smollm2.tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    assert smollm2.tokenizer("Hello").input_ids == smollm2.tokenizer("Hello", add_special_tokens=False).input_ids


def test_embedded_base_rolls_back(smollm2: FrozenBase) -> None:
    tokens = torch.arange(100, 112)[None]
    cache = smollm2.new_cache()
    smollm2.forward(torch.cat([tokens[:, :8], tokens[:, :4] + 500], dim=1), cache=cache)
    cache.rollback(8)
    step = smollm2.forward(tokens[:, 8:], cache=cache).hidden
    torch.testing.assert_close(step, smollm2.forward(tokens).hidden[:, 8:], atol=1e-3, rtol=1e-3)
