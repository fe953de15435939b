"""From sums and counts to metrics under the names that logs, dashboards and documents use.

Knows: the keys. Refuses to know: where numbers come from and where they go.
"""

from decode.stats import DecodeStats
from mtp.metrics import implied_accept_len
from mtp.objective import DraftSums


def summarise(sums: DraftSums, prefix: str) -> dict[str, float]:
    """Metrics from sums: loss, and per draft position loss, alpha, greedy agreement and p(argmax q)."""
    count = sums.count.clamp(min=1)
    alpha = (sums.alpha / count).tolist()
    metrics = {
        f"{prefix}/loss": float(sums.total / sums.positions.clamp(min=1)),
        f"{prefix}/accept_len_implied": implied_accept_len(alpha),
        f"{prefix}/accept_len_implied_greedy": implied_accept_len((sums.greedy / count).tolist()),
    }
    for name in ("loss", "alpha", "greedy", "top_mass"):
        values = (getattr(sums, name) / count).tolist()
        metrics |= {f"{prefix}/{name}/{k}": value for k, value in enumerate(values, 1)}
    return metrics


def decode_metrics(stats: DecodeStats) -> dict[str, float]:
    """Metrics of really decoding."""
    metrics = {
        "decode/accept_len": stats.accept_len,
        "decode/tok_per_s": stats.committed / max(1e-9, stats.total_seconds),
    }
    for name, values in (("accepted", stats.accepted_per_position), ("alpha", stats.alpha)):
        metrics |= {f"decode/{name}/{k}": value for k, value in enumerate(values, 1)}
    return metrics
