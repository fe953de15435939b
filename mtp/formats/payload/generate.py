"""`model.generate(…, custom_generate=<this folder>, trust_remote_code=True)`: heads draft, the model decides.

A step drafts up to K tokens from the heads (q), runs the model once over them (p), and keeps a prefix of them by
rejection sampling, so that the text is distributed exactly as the model's own. Greedily, drafts stay while they are the
model's likeliest token. Otherwise the block rule of Sun et al. (arXiv 2403.10444), Algorithm 2, judges them together.

Knows: one text at a time, and the settings in `HONOURED`; any other that would change the text is refused, not ignored.
Needs torch, transformers, safetensors, and `draft_heads.py` and `fingerprint.py` beside it.

Shapes: T position, K draft position, V vocabulary.
"""

import inspect
import json
import math
import os
import sys
import warnings
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mtp.fingerprint import model_fingerprint
from mtp.formats.payload.draft_heads import DraftHeads

HONOURED = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id")
_DEFAULTS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_NEW_TOKENS = 20  # of transformers, where nobody says how many
_OFF = {
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "logits_processor": [],
    "stopping_criteria": [],
}
"""Values at which settings that are not honoured change nothing; that of all others is false or 0."""
_HARMLESS = (
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "use_cache",
    "transformers_version",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)
_SMALLEST_UNIFORM = 2.0**-54
_LEAST, _MOST = 1e-30, 1e30  # what float32 can divide by
_SMALL_TEMPERATURE = 1e-2  # above it, logits can be divided as they are


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    inputs: Tensor | None = None,
    heads: str | None = None,
    draft_length: int | None = None,
    seed: int | None = None,
    streamer: Any = None,
    **settings: Any,
) -> Tensor:
    """Ids [1, T + new] of input_ids [1, T] and what follows them.

    heads: this folder, or its id on the Hub, where it cannot be seen from the call. draft_length: K, at most what the
    heads were trained for (the default). seed: of all draws; None takes one from torch's global generator. ValueError
    on a batch, on padding, on a value that is none, and on a setting that is not honoured.
    """
    text = input_ids if input_ids is not None else inputs
    if not isinstance(text, Tensor) or text.dim() != 2 or text.shape[0] != 1 or not text.shape[1]:
        shown = tuple(text.shape) if isinstance(text, Tensor) else text
        raise ValueError(f"input_ids is {shown}; give one text, a tensor [1, T].")
    if seed is not None and not (_is_whole(seed) and 0 <= seed < 2**63):
        raise ValueError(f"seed is {seed!r}; use a whole number from 0 to 2**63 - 1, or None.")
    folder = _folder(_named_by_caller() if heads is None else heads)
    found = settle(model, generation_config, settings, text.shape[1])
    loaded = load_heads(model, folder)
    trained = loaded.config["draft_length"]
    k = trained if draft_length is None else draft_length
    if not (_is_whole(k) and 0 <= k <= trained):
        raise ValueError(f"draft_length is {k!r}; these heads were trained for 0 to {trained}, a whole number.")
    return Run(model, loaded, found, Draws(seed)).to_end(text, k, streamer)


