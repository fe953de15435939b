"""`mtp-decode check`: is decoding with these heads on this base lossless, here and now?

Knows: four kinds of evidence, what each would catch, and its chance of a false alarm. Refuses to trust a check without
a negative control: each statistical or numerical one must also fail on a fault built in on purpose.

Shapes: T position, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from decode.chi_square import chi_square
from decode.decoder import Decoder, Result
from decode.drafters import HeadsDrafter
from decode.engine import Engine
from decode.memo import MemoDrafter, MemoTarget
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.target import BaseTarget
from decode.text import Prompt, encode
from mtp.errors import UserError
from mtp.keyed import race_gap
from mtp.sampling import RandomSource, to_probs
from mtp.verify import Verdict, at_row, draft_ratios, leading

PROMPTS = ("Why is the sky blue?", "Write two sentences about a lighthouse.", "List three uses of salt.")
EXACT_AT_ONE = ("block", "token", "match")
LAW_POSITIONS = 3
"""Committed tokens whose joint law is tested."""
FALSE_ALARM = 1e-4
"""Chance that one chi-square test rejects a decoder that is exact, over seeds."""
MARGINS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""How far float error may move logits when the base runs over another number of rows. Measured for float32 (2e-4 on a
135M base, where logits span about 40); the others scale with the precision."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How much evidence to gather."""

    prompts: Sequence[Prompt] = PROMPTS
    samples: int = 2000
    """Texts begun per chi-square test."""
    max_new_tokens: int = 40
    """Tokens per text of the greedy and the reproducible checks."""
    seed: int = 0


@dataclass
class Finding:
    """One line of the report."""

    name: str
    passed: bool
    text: str
    """What was measured, for people."""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Drafts:
    """Counts over all checks of exact rules; a check in which nothing was drafted, kept or rejected proves nothing."""

    drafted: int = 0
    accepted: int = 0

    def add(self, stats: DecodeStats) -> None:
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def check(decoder: Decoder, settings: CheckSettings, on_step: Callable[[], None] = lambda: None) -> list[Finding]:
    """All findings; `on_step` is called after each of NUM_FINDINGS.

    UserError without heads, or with too few samples to tell anything apart.
    """
    if decoder.heads is None:
        raise UserError("check needs heads; name --heads.")
    if settings.samples < 100:
        raise UserError(f"--samples is {settings.samples}; use at least 100, or nothing could be told apart.")
    drafts = Drafts()
    findings = []
    for finding in itertools.chain(
        _greedy(decoder, settings, drafts), _laws(decoder, settings, drafts), _reproducible(decoder, settings, drafts)
    ):
        findings.append(finding)
        on_step()
    findings.append(
        Finding(
            "drafts were made, kept and rejected",
            min(drafts.drafted, drafts.accepted, drafts.rejected) > 0,
            f"{drafts.drafted} drafted, {drafts.accepted} accepted, {drafts.rejected} rejected",
            {"drafted": drafts.drafted, "accepted": drafts.accepted, "rejected": drafts.rejected},
        )
    )
    on_step()
    return findings


NUM_FINDINGS = 2 + len(EXACT_AT_ONE) + 1 + 2 + 1
"""How many findings `check` reports."""


# ---- greedy ------------------------------------------------------------------------------------------------------


def _greedy(decoder: Decoder, settings: CheckSettings, drafts: Drafts) -> Iterator[Finding]:
    """Every committed token must be the base's likeliest when it reads the finished text in one forward."""
    margin = MARGINS[decoder.base.dtype]
    worst, spoiled, count = 0.0, 0.0, 0
    for prompt in settings.prompts:
        request = Request(max_new_tokens=settings.max_new_tokens)
        result = decoder.generate(prompt, request)
        drafts.add(result.stats)
        logits = teacher_forced(decoder, _ids(decoder, prompt), result.token_ids)
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
        f"a second-best token is {spoiled:.2f} below and would be found",
        {"gap": spoiled, "margin": margin},
    )


