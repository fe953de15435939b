"""From sums and counts to metrics under the names that logs, dashboards and documents use.

Knows: the keys. Refuses to know: where numbers come from and where they go.
"""

import operator
from collections.abc import Mapping
from itertools import accumulate

from mtp.metrics import implied_accept_len
from mtp.objective import DraftSums

MONITOR, DECODED = "val/accept_len_implied", "decode/accept_len"
DOUBT = 0.85  # of the longest decoded acceptance length, below which decoding contradicts the choice of the best heads


def summarise(sums: DraftSums, prefix: str) -> dict[str, float]:
    """Metrics from sums: loss, and per draft position loss, alpha, its product up to there, greedy agreement and
    p(argmax q)."""
    count = sums.count.clamp(min=1)
    alpha = (sums.alpha / count).tolist()
    metrics = {
        f"{prefix}/loss": float(sums.total / sums.positions.clamp(min=1)),
        f"{prefix}/accept_len_implied": implied_accept_len(alpha),
        f"{prefix}/accept_len_implied_greedy": implied_accept_len((sums.greedy / count).tolist()),
    }
    metrics |= {f"{prefix}/cumulative/{k}": value for k, value in enumerate(accumulate(alpha, operator.mul), 1)}
    for name in ("loss", "alpha", "greedy", "top_mass"):
        values = (getattr(sums, name) / count).tolist()
        metrics |= {f"{prefix}/{name}/{k}": value for k, value in enumerate(values, 1)}
    return metrics


def best_line(best: Mapping[str, float]) -> str | None:
    """What was measured when the best heads were saved, in words; None without validation."""
    if MONITOR not in best:
        return None
    decoded = f", decoded {best[DECODED]:.2f}" if DECODED in best else ""
    return f"best heads: acceptance length implied {best[MONITOR]:.2f}{decoded}, at step {best['step']:.0f}"


def doubt(best: Mapping[str, float], longest: Mapping[str, float]) -> str | None:
    """A warning if the heads that validation implies to be best decode clearly worse than those of another step."""
    if DECODED not in best or DECODED not in longest or best[DECODED] >= DOUBT * longest[DECODED]:
        return None
    return (
        f"warning: the best heads by val/alpha (step {best['step']:.0f}) decode {best[DECODED]:.2f} tokens a step, and "
        f"those of step {longest['step']:.0f} decoded {longest[DECODED]:.2f}; raise model.decode.limit for a surer "
        "comparison, and look whether data.val is like the prompts"
    )
