"""Small random bases of real architectures, with a small real tokenizer, for tests.

Every model has V = 64, D = 32, 4 decoder layers and 256 positions, and weights wide enough for logits to differ
clearly. The tokenizer has fewer than 64 tokens, so the vocabulary is padded as that of many real bases.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mtp.base import FrozenBase
from mtp.gguf_file import quiet_transformers

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, CONTEXT = 64, 32, 4, 256
WINDOW = 8  # of the families with sliding-window attention

_COMMON = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
_SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "qwen2": ("qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", _GROUPED | {"head_dim": 8}),
    "mistral": ("mistral", _GROUPED | {"sliding_window": WINDOW, "head_dim": 8}),
    "gpt2": ("gpt2", {"n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": CONTEXT}),
    "gpt_neox": ("gpt_neox", _SIZES),
    "phi3": ("phi3", _GROUPED),
    "gemma3": (
        "gemma3_text",
        _GROUPED
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING}
        | {"final_logit_softcapping": 5.0},
    ),
}
FAMILIES = tuple(_FAMILIES)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = [
    ("u", "s"),
    ("e", "r"),
    ("us", "er"),
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("a", "n"),
    ("an", "t"),
    ("Ġ", "the"),
]


def tiny_config(family: str) -> Any:
    """Configuration of one of `FAMILIES`."""
    model_type, fields = _FAMILIES[family]
    return AutoConfig.for_model(model_type, **(_COMMON | fields))


def tiny_model(family: str, seed: int = 0) -> Any:
    """Random float32 model in eval mode; the same weights for the same seed. Global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over lower-case text with a few merges, chat markers and a chat template."""
    alphabet = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [
        *"0123456789",
        *"ĠĊ.,?!:",
    ]  # Ġ and Ċ are byte-level BPE's space and newline
    tokens = [*_SPECIAL, *alphabet, *("".join(pair) for pair in _MERGES)]
    backend = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)}, list(_MERGES), unk_token="<|endoftext|>", fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(family: str, folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer in transformers' format; returns the folder."""
    with quiet_transformers():
        tiny_model(family, seed).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_base(family: str, tmp_path: Path, seed: int = 0) -> FrozenBase:
    """A base saved below `tmp_path` and loaded through `FrozenBase.from_pretrained`, float32 on the CPU."""
    folder = tmp_path / f"{family}-{seed}"
    if not folder.exists():
        save_tiny(family, folder, seed)
    return FrozenBase.from_pretrained(str(folder), dtype="float32", device="cpu")


def exact_base(family: str, seed: int = 0) -> FrozenBase:
    """The same weights in float64, for comparisons with tight tolerances."""
    return FrozenBase.from_model(tiny_model(family, seed).double(), tiny_tokenizer(), f"tiny-{family}")


def write_tiny_gguf(path: Path, seed: int = 0) -> Path:
    """`tiny_model("llama", seed)` and the tiny tokenizer as a GGUF file, laid out as llama.cpp's converter does.

    The tokenizer declares the pre-tokenizer of the embedded base.
    """
    from gguf import GGUFWriter

    model, tokenizer = tiny_model("llama", seed), tiny_tokenizer()
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny Llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_order(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens = vocabulary + [f"[PAD{i}]" for i in range(len(vocabulary), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in _SPECIAL else 5 if token.startswith("[PAD") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in _MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_name(name: str) -> str:
    for ours, theirs in _GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _gguf_order(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs of a head, transformers its two halves: rows of q and k interleave."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape).contiguous()
