"""The part of `mtp-decode check` that looks at distributions: is what decoding writes distributed as p?

Knows: two kinds of evidence on the user's own p and q. Every outcome of the engine's draws, walked: the exact law of
the first tokens, where a fault of one in ten thousand shows. And samples with the random source that users decode with,
tested by chi-square. Each comes with a fault built in on purpose, which it must find. Refuses to know the other checks.

Few tokens are possible here (top-k), so that the base runs once per distinct beginning; q is flattened by a draft
temperature, so that good heads too are rejected often enough for a wrong rule to show.

Shapes: V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from decode.chi_square import ChiSquare, chi_square
from decode.decoder import Decoder
from decode.drafters import HeadsDrafter
from decode.engine import Engine
from decode.evidence import MARGINS, CheckSettings, Drafts, Finding, prompt_ids, teacher_forced
from decode.memo import MemoDrafter, MemoTarget
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.target import BaseTarget
from decode.text import Prompt
from decode.walk import walk
from mtp.errors import UserError
from mtp.sampling import RandomSource, to_probs
from mtp.verify import Rule, Verdict, at_row, draft_ratios, leading

RULES_AT_ONE = ("block", "token", "match")
NUM_FINDINGS = 1 + 2 * (len(RULES_AT_ONE) + 1)
POSITIONS = 3
"""Committed tokens whose joint law is tested."""
WALKED_ERROR = 1e-5
"""Total variation that float32 rows of p and q explain; a wrong rule is off by 1e-3 or more."""
P_LIMIT = 1e-4
"""A chi-square test fails at a p-value below this. An exact decoder meets it for less than two of 10,000 seeds: the
chi-square law is an approximation with a tail of its own at samples of this size (simulated)."""
_ROW_MARGIN = 4  # all logits of many rows are compared here, not the best of one: 0.7 was seen in bfloat16
_WALKED_DRAFTS = 2
_TOP_K = {"block": 3, "token": 3, "match": 2}  # match draws all rows of a block at once, which multiplies the outcomes

_UNSEEN = "not seen; use other prompts"

Law = dict[tuple[int, ...], float]


class _Bench:
    """One prompt, begun again and again."""

    def __init__(self, decoder: Decoder, settings: CheckSettings, prompt: Prompt) -> None:
        assert decoder.heads is not None
        self.decoder, self.settings = decoder, settings
        self.prompt = prompt_ids(decoder, prompt)
        self.draft_length = decoder.heads.config.draft_length
        self.target, self.drafter = MemoTarget(BaseTarget(decoder.base)), MemoDrafter(HeadsDrafter(decoder.heads))
        depth = max(POSITIONS, self.draft_length + 1)
        if len(self.prompt) + depth > decoder.base.context_length:
            raise UserError(
                f"a prompt has {len(self.prompt)} tokens, and this base reads {decoder.base.context_length}; give one "
                f"that leaves room for {depth} more."
            )
        self.request = Request(
            temperature=1.0, top_k=4, draft_temperature=2.0, max_new_tokens=depth, ignore_eos=True, seed=settings.seed
        )

    def begin(
        self, request: Request, draft_length: int, random: RandomSource, rule: Rule | None = None
    ) -> tuple[tuple[int, ...], DecodeStats]:
        """The first tokens of one text."""
        engine = Engine(self.target, self.drafter, rule)
        stats = DecodeStats(request.reported_rule, draft_length)
        stopping = Stopping(room(len(self.prompt), self.target.context_length, request.max_new_tokens))
        steps = engine.run(self.prompt, request=request, stopping=stopping, random=random, stats=stats)
        return tuple(token for step in steps for token in step.tokens)[:POSITIONS], stats

    def law(self, request: Request) -> Law:
        """The true law of the first tokens: products of p, from the rows that the engine is given too."""
        law: Law = {(): 1.0}
        for _ in range(POSITIONS):
            longer: Law = {}
            for tokens, chance in law.items():
                row = to_probs(self.row(tokens).double(), request)
                for token in row.nonzero()[:, 0].tolist():
                    longer[(*tokens, token)] = chance * float(row[token])
            law = longer
        return law

    def row(self, tokens: tuple[int, ...]) -> Tensor:
        """The base's logits [V] after prompt and tokens, by its cache."""
        text = torch.tensor([[*self.prompt, *tokens]], device=self.target.device)
        self.target.start(self.drafter.feature_layers)
        if text.shape[1] > 1:
            self.target.forward(text[:, :-1], 0)
        return self.target.forward(text[:, -1:], 1).logits[0, 0]


@torch.inference_mode()  # as the engine, whose cache it shares
def check_laws(decoder: Decoder, settings: CheckSettings, drafts: Drafts) -> Iterator[Finding]:
    """NUM_FINDINGS findings; the counts of exact rules are added to `drafts`."""
    bench, control = _telling_bench(decoder, settings)
    law = bench.law(bench.request)
    yield _rows(bench, law)
    for name in RULES_AT_ONE:
        yield _walked(bench, name, drafts)
    yield control
    for name in RULES_AT_ONE:
        yield _sampled(bench, name, law, drafts)
    yield _sampled_control(bench, law)


