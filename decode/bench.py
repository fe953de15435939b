"""Speed with and without drafting, measured side by side.

Knows: five ways to decode the same prompts with the same settings: `mtp` (heads draft), `plain` (same engine, K = 0),
`transformers` (`model.generate()`), `lookup` (that with prompt lookup) and `vllm` (plain decoding in vLLM, in a process
of its own). Refuses to time one side differently: every side gets the same token ids, is warmed up once without being
timed, takes its turn on every prompt (or batch of prompts), and its wall time includes the prefill.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any

import torch
import transformers

from decode.costs import CONTEXT, LEAST_ROWS, Costs, measure_steps, read_bandwidth, weight_bytes
from decode.decoder import Decoder
from decode.many import check_batch_size
from decode.request import Request
from decode.rivals import LOOKUP_TOKENS, transformers_runner
from decode.sides import Runner, Side, Spent, Trial, in_turns, paired, spread, take_turns
from decode.stats import DecodeStats
from decode.stopping import room
from decode.stream import Result
from decode.target import BaseTarget
from decode.telemetry import vllm_counters
from decode.text import Prompt, encode
from decode.vllm_side import find_python, vllm_runner
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.suggest import did_you_mean

RIVALS = ("plain", "transformers", "lookup", "vllm")
DEFAULT_RIVALS = ("plain", "transformers")
_NOT_SETTINGS = {"max_new_tokens", "draft_length", "verify", "tree", "lookup", "chat"}
_WARM_UP_TOKENS = 8


def bench(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    request: Request,
    heads_name: str,
    against: Sequence[str] = DEFAULT_RIVALS,
    on_prompt: Callable[[], None] = lambda: None,
    categories: Sequence[str | None] | None = None,
    context: int = CONTEXT,
    vllm: Path | None = None,
    texts: list[Result] | None = None,
    stop: Callable[[], bool] = lambda: False,
    batch_size: int = 1,
) -> dict[str, Any]:
    """Run all sides over all prompts and report as JSON; `on_prompt` is called after each prompt, and where `stop` is
    true behind one, the report is of those so far. With `categories`,
    one for each prompt, the acceptance length is told for each of them too, and as their mean. Parts of a step are
    measured alone behind `context` places of text, fewer where the base has no room for them. `vllm` is the Python of
    the environment that has vLLM; None is this one. `texts` takes in what mtp decoded, prompt by prompt. A turn is
    `batch_size` prompts, which every side decodes at once.

    Keys of the report, besides where and with which settings it was measured:
        results: of each side, mtp first: `name`, `tokens`, `wall_seconds`, `tok_per_s` (tokens over seconds, prefill
            included), the same `tok_per_s_by_turn`, and its `tok_per_s_spread` over turns (median, min, max). Of
            our engine also `accept_len` (and `accept_len_by_category`, `accept_len_category_mean`), `steps`,
            `accepted_per_position` and `alpha` [K], `seconds` by phase, `step_seconds` (prefill aside), and the shares
            of a step that are the rule's (`rule_share`) and that are not the base's forward (`overhead_share`). In a
            batch a step is one text's, and takes its share of the time of all.
        ratios: mtp's `tok_per_s` over that of each other side.
        paired_ratios: median, min and max over the turns of that ratio on one turn.
        costs: parts measured alone, behind `context` places: `forward_seconds` over 1, 2, … rows, `draft_seconds` of
            one draft (null without), `weight_bytes` that a forward reads, the `forward_bandwidth` that one row makes of
            them, the machine's `read_bandwidth`, `memory_floor_seconds` (weights over that), and `step_over_floor`:
            how many times that a step of mtp takes (null in batches).
        cost_model: from these, the speed over that of plain decoding to expect of 1, 2, …, K drafts per step
            (`speed_up`), and as `measured` with K, both without prefill; null without drafts, with a tree, with
            lookup, with `draft_length_auto` (K chosen in every step, up to `draft_length`), in batches, and where plain
            was not measured.
        spec_decode_num_…: counts of mtp under vLLM's names (`decode.telemetry`).
        lookup_tokens: the most drafts of a step of the side `lookup`; null where it was not measured.
        vllm: versions of vLLM, torch and transformers in its environment; null where it was not measured.

    Raises UserError on settings that cannot be met, before anything is timed.
    """
    check_context(context)
    check_rivals(against)
    check_together(against, batch_size)
    texts = [] if texts is None else texts
    encoded = [encode(decoder.base.tokenizer, prompt, request.chat) for prompt in prompts]
    known = [None] * len(encoded) if categories is None else categories
    budgets = [room(len(ids), decoder.base.context_length, request.max_new_tokens).tokens for ids in encoded]
    trials = [Trial(*one) for one in zip(encoded, budgets, known, strict=True)]
    turns = in_turns(trials, batch_size)
    with ExitStack() as stack:
        sides = _sides(decoder, request, [name for name in against if name != "vllm"], texts, batch_size)
        versions = None
        if "vllm" in against:  # last, as the others refuse at once what they cannot do
            longest = max(len(trial.ids) + trial.max_new_tokens for trial in trials)
            ready = vllm_runner(find_python(vllm), decoder.base, request, longest, batch_size)
            run, versions = stack.enter_context(ready)
            sides.append(Side("vllm", run))
        for side, turn in product(sides, {len(turn): turn for turn in turns}.values()):  # the last may have fewer
            side.run([replace(trial, max_new_tokens=min(trial.max_new_tokens, _WARM_UP_TOKENS)) for trial in turn])
        texts.clear()  # of the warm-up
        done = take_turns(sides, turns, on_prompt, stop)
    ours = sides[0].stats
    assert ours is not None
    costs = _measure_costs(decoder, request, encoded, ours.draft_length, context)
    return {
        **_report(decoder.base, request, sides, heads_name),
        "num_prompts": done,
        "batch_size": batch_size,
        **_cost_report(costs, sides, request.draft_length == "auto", batch_size),
        "vllm": versions,
    }


def _sides(
    decoder: Decoder, request: Request, against: Sequence[str], texts: list[Result], batch_size: int
) -> list[Side]:
    """Those of this process."""
    plainly = replace(request, draft_length=0, tree=None, lookup=0)
    runners: dict[str, Callable[[], Runner]] = {
        "plain": lambda: _engine_runner(decoder, plainly, [], batch_size),
        "transformers": lambda: transformers_runner(decoder.base, request),
        "lookup": lambda: transformers_runner(decoder.base, request, LOOKUP_TOKENS),
    }
    rivals = [Side(name, runners[name]()) for name in dict.fromkeys(against)]
    return [Side("mtp", _engine_runner(decoder, request, texts, batch_size)), *rivals]


def check_rivals(against: Sequence[str]) -> None:
    """UserError for a side that there is not."""
    unknown = [name for name in against if name not in RIVALS]
    if unknown:
        raise UserError(f"--against has {unknown[0]!r}; {did_you_mean(unknown[0], RIVALS)}")


def check_together(against: Sequence[str], batch_size: int) -> None:
    """UserError for a side that cannot decode so many prompts at a time; of ours the decoder knows."""
    check_batch_size(batch_size)
    if batch_size > 1 and "lookup" in against:
        told = "prompt lookup in transformers takes one text at a time"
        raise UserError(f"--batch-size is {batch_size}, and --against has lookup, but {told}; leave one of them out.")


def check_context(context: int) -> None:
    """UserError for a text without tokens."""
    if context < 1:
        raise UserError(f"--context is {context}; use a number of tokens, at least 1.")


def _engine_runner(decoder: Decoder, request: Request, texts: list[Result], batch_size: int) -> Runner:
    def own(most: int) -> Request:
        return replace(request, max_new_tokens=most, min_new_tokens=min(request.min_new_tokens, most))

    def run(trials: Sequence[Trial]) -> tuple[int, Sequence[DecodeStats]]:
        requests = [own(trial.max_new_tokens) for trial in trials]
        results = list(decoder.generate_many([trial.ids for trial in trials], requests, batch_size=batch_size))
        texts.extend(results)
        return sum(len(result.token_ids) for result in results), [result.stats for result in results]

    return run


def _measure_costs(
    decoder: Decoder, request: Request, encoded: Sequence[list[int]], drafts: int, context: int
) -> Costs:
    """Behind text of the prompts, again and again, and with all drafts that a step may have."""
    base = decoder.base
    rows = max(1, min(max(LEAST_ROWS, drafts + 1), base.context_length - 1))
    past = max(1, min(context, base.context_length - rows))
    tokens = list(islice(cycle(chain.from_iterable(encoded)), past + rows))
    text = torch.tensor(tokens, device=base.device)
    steady = replace(request, draft_min_confidence=0.0, draft_max_entropy=None, draft_min_prob=0.0)
    given = decoder.drafting(steady, text[: past + 1])
    forward, draft = measure_steps(BaseTarget(base), given, text[past + 1 :], drafts)
    return Costs(past, forward, draft, weight_bytes(base), read_bandwidth(base.device))


def _report(base: FrozenBase, request: Request, sides: list[Side], heads_name: str) -> dict[str, Any]:
    ours, rivals = sides[0], sides[1:]
    assert ours.stats is not None
    return {
        **describe(base, heads_name),
        "draft_length": ours.stats.draft_length,
        "draft_length_auto": request.draft_length == "auto",
        **settings_report(request),
        "max_new_tokens": request.max_new_tokens,
        "verify": ours.stats.rule,
        "lossless": ours.stats.lossless,
        "tree": ours.stats.tree,
        "lookup": ours.stats.lookup,
        "lookup_tokens": LOOKUP_TOKENS if "lookup" in {side.name for side in rivals} else None,
        "results": [side.to_json() for side in sides],
        **vllm_counters(ours.stats),
        "ratios": {side.name: ours.tok_per_s / side.tok_per_s if side.tok_per_s else 0.0 for side in rivals},
        "paired_ratios": {side.name: spread(paired(ours, side)) for side in rivals},
    }


def _cost_report(costs: Costs, sides: list[Side], auto: bool, batch_size: int) -> dict[str, Any]:
    """What a step costs, and how far that explains the speed; with K chosen anew in every step there is no model, nor
    in batches, of which no parts are measured alone."""
    ours, plain = sides[0], next((side for side in sides if side.name == "plain"), None)
    spent, stats = Spent.by(ours), ours.stats
    assert stats is not None
    report: dict[str, Any] = {
        "costs": {**costs.to_json(), "step_over_floor": spent.step / costs.floor if batch_size == 1 else None},
        "cost_model": None,
    }
    several = batch_size > 1 or stats.tree is not None
    if plain is not None and stats.draft_length and not (several or auto or stats.lookup):
        others = Spent.by(plain)
        report["cost_model"] = {
            "speed_up": costs.speed_up(stats.accepted_per_position, spent.rest, others.rest),
            "measured": (ours.tokens / spent.stepping) / (plain.tokens / others.stepping),
        }
    return report


def settings_report(request: Request) -> dict[str, Any]:
    """The settings that a number depends on: the four common ones, and any other that is not at its default."""
    default = Request()
    names = [
        item.name for item in fields(Request) if item.name not in _NOT_SETTINGS and not item.metadata.get("python_only")
    ]
    always = ("temperature", "top_k", "top_p", "min_p")
    return {
        name: getattr(request, name)
        for name in names
        if name in always or getattr(request, name) != getattr(default, name)
    }


def describe(base: FrozenBase, heads_name: str | None) -> dict[str, Any]:
    """Where a number was measured: models, hardware, precision, versions."""
    return {
        "base": base.name,
        "heads": heads_name,
        "device": str(base.device),
        "hardware": torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else "cpu",
        "dtype": str(base.dtype).removeprefix("torch.") + (f", {base.quantised} weights" if base.quantised else ""),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
    }


def _versions() -> Mapping[str, str]:
    try:
        own = version("mtp-heads")
    except PackageNotFoundError:  # run from a checkout that was never installed
        own = "unknown"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "mtp": own}