def teacher_forced(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The base's logits [T, V] for `tokens`, read as one text without a cache."""
    text = torch.tensor([[*prompt, *tokens]], device=decoder.base.device)
    hidden = decoder.base.forward(text).hidden[0, len(prompt) - 1 : -1]
    return decoder.base.logits(hidden)


def gaps(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """How far each token [T] is below the maximum of its row of logits [T, V]."""
    chosen = logits.gather(1, torch.tensor(list(tokens), device=logits.device)[:, None])[:, 0]
    return logits.amax(dim=1) - chosen


def _second_best_gap(logits: Tensor) -> float:
    best = logits.topk(2, dim=1).values
    return float((best[:, 0] - best[:, 1]).max())


# ---- the law at the first positions ------------------------------------------------------------------------------


def _laws(decoder: Decoder, settings: CheckSettings, drafts: Drafts) -> Iterator[Finding]:
    """The joint law of the first tokens under every exact rule, and under a wrong one, against p's own.

    Few tokens are possible (top-k), so that the base runs once per distinct beginning; q is flattened by a draft
    temperature, so that good heads too are rejected often enough for a wrong rule to show.
    """
    assert decoder.heads is not None
    prompt = _ids(decoder, settings.prompts[0])
    depth = max(LAW_POSITIONS, decoder.heads.config.draft_length + 1)
    request = Request(
        temperature=1.0, top_k=4, draft_temperature=2.0, max_new_tokens=depth, ignore_eos=True, seed=settings.seed
    )
    law = first_tokens_law(decoder, prompt, request)
    target, drafter = MemoTarget(BaseTarget(decoder.base)), MemoDrafter(HeadsDrafter(decoder.heads))
    for name in EXACT_AT_ONE:
        counts, stats = _sample(Engine(target, drafter), prompt, replace(request, verify=name), settings)
        drafts.add(stats)
        test = chi_square(counts, law)
        yield Finding(
            f"law of the first {LAW_POSITIONS} tokens, {name}",
            test.p_value > FALSE_ALARM,
            f"chi-square {test.statistic:.1f} on {test.degrees} degrees, p-value {test.p_value:.2g} "
            f"({settings.samples} texts, {stats.accepted} of {stats.drafted} drafts kept)",
            {"rule": name, **vars(test), "samples": settings.samples, "false_alarm": FALSE_ALARM},
        )
    wrong = Engine(target, drafter, rule=resample_from_p)
    counts, _ = _sample(wrong, prompt, replace(request, verify="token"), settings)
    test = chi_square(counts, law)
    yield Finding(
        "law, negative control: resample from p",
        test.p_value <= FALSE_ALARM,
        f"chi-square {test.statistic:.1f} on {test.degrees} degrees, p-value {test.p_value:.2g}: the fault is seen",
        {"rule": "resample from p", **vars(test), "samples": settings.samples, "false_alarm": FALSE_ALARM},
    )


def resample_from_p(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """The token rule with one fault: after a rejection it draws from p and not from the residual."""
    ratio = draft_ratios(draft_tokens, q, p, lengths)
    num_accepted = leading(random.bernoulli(ratio.clamp(max=1.0)), lengths)
    next_token = random.categorical(at_row(p, num_accepted))
    return Verdict(num_accepted, next_token, torch.zeros_like(num_accepted, dtype=torch.bool))


def _sample(
    engine: Engine, prompt: list[int], request: Request, settings: CheckSettings
) -> tuple[Counter[tuple[int, ...]], DecodeStats]:
    """Begin many texts; the first tokens of each, counted."""
    random = RandomSource(settings.seed, engine.target.device)
    total = DecodeStats(request.reported_rule, engine.check_draft_length(None))
    counts: Counter[tuple[int, ...]] = Counter()
    limit = room(len(prompt), engine.target.context_length, request.max_new_tokens)
    for _ in range(settings.samples):
        stats, stopping = total.empty(), Stopping(limit)
        steps = engine.run(prompt, request=request, stopping=stopping, random=random, stats=stats)
        tokens = tuple(token for step in steps for token in step.tokens)
        counts[tokens[:LAW_POSITIONS]] += 1
        total.merge(stats)
    return counts, total


def first_tokens_law(decoder: Decoder, prompt: list[int], request: Request) -> dict[tuple[int, ...], float]:
    """The law of the first tokens as products of p, from forwards without cache, heads or engine."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_POSITIONS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in law.items():
            text = torch.tensor([[*prompt, *tokens]], device=decoder.base.device)
            row = to_probs(decoder.base.logits(decoder.base.forward(text).hidden[:, -1]).double(), request)[0]
            for token in row.nonzero()[:, 0].tolist():
                longer[(*tokens, token)] = chance * float(row[token])
        law = longer
    return law


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
        ids = _ids(decoder, prompt)
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
        shifted = decoder.generate(prompt, replace(request, draft_length=0, seed=settings.seed + 1))
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


def _ids(decoder: Decoder, prompt: Prompt) -> list[int]:
    return encode(decoder.base.tokenizer, prompt, chat=True)