def _telling_bench(decoder: Decoder, settings: CheckSettings) -> tuple[_Bench, Finding]:
    """The first prompt on which the fault shows; where no draft could be right, any rule would be exact."""
    for prompt in settings.prompts:
        bench = _Bench(decoder, settings, prompt)
        control = _walked_control(bench)
        if control.passed:
            break
    return bench, control


def _rows(bench: _Bench, law: Law) -> Finding:
    """What follows takes the base's rows as they come from the cache, so these must be right."""
    margin, worst = _ROW_MARGIN * MARGINS[bench.decoder.base.dtype], 0.0
    prefixes = sorted({tokens[:length] for tokens in law for length in range(POSITIONS)})
    for tokens in prefixes:
        expected = teacher_forced(bench.decoder, bench.prompt, [*tokens, 0])[-1]
        worst = max(worst, float((bench.row(tokens) - expected).abs().max()))
    return Finding(
        "the base with a cache and without",
        worst <= margin,
        f"logits after {len(prefixes)} beginnings differ by at most {worst:.1e} (allowed {margin:g})",
        {"beginnings": len(prefixes), "worst": worst, "margin": margin},
    )


# ---- every outcome -----------------------------------------------------------------------------------------------


def _walked(bench: _Bench, name: str, drafts: Drafts) -> Finding:
    error, runs, kept = _walk(bench, name, None, drafts)
    return Finding(
        f"every outcome, {name}",
        error <= WALKED_ERROR,
        f"total variation from p: {error:.1e} (allowed {WALKED_ERROR:g}); {runs} outcomes, {kept}",
        {"rule": name, "total_variation": error, "outcomes": runs, "limit": WALKED_ERROR},
    )


def _walked_control(bench: _Bench) -> Finding:
    error, runs, _ = _walk(bench, "token", resample_from_p, Drafts())
    seen = error > WALKED_ERROR
    return Finding(
        "every outcome, negative control: resample from p",
        seen,
        f"total variation from p: {error:.1e}; {runs} outcomes: the fault is {'seen' if seen else _UNSEEN}",
        {"rule": "resample from p", "total_variation": error, "outcomes": runs, "limit": WALKED_ERROR},
    )


def _walk(bench: _Bench, name: str, rule: Rule | None, drafts: Drafts) -> tuple[float, int, str]:
    """Total variation of the law of the first tokens from p's, how many outcomes there are, and what was kept."""
    request = replace(bench.request, verify=name, top_k=_TOP_K[name], max_new_tokens=POSITIONS)
    seen, runs = Drafts(), 0

    def run(random: RandomSource) -> tuple[int, ...]:
        nonlocal runs
        tokens, stats = bench.begin(request, min(_WALKED_DRAFTS, bench.draft_length), random, rule)
        seen.add(stats)
        runs += 1
        return tokens

    law, truth = walk(run), bench.law(request)
    drafts.add(seen)
    error = 0.5 * sum(abs(law.get(key, 0.0) - truth.get(key, 0.0)) for key in law.keys() | truth.keys())
    return error, runs, f"{seen.accepted} of {seen.drafted} drafts kept"


# ---- samples -----------------------------------------------------------------------------------------------------


def _sampled(bench: _Bench, name: str, law: Law, drafts: Drafts) -> Finding:
    counts, seen = _sample(bench, name, None)
    drafts.add(seen)
    test = chi_square(counts, law)
    return Finding(
        f"law of the first {POSITIONS} tokens, {name}",
        test.p_value > P_LIMIT and test.degrees > 0,
        f"{_say(test)}; {bench.settings.samples} texts, {seen.accepted} of {seen.drafted} drafts kept",
        {"rule": name, **vars(test), "samples": bench.settings.samples, "p_limit": P_LIMIT},
    )


def _sampled_control(bench: _Bench, law: Law) -> Finding:
    counts, _ = _sample(bench, "token", resample_from_p)
    test = chi_square(counts, law)
    seen = test.p_value <= P_LIMIT
    return Finding(
        f"law of the first {POSITIONS} tokens, negative control: resample from p",
        seen,
        f"{_say(test)}: the fault is {'seen' if seen else f'{_UNSEEN}, or raise --samples'}",
        {"rule": "resample from p", **vars(test), "samples": bench.settings.samples, "p_limit": P_LIMIT},
    )


def _say(test: ChiSquare) -> str:
    return f"chi-square {test.statistic:.1f} on {test.degrees} degrees, p-value {test.p_value:.3g}"


def _sample(bench: _Bench, name: str, rule: Rule | None) -> tuple[Counter[tuple[int, ...]], Drafts]:
    """Begin many texts; the first tokens of each, counted."""
    random = RandomSource(bench.settings.seed, bench.target.device)
    request, drafts = replace(bench.request, verify=name), Drafts()
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(bench.settings.samples):
        tokens, stats = bench.begin(request, bench.draft_length, random, rule)
        counts[tokens] += 1
        drafts.add(stats)
    return counts, drafts


def resample_from_p(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """The token rule with one fault: after a rejection it draws from p and not from the residual."""
    ratio = draft_ratios(draft_tokens, q, p, lengths)
    num_accepted = leading(random.bernoulli(ratio.clamp(max=1.0)), lengths)
    next_token = random.categorical(at_row(p, num_accepted))
    return Verdict(num_accepted, next_token, torch.zeros_like(num_accepted, dtype=torch.bool))