def _named_by_caller() -> str | None:
    """What transformers was told as `custom_generate`: it copies this code elsewhere and does not pass that on."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("custom_generate"), str):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else str(frame.f_locals["custom_generate"])


def _folder(heads: Any) -> Path:
    """Where the weights lie."""
    if not isinstance(heads, (str, os.PathLike)):
        told = "missing" if heads is None else repr(heads)
        raise ValueError(f"heads is {told}; give heads=<the folder, or its id on the Hub>.")
    folder = Path(heads) if Path(heads).is_dir() else Path(snapshot_download(str(heads)))
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"heads is {heads}, which has no model.safetensors; copy the folder again as a whole.")
    return folder


def load_heads(model: Any, folder: Path) -> DraftHeads:
    """The heads of a folder on the model's device, in its precision. ValueError where they do not fit the model, and a
    warning where they fit and were trained for another."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["heads"]
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    expected = (config["vocab_size"], config["hidden_size"])
    if tuple(embedding.shape) != expected or tuple(output.shape) != expected:
        raise ValueError(
            f"these heads are for {config['base']['name']}, {expected}; the model has {tuple(output.shape)}."
        )
    if is_another(model, config):
        name = config["base"]["name"]
        warnings.warn(
            f"these heads were trained for {name}, and the weights of this model are others: the text is still exactly "
            f"the model's own, and fewer drafts are accepted; load {name} to use them as they were trained.",
            stacklevel=2,
        )
    tensors = load_file(folder / "model.safetensors")
    moved = {
        name: t.to(output.device, output.dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()
    }
    return DraftHeads(config, moved, embedding, output)


def is_another(model: Any, config: dict[str, Any]) -> bool:
    """Whether the model surely has other weights than the base that the heads were trained for. False where that cannot
    be told: of quantised weights, of float16 (rounded twice), and of a model in several places or in none."""
    known, weights = config["base"].get("fingerprint"), list(model.parameters())
    plain = {weight.dtype for weight in weights} <= {torch.float64, torch.float32, torch.bfloat16}
    if not known or not plain or len({weight.device for weight in weights}) > 1 or weights[0].is_meta:
        return False
    return bool(model_fingerprint(model, config["vocab_size"]) != known)


def settle(model: Any, given: GenerationConfig | None, asked: dict[str, Any], length: int) -> dict[str, Any]:
    """What decides the text after `length` tokens, as `generate` finds it: what is asked for, else what is in `given`,
    else the model's own, else the defaults. ValueError on what cannot be honoured, and on values that are none."""
    asked = dict(asked)
    _check_whole(asked.pop("attention_mask", None), asked.pop("position_ids", None), length)
    settings: dict[str, Any] = dict(_DEFAULTS)
    for source in (vars(model.generation_config), {} if given is None else vars(given), asked):
        settings |= {key: value for key, value in source.items() if value is not None and not key.startswith("_")}
    known = (*HONOURED, *_HARMLESS)
    wrong = [key for key, value in settings.items() if key not in known and not _is_off(key, value)]
    if wrong:
        raise ValueError(f"{', '.join(sorted(wrong))} cannot be honoured here; honoured are {', '.join(HONOURED)}.")
    settings["eos_token_id"] = _ids(settings.get("eos_token_id"))
    settings["max_new_tokens"] = _count(model, settings, length)
    if settings["do_sample"]:
        _check_sampling(settings)
    return settings


def _check_whole(mask: Any, positions: Any, length: int) -> None:
    """ValueError unless all of the text is seen, in order from 0 on."""
    if mask is not None and not (isinstance(mask, Tensor) and bool(mask.all())):
        raise ValueError("attention_mask hides tokens; give one text without padding.")
    if positions is None:
        return
    if not isinstance(positions, Tensor) or positions.flatten().tolist() != list(range(length)):
        raise ValueError(f"position_ids cannot be honoured here, unless they are 0 to {length - 1}; leave them out.")


def _is_off(key: str, value: Any) -> bool:
    """Whether a setting that is not honoured changes nothing. Tensors, for one, are never off, and compare oddly."""
    return isinstance(value, (bool, int, float, str, list)) and bool(value == _OFF.get(key, False))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _ids(given: Any) -> list[int]:
    """Ids, one id or none as a list."""
    ids = given.flatten().tolist() if isinstance(given, Tensor) else [] if given is None else given
    ids = list(ids) if isinstance(ids, (list, tuple)) else [ids]
    if not all(_is_whole(one) for one in ids):
        raise ValueError(f"eos_token_id is {given!r}; use a token id or a list of them.")
    return [int(one) for one in ids]


def _count(model: Any, settings: dict[str, Any], length: int) -> int:
    """How many tokens may follow at most."""
    new, longest = settings.get("max_new_tokens"), settings.get("max_length")
    if new is not None:
        if not _is_whole(new) or new < 1:
            raise ValueError(f"max_new_tokens is {new!r}; use a whole number, at least 1.")
        return int(new)
    if longest is None:  # as many as fit, where there is a limit
        longest = min(length + _NEW_TOKENS, getattr(model.config, "max_position_embeddings", None) or math.inf)
    if not _is_whole(longest) or longest <= length:
        raise ValueError(
            f"max_length is {longest!r}, and the text has {length} tokens; use a whole number above, or max_new_tokens."
        )
    return int(longest) - length


def _check_sampling(settings: dict[str, Any]) -> None:
    """ValueError on numbers that give no law; transformers refuses nearly the same."""
    heat, top_k, top_p, min_p = (settings[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    allowed = {
        "temperature": (
            heat == 1 if not isinstance(heat, float) else _LEAST <= heat <= _MOST,
            f"a float from {_LEAST:g} to {_MOST:g}, or do_sample=False for the likeliest token always",
        ),
        "top_k": (_is_whole(top_k) and top_k >= 0, "a whole number of tokens; 0 is off"),
        "top_p": (isinstance(top_p, Real) and float(top_p) >= 0, "a number from 0 (the likeliest token) to 1 (off)"),
        "min_p": (isinstance(min_p, Real) and 0 <= float(min_p) <= 1, "a number from 0 (off) to 1"),
    }
    for name, (holds, remedy) in allowed.items():
        if not holds:
            raise ValueError(f"{name} is {settings[name]!r}; use {remedy}.")


class Draws:
    """Seeded random numbers, drawn on the CPU in float64."""

    def __init__(self, seed: int | None) -> None:
        self.generator = torch.Generator()
        self.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)

    def uniform(self, count: int) -> Tensor:
        """[count] in the open interval (0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64).clamp_(min=_SMALLEST_UNIFORM)

    def token(self, masses: Tensor) -> Tensor:
        """An id [] in proportion to masses [V]; never one without mass, as long as there is any."""
        cdf = masses.double().cpu().cumsum(0).masked_fill(~(masses.cpu() > 0), 0.0)
        total = cdf.max()
        return (cdf > self.uniform(1) * total).to(torch.uint8).argmax().to(masses.device)


class Run:
    """One text being decoded."""

    def __init__(self, model: Any, heads: DraftHeads, settings: dict[str, Any], draws: Draws) -> None:
        self.model, self.heads, self.settings, self.draws = model, heads, settings, draws
        self.greedy = not settings["do_sample"]
        self.ends = set(settings["eos_token_id"])
        self.accepted = inspect.signature(model.forward).parameters
        layers = DynamicCache(config=model.config).layers
        strange = [
            type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
        ]
        if strange:
            raise ValueError(f"the model keeps its past in {strange[0]}, which cannot be cut back after a rejection.")
        count = len(layers) or model.config.get_text_config(decoder=True).num_hidden_layers
        # Plain layers also where a window slides: the mask does the sliding, and cutting them back loses nothing.
        self.cache = Cache(layers=[DynamicLayer() for _ in range(count)])

    def to_end(self, text: Tensor, k: int, streamer: Any) -> Tensor:
        """The whole text [1, T + new]."""
        if streamer is not None:
            streamer.put(text.cpu())
        text, left, done = text[0], int(self.settings["max_new_tokens"]), False
        if len(text) > 1:
            _, features = self.forward(text[:-1], 1)
            self.heads.ingest(features, text[1:])
        while not done:
            drafts, q = self.draft(min(k, left - 1) if len(text) > 1 else 0)
            logits, features = self.forward(torch.cat([text[-1:], drafts]), len(drafts) + 1)
            kept, token = self.judge(drafts, q, self.law(logits))
            new = torch.cat([drafts[:kept], token[None]])
            ends = [place for place, one in enumerate(new.tolist(), start=1) if one in self.ends]
            new = new[: min(ends[0] if ends else len(new), left)]
            text, left = torch.cat([text, new]), left - len(new)
            done = bool(ends) or left == 0
            if streamer is not None:
                streamer.put(new.cpu())
            if not done:
                self.cut(len(text) - 1)
                self.heads.ingest(features[: kept + 1], new)
        if streamer is not None:
            streamer.end()
        return text[None]

    def forward(self, tokens: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
        """Append tokens [T]: logits [num_logits, V] of the last ones, and features [T, F] of all."""
        arguments = {"input_ids": tokens[None], "use_cache": True, "output_hidden_states": True}
        arguments["cache" if "cache" in self.accepted else "past_key_values"] = self.cache  # renamed in 5.24
        if "logits_to_keep" in self.accepted:
            arguments["logits_to_keep"] = num_logits
        out = self.model(**arguments)
        states = [out.hidden_states[layer][0] for layer in self.heads.config["feature_layers"]]
        return out.logits[0, -num_logits:].float(), torch.cat(states, dim=-1)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` positions."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    def draft(self, count: int) -> tuple[Tensor, Tensor]:
        """Drafts [count], and the laws [count, V] they were drawn from."""
        drafts, rows = self.heads.tokens[:0], []
        for k in range(1, count + 1):
            logits = self.heads.draft(k, drafts).float()
            if self.heads.draft_ids is not None:
                spread = logits.new_full((self.heads.config["vocab_size"],), -math.inf)
                logits = spread.index_copy_(0, self.heads.draft_ids, logits)
            rows.append(self.law(logits))
            token = rows[-1].argmax() if self.greedy else self.draws.token(rows[-1])
            drafts = torch.cat([drafts, token[None]])
        return drafts, torch.stack(rows) if rows else drafts.new_zeros(0, self.heads.config["vocab_size"]).float()

    def law(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] of logits [..., V]: temperature, top-k, top-p, min-p; the same road for p and q."""
        if self.greedy:
            return one_hot(logits.argmax(-1), logits.shape[-1])
        heat, top_k, top_p, min_p = (self.settings[name] for name in ("temperature", "top_k", "top_p", "min_p"))
        if heat < _SMALL_TEMPERATURE:  # so that nothing overflows
            logits = logits - logits.amax(-1, keepdim=True)
        scores = logits / heat
        if 0 < top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[..., -1:], -math.inf)
        if top_p < 1:  # a token stays while the mass before it is below top_p
            ordered, index = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
            keep = torch.zeros_like(scores, dtype=torch.bool)
            keep.scatter_(-1, index, ordered.cumsum(-1) - ordered < top_p)
            keep.scatter_(-1, index[..., :1], True)  # the likeliest always, also at 0
            scores = scores.masked_fill(~keep, -math.inf)
        if min_p > 0:
            bar = scores.amax(-1, keepdim=True) + math.log(min_p)
            scores = scores.masked_fill(scores < bar, -math.inf)
        found: Tensor = scores.softmax(-1)
        return found

    def judge(self, drafts: Tensor, q: Tensor, p: Tensor) -> tuple[int, Tensor]:
        """How many of drafts [K] stay, and the token [] after them: q [K, V], p [K + 1, V]."""
        if self.greedy:
            best = p.argmax(-1)
            kept = int((drafts == best[:-1]).long().cumprod(0).sum())
            return kept, best[kept]
        weight, weights, bars = 1.0, [1.0], []
        for k, token in enumerate(drafts.tolist()):
            weight = min(1.0, weight * float(p[k, token]) / float(q[k, token]))
            weights.append(weight)
            if k + 1 == len(drafts):
                bars.append(weight)
                continue
            gain = float((weight * p[k + 1] - q[k + 1]).relu().sum())
            bars.append(gain / (gain + (1 - weight)) if gain + (1 - weight) > 0 else 1.0)
        passed = [draw < bar for draw, bar in zip(self.draws.uniform(len(bars)).tolist(), bars, strict=True)]
        kept = max((place for place, one in enumerate(passed, start=1) if one), default=0)
        masses = p[kept]
        if kept < len(drafts):
            residual = (weights[kept] * p[kept] - q[kept]).relu()
            masses = residual if float(residual.sum()) > 0 else masses  # no mass is rounding
        return kept, self.draws.token(masses)


def one_hot(best: Tensor, size: int) -> Tensor:
    """[..., V] float of ids [...]."""
    row: Tensor = torch.nn.functional.one_hot(best, size).float()
    return row
