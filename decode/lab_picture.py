"""What a person sees of `mtp-decode lab`: tables with a derivation, and a picture.

Knows: rich and matplotlib. Refuses to compute probabilities: all figures come from `Exhibit`.
"""

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from torch import Tensor

from decode.png import check_path, write
from decode.report import Screen
from mtp import rules

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 10
"""So many tokens are shown; of a larger vocabulary, the likeliest under p."""
_ROOMY = 6  # so many tokens leave room for a number at each bar
_BASE, _HEADS, _BIASED, _EXACT, _BLOCK = "#2b6cb0", "#dd7a1f", "#c53030", "#4a5568", "#2f855a"
_PALE_BASE, _PALE_HEADS, _TEXT = "#bcd7f0", "#f8d9b8", "#1a202c"
_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_SHOWN = "␣⏎⇥…‘’“”–—"  # beyond the alphabets that the font has


@dataclass(frozen=True)
class Anchor:
    """A place of a text at which the heads drafted."""

    token: int
    label: str
    alpha: float
    """P(accept) of the residual rule for the first draft."""


@dataclass(frozen=True)
class Depth:
    """Expected accepted drafts with K drafts."""

    drafts: int
    token: float
    block: float
    bias: float | None = None
    """Total variation of the block rule's law from p, where all drafts were enumerated."""
    error: float | None = None
    """Standard error of block - token, where it is a mean over anchors."""

    @property
    def gain(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3f}"
        if self.error is not None and abs(self.block - self.token) < 2 * self.error:
            error += " (too few anchors to tell)"
        return f"{self.block - self.token:+.3f}{error}"


@dataclass(frozen=True)
class Exhibit:
    """One visit to the lab. With anchors, figures of `studies` and `depths` are means over them."""

    title: str
    p: Tensor
    q: Tensor
    studies: list[rules.Study]
    depths: list[Depth]
    words: dict[int, str] = field(default_factory=dict)
    """Texts of tokens; others are shown by number."""
    anchors: list[Anchor] = field(default_factory=list)
    shown: int = 0
    """The anchor that p and q belong to."""
    interrupted: bool = False
    """Whether there were to be more anchors."""

    def top(self) -> list[int]:
        """The tokens to show, in order."""
        few = len(self.p) <= FEW
        return list(range(len(self.p))) if few else [int(token) for token in self.p.topk(FEW).indices]

    def name(self, token: int) -> str:
        return self.words.get(token, str(token))


def readable(text: str, limit: int = 12) -> str:
    """A short text with visible white space, of characters that the picture's font has."""
    shown = [_VISIBLE.get(c, c if c.isprintable() and ord(c) < 0x530 or c in _SHOWN else "□") for c in text]
    return "".join(shown[: limit - 1]) + "…" if len(shown) > limit else "".join(shown)


# ---- tables --------------------------------------------------------------------------------------------------------


