"""`mtp-decode check`: is decoding with these heads on this base lossless, here and now?

Knows: four kinds of evidence, what each would catch, and its chance of a false alarm. Refuses to trust a check without
a negative control: each statistical or numerical one must also fail on a fault built in on purpose.

Shapes: T position, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode import check_laws
from decode.decoder import Decoder
from decode.evidence import MARGINS, CheckSettings, Drafts, Finding, prompt_ids, teacher_forced
from decode.request import Request
from decode.stream import Result
from mtp.errors import UserError
from mtp.keyed import race_gap
from mtp.sampling import to_probs

NUM_FINDINGS = 2 + check_laws.NUM_FINDINGS + 2 + 1
"""How many findings `check` reports."""
MIN_SAMPLES = 300


def check(decoder: Decoder, settings: CheckSettings, on_step: Callable[[], None] = lambda: None) -> list[Finding]:
    """All findings; `on_step` is called after each of NUM_FINDINGS. Raises what `findings` does."""
    found = []
    for finding in findings(decoder, settings):
        found.append(finding)
        on_step()
    return found


def findings(decoder: Decoder, settings: CheckSettings) -> Iterator[Finding]:
    """The findings one by one, NUM_FINDINGS of them.

    UserError without heads, or with too few samples to tell anything apart.
    """
    if decoder.heads is None:
        raise UserError("check needs heads; name --heads.")
    if not settings.prompts:
        raise UserError("check needs at least one prompt; name another --prompts file, or leave it out.")
    if settings.samples < MIN_SAMPLES:
        raise UserError(f"--samples is {settings.samples}; use at least {MIN_SAMPLES}, or nothing shows.")
    drafts = Drafts()
    yield from _greedy(decoder, settings, drafts)
    yield from check_laws.check_laws(decoder, settings, drafts)
    yield from _reproducible(decoder, settings, drafts)
    yield Finding(
        "drafts were made, kept and rejected",
        min(drafts.drafted, drafts.accepted, drafts.rejected) > 0,
        f"{drafts.drafted} drafted, {drafts.accepted} accepted, {drafts.rejected} rejected",
        {"drafted": drafts.drafted, "accepted": drafts.accepted, "rejected": drafts.rejected},
    )


# ---- greedy ------------------------------------------------------------------------------------------------------


def _greedy(decoder: Decoder, settings: CheckSettings, drafts: Drafts) -> Iterator[Finding]:
    """Every committed token must be the base's likeliest when it reads the finished text in one forward."""
    margin = MARGINS[decoder.base.dtype]
    worst, spoiled, count = 0.0, 0.0, 0
    for prompt in settings.prompts:
        request = Request(max_new_tokens=settings.max_new_tokens)
        result = decoder.generate(prompt, request)
        drafts.add(result.stats)
        logits = teacher_forced(decoder, prompt_ids(decoder, prompt), result.token_ids)
        worst = max(worst, float(gaps(logits, result.token_ids).max()))
        spoiled = max(spoiled, _second_best_gap(logits))
        count += len(result.token_ids)
    yield Finding(
        "greedy under teacher forcing",
        worst <= margin,
        f"{count} tokens, at most {worst:.1e} below the base's maximum (allowed {margin:g})",
        {"tokens": count, "worst_gap": worst, "margin": margin},
    )
    yield Finding(
        "greedy, negative control",
        spoiled > margin,
        f"a second-best token is {spoiled:.2f} below and would {'' if spoiled > margin else 'not '}be found",
        {"gap": spoiled, "margin": margin},
    )


def gaps(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """How far each token [T] is below the maximum of its row of logits [T, V]."""
    chosen = logits.gather(1, torch.tensor(list(tokens), device=logits.device)[:, None])[:, 0]
    return logits.amax(dim=1) - chosen


def _second_best_gap(logits: Tensor) -> float:
    best = logits.topk(2, dim=1).values
    return float((best[:, 0] - best[:, 1]).max())


# ---- reproducible mode -------------------------------------------------------------------------------------------


def _reproducible(decoder: Decoder, settings: CheckSettings, drafts: Drafts) -> Iterator[Finding]:
    """One seed must give one text for every K; another seed must not.

    Float error may decide a race between two tokens that arrive together: a difference counts as one only if the base,
    reading the text in one forward, does not find the two within the margin.
    """
    assert decoder.heads is not None
    margin = MARGINS[decoder.base.dtype]
    same, rounding, lengths, other = 0, 0, 0, 0
    for prompt in settings.prompts:
        ids = prompt_ids(decoder, prompt)
        request = Request(
            temperature=1.0, seed=settings.seed, reproducible=True, max_new_tokens=settings.max_new_tokens
        )
        plain = decoder.generate(prompt, replace(request, draft_length=0))
        for draft_length in range(1, decoder.heads.config.draft_length + 1):
            result = decoder.generate(prompt, replace(request, draft_length=draft_length))
            drafts.add(result.stats)
            equal = result.token_ids == plain.token_ids
            near = not equal and _near_tie(decoder, ids, plain, result, request, 2 * margin)
            same, rounding, lengths = same + equal, rounding + near, lengths + 1
        shifted = decoder.generate(prompt, replace(request, draft_length=0, seed=settings.seed ^ 1))
        other += shifted.token_ids != plain.token_ids
    yield Finding(
        "reproducible: one text for every K",
        same + rounding == lengths,
        f"{same} of {lengths} texts equal that of K = 0"
        + (f", {rounding} differ where two tokens tie to within float error" if rounding else ""),
        {"equal": same, "ties": rounding, "texts": lengths, "margin": 2 * margin},
    )
    yield Finding(
        "reproducible, negative control: another seed",
        other > 0,
        f"{other} of {len(settings.prompts)} texts change",
        {"changed": other, "texts": len(settings.prompts)},
    )


def _near_tie(decoder: Decoder, prompt: list[int], one: Result, two: Result, request: Request, margin: float) -> bool:
    """Whether the first difference of two texts is one that float error explains."""
    pairs = list(zip(one.token_ids, two.token_ids, strict=False))
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:  # one ended earlier, though all its tokens are the other's
        return False
    logits = teacher_forced(decoder, prompt, one.token_ids[: place + 1])[-1]
    assert request.seed is not None
    return race_gap(to_probs(logits[None], request)[0], request.seed, len(prompt) + place, pairs[place]) <= margin
