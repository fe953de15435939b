"""What `bench` measures heads against in transformers: `generate()` as it is, and with its prompt lookup.

Knows: which words `generate()` has for a request, and how to call it with nothing of the base's own settings. Refuses
to know: time, and our engine.

Prompt lookup (`prompt_lookup_num_tokens`) takes as drafts what followed the last two tokens, or the last one, where
they first occurred in the text. It decodes one text at a time. With sampling it draws a token from p at every row and
keeps drafts that equal it, so texts have the law of plain decoding, but not its very draws: lengths may differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from decode.request import Request
from decode.sides import Runner, Trial
from decode.stats import DecodeStats
from mtp.base import FrozenBase
from mtp.errors import UserError

LOOKUP_TOKENS = 10
"""Most drafts of a step of prompt lookup: the default of the class in transformers that finds them."""


def transformers_runner(base: FrozenBase, request: Request, lookup: int | None = None) -> Runner:
    """`generate()` with the settings of `request`; with `lookup`, drafting up to so many tokens by prompt lookup.

    UserError for a setting that it has no word for.
    """
    choices = _generation_choices(request) | ({} if lookup is None else {"prompt_lookup_num_tokens": lookup})

    def run(trials: Sequence[Trial]) -> tuple[int, Sequence[DecodeStats]]:
        most = max(trial.max_new_tokens for trial in trials)
        found = generate_batch(base, [trial.ids for trial in trials], most, choices, request.seed or 0)
        return sum(min(len(ids), trial.max_new_tokens) for ids, trial in zip(found, trials, strict=True)), ()

    return run


def generate_batch(
    base: FrozenBase, prompts: Sequence[list[int]], max_new_tokens: int, choices: Mapping[str, Any], seed: int
) -> list[list[int]]:
    """New ids of each text by one call of `generate()`, with the end-of-sequence token if it came. `choices`: fields of
    a GenerationConfig."""
    ends, (tokens, mask) = list(base.eos_token_ids), _padded(prompts, base.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0, **choices
    )
    devices = [base.device] if base.device.type == "cuda" else []
    with _generation_config(base, config), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        output = base.model.generate(tokens, attention_mask=mask)
    return [_until_end(ids, ends) for ids in output[:, tokens.shape[1] :].tolist()]


def _padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [N, the longest], padded on the left as `generate()` wants it."""
    width = max(len(ids) for ids in prompts)
    gaps = [width - len(ids) for ids in prompts]
    tokens = [[ids[0]] * gap + ids for gap, ids in zip(gaps, prompts, strict=True)]
    mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """What follows the end in a batch is padding."""
    place = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: place + 1]


# Settings of a request and their names in GenerationConfig; there None is off.
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "suppress_tokens": "suppress_tokens",
    "min_new_tokens": "min_new_tokens",
}
_OURS_ALONE = (
    *("presence_penalty", "frequency_penalty", "stop", "stop_ids", "stop_when", "ignore_eos", "logprobs"),
    *("bad_words", "bad_words_ids", "prefix_allowed_tokens_fn", "processors"),
)


def _generation_choices(request: Request) -> dict[str, Any]:
    """The request in the words of `generate()`. UserError for a setting that it has no word for."""
    default = Request()
    for name in _OURS_ALONE:
        if getattr(request, name) != getattr(default, name):
            option, value = f"--{name.replace('_', '-')}", getattr(request, name)
            raise UserError(f"{option} is {value}, which transformers is not given here; use --against plain.")
    used = [name for name in _SAMPLED if getattr(request, name) != getattr(default, name)]
    choices: dict[str, Any] = {"do_sample": not request.greedy}
    if not request.greedy:
        choices |= {"top_k": 0} | {name: getattr(request, name) for name in used}
    for name, theirs in _ALWAYS.items():
        value = getattr(request, name)
        if value != getattr(default, name):
            choices[theirs] = list(value) if isinstance(value, tuple) else value
    if request.logit_bias:
        choices["sequence_bias"] = [[[token], bias] for token, bias in request.logit_bias.items()]
    return choices


@contextmanager
def _generation_config(base: FrozenBase, config: GenerationConfig) -> Iterator[None]:
    """Give `generate()` our settings and nothing of the base's own (penalties and the like) for a moment."""
    before = base.model.generation_config
    base.model.generation_config = config
    try:
        yield
    finally:
        base.model.generation_config = before