def show(exhibit: Exhibit, to_stderr: bool) -> None:
    """Both tables, then the derivation with its numbers."""
    console, mean = Screen(stderr=to_stderr, highlight=False), bool(exhibit.anchors)
    with_law = not mean and len(exhibit.p) <= _ROOMY
    about = f"One draft ({f'means over {len(exhibit.anchors)} anchors' if mean else exhibit.title})"
    table = Table(title=about, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rule", "exact", "TV from p", "P(accept)", *(["law"] if with_law else [])):
        table.add_column(column, justify="left" if column in ("rule", "law") else "right", no_wrap=column == "rule")
    for member in exhibit.studies:
        law = [" ".join(f"{value:.2f}".lstrip("0") for value in member.law.tolist())] if with_law else []
        bias = "0" if member.exact else f"{member.total_variation:.4g}"
        table.add_row(member.name, "yes" if member.exact else "no", bias, f"{member.p_accept:.4g}", *law)
    console.print(table)
    table = Table(title="K drafts: expected accepted drafts", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("K", "token rule", "block rule", "gain ± s.e." if mean else "gain"):
        table.add_column(column, justify="right")
    for depth in exhibit.depths:
        table.add_row(str(depth.drafts), f"{depth.token:.4f}", f"{depth.block:.4f}", depth.gain)
    console.print(table)
    for line in derivation(exhibit):
        console.print(line, markup=False, soft_wrap=True)


def derivation(exhibit: Exhibit) -> list[str]:
    """Why each rule does what it does, with the numbers put in."""
    lines = rules.derivation(exhibit.p, exhibit.q, exhibit.name)
    if exhibit.anchors:
        lines.insert(0, f"Before “{exhibit.anchors[exhibit.shown].label}”, the place of median P(accept):")
    depth = exhibit.depths[-1]
    if depth.bias is not None:
        lines.append(
            f"K = {depth.drafts}: the token rule keeps Σ α^k = {depth.token:.4g} drafts and commits "
            f"{1 + depth.token:.4g} tokens; the block rule {depth.block:.4g} and {1 + depth.block:.4g}, and the law of "
            f"its next {depth.drafts} token(s) is {depth.bias:.0e} from p"
        )
    return lines


# ---- picture -------------------------------------------------------------------------------------------------------


def draw(exhibit: Exhibit, path: Path) -> None:
    """Write the picture to `path`: the whole file or nothing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_path(path)
    figure = Figure(figsize=(12, 8.6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.025, right=0.975, top=0.82, bottom=0.05, wspace=0.12, hspace=0.52)
    title = "One draft, six rules: which keep the base's law, and at what price"
    figure.text(0.025, 0.953, title, size=19, weight="bold", color=_TEXT)
    figure.text(0.025, 0.917, exhibit.title, size=12.5, color=_EXACT, parse_math=False)
    _draw_overlap(axes[0, 0], exhibit)
    _draw_text(axes[0, 1], exhibit) if exhibit.anchors else _draw_laws(axes[0, 1], exhibit)
    _draw_acceptance(axes[1, 0], exhibit)
    _draw_depths(axes[1, 1], exhibit)
    image = BytesIO()
    figure.savefig(image, format="png")
    write(image.getvalue(), path)


def _panel(axes: "Axes", title: str, under: str) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#a0aec0")
    axes.tick_params(length=0, labelsize=11, colors=_TEXT)
    axes.set_yticks([])
    axes.text(0, 1.135, title, transform=axes.transAxes, size=14, weight="bold", color=_TEXT)
    axes.text(0, 1.045, under, transform=axes.transAxes, size=11, color=_EXACT, parse_math=False)


def _name_tokens(axes: "Axes", exhibit: Exhibit, tokens: list[int]) -> None:
    names = [exhibit.name(token) for token in tokens]
    wide = max(map(len, names)) > 6
    slant: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if wide else {}
    axes.set_xticks(range(len(tokens)), names, parse_math=False, **slant)
    if not exhibit.words:
        axes.set_xlabel("token y", size=11, labelpad=2)


def _draw_overlap(axes: "Axes", exhibit: Exhibit) -> None:
    """q beside p per token; below the lower of the two, both are solid."""
    tokens = exhibit.top()
    p, q = exhibit.p[tokens].tolist(), exhibit.q[tokens].tolist()
    kept = [min(pair) for pair in zip(p, q, strict=True)]
    alpha = float(exhibit.p.minimum(exhibit.q).sum())
    places, width = range(len(tokens)), 0.38
    for side, heights, pale, solid in ((-0.2, q, _PALE_HEADS, _HEADS), (0.2, p, _PALE_BASE, _BASE)):
        at = [place + side for place in places]
        axes.bar(at, heights, width, color=pale, edgecolor=solid, linewidth=1.2)
        axes.bar(at, kept, width, color=solid)
        for x, height in zip(at, heights, strict=True):
            if len(tokens) <= _ROOMY or height == max(heights):
                axes.text(x, height, f"{height:.2g}", ha="center", va="bottom", size=10, color=solid)
    where = f"{FEW} likeliest of {len(exhibit.p):,} tokens; " if len(exhibit.p) > FEW else ""
    where = f"before “{exhibit.anchors[exhibit.shown].label}”, median place; " if exhibit.anchors else where
    _panel(axes, "The heads propose q, the base wants p", f"{where}solid: kept drafts, Σ min(p, q) = {alpha:.3g}")
    _name_tokens(axes, exhibit, tokens)
    axes.set_ylim(0, 1.42 * max(*p, *q))
    key = (
        (0.0, _HEADS, _PALE_HEADS, f"q: kept, rejected ({1 - alpha:.2g})"),
        (0.44, _BASE, _PALE_BASE, f"p: kept drafts, residual ({1 - alpha:.2g})"),
    )
    for x, solid, pale, text in key:
        for shift, colour in ((0.012, solid), (0.042, pale)):
            axes.plot(x + shift, 0.95, "s", color=colour, markersize=9, transform=axes.transAxes)
        axes.text(x + 0.065, 0.95, text, color=solid, size=11.5, transform=axes.transAxes, va="center_baseline")


def _draw_laws(axes: "Axes", exhibit: Exhibit) -> None:
    """p as bars; a point per rule, and a stalk where it misses."""
    tokens = exhibit.top()
    p = exhibit.p[tokens].tolist()
    axes.bar(range(len(tokens)), p, 0.8, color=_PALE_BASE)
    count, size = len(exhibit.studies), 6.5 if len(tokens) <= _ROOMY else 5
    for index, member in enumerate(exhibit.studies):
        at = [place + 0.64 * (index / (count - 1) - 0.5) for place in range(len(tokens))]
        law = member.law[tokens].tolist()
        if member.exact:
            axes.plot(at, law, "o", color=_BASE, markersize=size, markeredgecolor="white")
            continue
        axes.vlines(at, p, law, color=_BIASED, linewidth=2)
        axes.plot(at, law, "D", color=_BIASED, markersize=size + 0.5, markeredgecolor="white")
        for x, height, truth in zip(at, law, p, strict=True):
            if len(tokens) > _ROOMY:
                break
            va, gap = ("bottom", 0.03 * max(p)) if height >= truth else ("top", -0.03 * max(p))
            text = f"{height - truth:+.2g}".replace("-", "−")
            axes.text(x, height + gap, text, ha="center", va=va, size=10, color=_BIASED)
    biased = [member for member in exhibit.studies if not member.exact]
    miss = f"; red: resampling from p, TV {biased[0].total_variation:.2g}" if biased else ""
    _panel(axes, "What comes out", f"bars: p; dots: the {count - len(biased)} exact rules{miss}")
    _name_tokens(axes, exhibit, tokens)
    axes.set_ylim(0, 1.22 * max(p))


def _draw_text(axes: "Axes", exhibit: Exhibit) -> None:
    """P(accept) of the residual rule at each token of the text."""
    alphas = [anchor.alpha for anchor in exhibit.anchors]
    mean = sum(alphas) / len(alphas)
    colours = [_BASE if place == exhibit.shown else "#a3b4c9" for place in range(len(alphas))]
    axes.bar(range(len(alphas)), alphas, 0.82, color=colours)
    axes.axhline(mean, color=_EXACT, linewidth=1, linestyle=(0, (4, 3)))
    _panel(
        axes, "Where the heads are right", f"P(accept) of the first draft; mean {mean:.2f} (dashed); blue: shown left"
    )
    if len(alphas) <= 48:
        labels = [readable(anchor.label, 9) for anchor in exhibit.anchors]
        axes.set_xticks(range(len(alphas)), labels, rotation=90, size=9.5, parse_math=False)
    axes.set_xlim(-0.6, len(alphas) - 0.4)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])


def _draw_acceptance(axes: "Axes", exhibit: Exhibit) -> None:
    studies = sorted(exhibit.studies, key=lambda member: (member.p_accept, member.exact))
    top = max(0.05, studies[-1].p_accept)
    for row, member in enumerate(studies):
        colour = _BASE if member.exact else _BIASED
        axes.barh(row, member.p_accept, 0.66, color=colour)
        text = f"{member.p_accept:.2g}  " + ("exact" if member.exact else f"biased, TV {member.total_variation:.2g}")
        axes.text(member.p_accept + 0.02 * top, row, text, va="center", size=11.5, color=colour)
        axes.text(-0.02 * top, row, member.name, va="center", ha="right", size=11.5, color=_TEXT)
    _panel(axes, "What it costs", ("mean " if exhibit.anchors else "") + "P(accept) of one draft")
    axes.set_xlim(-1.22 * top, 1.8 * top)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _draw_depths(axes: "Axes", exhibit: Exhibit) -> None:
    depths = exhibit.depths
    under = f"expected accepted drafts per step; gain at K = {depths[-1].drafts}: {depths[-1].gain}"
    _panel(axes, "Several drafts: one by one, or as a block", under)
    numbers = [depth.drafts for depth in depths]
    token, block = [depth.token for depth in depths], [depth.block for depth in depths]
    axes.fill_between(numbers, token, block, color=_BLOCK, alpha=0.12, linewidth=0)
    top, last = max(*token, *block) or 1.0, numbers[-1]
    apart = max(0.0, 0.1 * top - (block[-1] - token[-1])) / 2  # keeps the two names from touching
    for name, values, colour, side in (("token rule", token, _EXACT, -1), ("block rule", block, _BLOCK, 1)):
        axes.plot(numbers, values, "o-", color=colour, linewidth=2.2, markersize=6)
        text, y = f"{name} {values[-1]:.2f}", values[-1] + side * apart
        axes.text(1.03 * last, y, text, color=colour, size=12, weight="bold", va="center")
        for x, value in zip(numbers[:-1], values, strict=False):
            if side > 0 or block[x - 1] - value > 0.005:
                va = "bottom" if side > 0 else "top"
                axes.text(x, value + side * 0.035 * top, f"{value:.2f}", color=colour, size=11, ha="center", va=va)
    axes.set_xticks(numbers, [f"K = {number}" for number in numbers])
    axes.set_xlim(1 - 0.07 * last, 1.34 * last)
    axes.set_ylim(0 if any(block) else -0.15, 1.12 * top)
