"""The acceptance-length dashboard as data: sections of panels, and the metrics that each draws.

Knows: what people look at, and the keys that `train.summary` and `decode.telemetry` log. Refuses to know: W&B and its
formats (`train.dashboard_save`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["lines", "shares", "bars", "table", "page"]
STEP = "trainer/global_step"


@dataclass(frozen=True)
class Panel:
    """One chart. A metric ending in `/*` is drawn for every draft position, part or number that a run has.

    `lines` are drawn over `x`; `shares` likewise, stacked to a whole; `bars` compare the last values of runs; a `table`
    is the last that each run has logged under the one name, and so is a `page` of HTML.
    """

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "lines"
    x: str = STEP
    log_y: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"title": self.title, "kind": self.kind, "metrics": list(self.metrics)}


@dataclass(frozen=True)
class Section:
    """Panels under one heading."""

    name: str
    panels: tuple[Panel, ...]


def _tables() -> tuple[Panel, ...]:
    return (
        Panel("Rejected drafts and what came in their place", ("decode/failures",), "table"),
        Panel("Contexts with the lowest acceptance", ("decode/contexts",), "table"),
        Panel("By category of prompt", ("decode/categories",), "table"),
        Panel("Decoded samples: accepted, recovered and bonus tokens", ("decode/samples",), "page"),
    )


SECTIONS = (
    Section(
        "Acceptance length",
        (
            Panel("Acceptance length τ: implied and decoded", ("val/accept_len_implied", "decode/accept_len")),
            Panel("Decoded, by run", ("decode/accept_len",), "bars"),
            Panel(
                "Implied, of greedy drafts and in training",
                ("val/accept_len_implied_greedy", "train/accept_len_implied"),
            ),
            Panel("Tokens committed per step: share of steps", ("decode/committed/*",), "shares"),
            Panel("Tokens committed per step: histogram", ("decode/committed_per_step",)),
        ),
    ),
    Section(
        "Acceptance per draft position",
        (
            Panel("α_k = Σ min(p, q)", ("val/alpha/*",)),
            Panel("Cumulative: α_1 … α_k", ("val/cumulative/*",)),
            Panel("Conditional, decoded: kept of those reached", ("decode/conditional/*",)),
            Panel("Cumulative, decoded: drafts 1…k kept", ("decode/accepted/*",)),
            Panel("α_k where decoding came", ("decode/alpha/*",)),
            Panel("Greedy agreement", ("val/greedy/*",)),
            Panel("p of q's likeliest token", ("val/top_mass/*",)),
        ),
    ),
    Section("Where drafts fail", _tables()),
    Section(
        "Speed",
        (
            Panel("Tokens per second, decoding", ("decode/tok_per_s",)),
            Panel("Share of a step: draft, verify, rule, other", ("decode/share/*",), "shares"),
            Panel("Cost per row that the base verifies (ms)", ("decode/verify_ms_per_row",)),
            Panel("Cost of a forward by its rows (ms), bench", ("bench/forward_ms",), x="bench/rows"),
            Panel("Speed-up to expect by draft length, bench", ("bench/speed_up",), x="bench/draft_length"),
            Panel("Tokens per second, bench", ("bench/tok_per_s/mtp", "bench/tok_per_s/plain"), "bars"),
            Panel(
                "Counters, named as vLLM's",
                (
                    "spec_decode_num_drafts",
                    "spec_decode_num_draft_tokens",
                    "spec_decode_num_accepted_tokens",
                    "spec_decode_num_accepted_tokens_per_pos/0",
                ),
                "bars",
            ),
        ),
    ),
    Section(
        "Training health",
        (
            Panel("Loss", ("train/loss", "val/loss")),
            Panel("Loss per draft position", ("train/loss/*",)),
            Panel("Loss per draft position, validation", ("val/loss/*",)),
            Panel("Gradient norm", ("train/grad_norm",), log_y=True),
            Panel("Gradient norm per draft position", ("train/grad_norm/*",), log_y=True),
            Panel("Learning rate", ("train/lr",)),
            Panel("Tokens per second, training", ("train/tokens_per_s",)),
            Panel("Share of the machine's peak", ("train/peak_share",)),
            Panel("Coverage of the draft vocabulary", ("val/draft_vocab_coverage",)),
        ),
    ),
)

COMPARED = {
    "Architecture": "model.heads.kind",
    "Draft length": "model.heads.draft_length",
    "Loss": "model.loss",
}
"""What a report groups runs by, and the configuration's key for it."""
COMPARISON = (
    Panel("Acceptance length, decoded", ("decode/accept_len",), "bars"),
    Panel("Acceptance length, implied", ("val/accept_len_implied",)),
    Panel("α_k", ("val/alpha/*",)),
    Panel("Tokens per second, decoding", ("decode/tok_per_s",), "bars"),
)
"""What it draws for each."""


def pattern(metric: str) -> str:
    """A regular expression for the keys that a metric with `*` stands for."""
    return f"^{re.escape(metric.removesuffix('*'))}{'[a-z0-9_]+' if metric.endswith('*') else ''}$"


def unknown(panels: Iterable[Panel], logged: Iterable[str]) -> list[str]:
    """`title: metric` for whatever a panel draws, along an axis too, and no run has logged."""
    keys = set(logged)
    return [
        f"{panel.title}: {metric}"
        for panel in panels
        for metric in (*panel.metrics, *(() if panel.kind in ("bars", "table", "page") else (panel.x,)))
        if not any(re.match(pattern(metric), key) for key in keys)
    ]


def panels(sections: Iterable[Section] = SECTIONS) -> list[Panel]:
    """All panels, in order."""
    return [panel for section in sections for panel in section.panels]
