"""The names under which decoding is logged, in training and in `mtp-decode --wandb` and `--stats` alike.

Knows: counts of `DecodeStats`, the report of `bench`, and what vLLM calls the same counts.
Refuses to know: who listens.

Keys by draft position end in 1…K, but for those with vLLM's name, which end in 0…K-1 as vLLM's label `position` does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from decode.stats import DecodeStats

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_PARTS = ("draft", "verify", "rule", "other")  # of a step


def vllm_counters(stats: DecodeStats) -> dict[str, Any]:
    """The counters that vLLM serves at /metrics as `vllm:<name>_total`: steps with drafts, drafted tokens, accepted
    tokens, and accepted tokens by position [K]. As everywhere here, what a stop rule discarded does not count."""
    return {
        "spec_decode_num_drafts": stats.drafted_at[0] if stats.drafted_at else 0,
        "spec_decode_num_draft_tokens": stats.drafted,
        "spec_decode_num_accepted_tokens": stats.accepted,
        PER_POSITION: list(stats.accepted_at),
    }


def flat(counters: Mapping[str, Any]) -> dict[str, float]:
    """The same with a key for each position, as wandb draws them."""
    numbers = {name: value for name, value in counters.items() if name != PER_POSITION}
    return numbers | {f"{PER_POSITION}/{k}": value for k, value in enumerate(counters[PER_POSITION])}


def decode_metrics(stats: DecodeStats) -> dict[str, float]:
    """Metrics of decoding under `decode/`.

    `accepted/k` is the share of the steps with draft k that kept drafts 1…k, `conditional/k` that of the steps that
    came as far as k; `committed/n` the share of steps that committed n tokens; `share/…` that of a step's seconds.
    """
    metrics = {
        "decode/accept_len": stats.accept_len,
        "decode/tok_per_s": stats.committed / max(1e-9, stats.total_seconds),
    }
    conditional = [kept / max(1, reached) for kept, reached in zip(stats.accepted_at, stats.reached_at, strict=True)]
    shares = [count / max(1, stats.steps) for count in stats.histogram]
    for name, values in (
        ("accepted", stats.accepted_per_position),
        ("alpha", stats.alpha),
        ("conditional", conditional),
        ("committed", shares),
    ):
        metrics |= {f"decode/{name}/{k}": value for k, value in enumerate(values, 1)}
    stepping = max(1e-9, stats.total_seconds - stats.seconds["prefill"])
    metrics |= {f"decode/share/{part}": stats.seconds[part] / stepping for part in _PARTS}  # type: ignore[index]
    rows = stats.drafted + stats.steps
    return metrics | {"decode/verify_ms_per_row": 1e3 * stats.seconds["verify"] / max(1, rows)}


def bench_rows(report: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """The report of `bench` as rows to log: the sides; what a forward costs by rows; the speed-up to expect by K."""
    ours = report["results"][0]
    row = {f"bench/tok_per_s/{side['name']}": side["tok_per_s"] for side in report["results"]}
    row |= {f"bench/ratio/{name}": ratio for name, ratio in report["ratios"].items()}
    row |= {"decode/accept_len": ours["accept_len"], "decode/tok_per_s": ours["tok_per_s"]}
    row |= {f"decode/accepted/{k}": share for k, share in enumerate(ours["accepted_per_position"], 1)}
    row |= {f"decode/alpha/{k}": alpha for k, alpha in enumerate(ours["alpha"], 1)}
    stepping = max(1e-9, sum(ours["seconds"][part] for part in _PARTS))
    row |= {f"decode/share/{part}": ours["seconds"][part] / stepping for part in _PARTS}
    yield row | flat({name: report[name] for name in report if name.startswith("spec_decode_")})
    for rows, seconds in enumerate(report["costs"]["forward_seconds"], 1):
        yield {"bench/rows": rows, "bench/forward_ms": 1e3 * seconds}
    for drafts, speed_up in enumerate((report["cost_model"] or {"speed_up": []})["speed_up"], 1):
        yield {"bench/draft_length": drafts, "bench/speed_up": speed_up}
