"""`model.generate(…, custom_generate=<this folder>, trust_remote_code=True)`: heads draft, the model decides.

A step drafts up to K tokens from the heads (q), runs the model once over them (p), and keeps a prefix of them by
rejection sampling, so that the text is distributed exactly as the model's own. Greedily, drafts stay while they are the
model's likeliest token. Otherwise the block rule of Sun et al. (arXiv 2403.10444), Algorithm 2, judges them together.

Knows: one text at a time, and the settings in `HONOURED`; any other that would change the text is refused, not ignored.
Needs torch, transformers, safetensors and `draft_heads.py` beside it.

Shapes: T position, K draft position, V vocabulary.
"""

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mtp.formats.payload.draft_heads import DraftHeads

HONOURED = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id")
_DEFAULTS = {"max_length": 20, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
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
    on a batch, on padding, and on a setting that is not honoured.
    """
    text = input_ids if input_ids is not None else inputs
    if text is None or text.dim() != 2 or text.shape[0] != 1 or not text.shape[1]:
        raise ValueError(f"input_ids is {None if text is None else tuple(text.shape)}; give one text, [1, T].")
    folder = _folder(_named_by_caller() if heads is None else heads)
    found = settle(model, generation_config, settings, text.shape[1])
    loaded = load_heads(model, folder)
    k = loaded.config["draft_length"] if draft_length is None else draft_length
    if not 0 <= k <= loaded.config["draft_length"]:
        raise ValueError(f"draft_length is {k}; these heads were trained for 0 to {loaded.config['draft_length']}.")
    return Run(model, loaded, found, Draws(seed)).to_end(text, k, streamer)


def _named_by_caller() -> str | None:
    """What transformers was told as `custom_generate`: it copies this code elsewhere and does not pass that on."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("custom_generate"), str):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else str(frame.f_locals["custom_generate"])


def _folder(heads: str | None) -> Path:
    """Where the weights lie."""
    if heads is None:
        raise ValueError("heads is missing; give heads=<the folder, or its id on the Hub>.")
    folder = Path(heads) if Path(heads).is_dir() else Path(snapshot_download(heads))
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"heads is {heads}, which has no model.safetensors; copy the folder again as a whole.")
    return folder


def load_heads(model: Any, folder: Path) -> DraftHeads:
    """The heads of a folder on the model's device, in its precision. ValueError where they belong to another model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["heads"]
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    expected = (config["vocab_size"], config["hidden_size"])
    if tuple(embedding.shape) != expected or tuple(output.shape) != expected:
        raise ValueError(
            f"these heads are for {config['base']['name']}, {expected}; the model has {tuple(output.shape)}."
        )
    tensors = load_file(folder / "model.safetensors")
    moved = {
        name: t.to(output.device, output.dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()
    }
    return DraftHeads(config, moved, embedding, output)


def settle(model: Any, given: GenerationConfig | None, asked: dict[str, Any], length: int) -> dict[str, Any]:
    """What decides the text after `length` tokens, as `generate` finds it: what is asked for, else what is in `given`,
    else the model's own, else the defaults. ValueError on what cannot be honoured."""
    asked = dict(asked)
    mask = asked.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask hides tokens; give one text without padding.")
    settings = dict(_DEFAULTS)
    for source in (vars(model.generation_config), {} if given is None else vars(given), asked):
        settings |= {key: value for key, value in source.items() if value is not None and not key.startswith("_")}
    wrong = [
        key for key, value in settings.items() if key not in (*HONOURED, *_HARMLESS) and value != _OFF.get(key, False)
    ]
    if wrong:
        raise ValueError(f"{', '.join(sorted(wrong))} cannot be honoured here; honoured are {', '.join(HONOURED)}.")
    settings.setdefault("max_new_tokens", settings["max_length"] - length)
    if settings["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens is {settings['max_new_tokens']}; use at least 1.")
    return settings


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
        self.greedy = not settings["do_sample"] or settings["temperature"] == 0
        ends = settings.get("eos_token_id")
        self.ends = {int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends]) if end is not None}
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
        top_k, top_p, min_p = (self.settings[name] for name in ("top_k", "top_p", "min_p"))
        scores = logits / self.settings["temperature"]
        if 0 < top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[..., -1:], -math.inf)
        if top_p < 1:  # a token stays while the mass before it is below top_p
            ordered, index = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
            keep = torch.zeros_like(scores, dtype=torch.bool)
            keep.scatter_(-1, index, ordered.cumsum(-1) - ordered < top_p)
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
