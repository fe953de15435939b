"""`report.html` of a run, and the pictures in its `plots/`: made from what the run's folder holds, at any time.

Knows: which metric a reader sees under which heading; the headings are those of the dashboard. Refuses to know: the
folder's files (`train.history`), HTML (`decode.page`) and pictures (`decode.chart_png`).
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode import chart_png, failures
from decode.charts import Bar, Bars, Chart, Line, Lines, thinned, told
from decode.page import Cell, Page, Section, Table, Tile, render, slug
from decode.png import put
from train.history import History, read_run
from train.samples import Samples
from train.summary import DECODED, MONITOR, doubt

NAME, PLOTS = "report.html", "plots"
_STEP = "optimiser step"


def write_page(folder: Path, pictures: bool = True) -> Path:
    """Write the page, and with `pictures` a PNG for each section; returns the page's path.

    UserError if the folder is not one of a run, OSError if it cannot be written."""
    page = run_page(read_run(folder))
    path = folder / NAME
    put(render(page).encode("utf-8"), path)
    for section in page.sections if pictures else ():
        if section.charts:
            (folder / PLOTS).mkdir(exist_ok=True)
            image = chart_png.draw(section.charts, section.title, f"{page.title}: {page.subtitle}")
            put(image, folder / PLOTS / f"{slug(section.title)}.png")
    return path


def run_page(run: History) -> Page:
    """All that the folder tells, as a page."""
    sections = (_lengths(run), _positions(run), _failures(run), _speed(run), _health(run), _everything(run))
    return Page(
        title=run.folder.resolve().name,
        subtitle=_subtitle(run),
        notices=tuple(_notices(run)),
        tiles=tuple(_tiles(run)),
        facts=tuple(_facts(run)),
        commands=tuple(_commands(run)),
        sections=sections,
    )


# ---- the head --------------------------------------------------------------------------------------------------------


def _subtitle(run: History) -> str:
    base = run.heads.get("base")
    if not isinstance(base, dict):
        return "a training run"
    return f"{run.heads.get('kind')} heads for {base.get('name')}, draft length K = {run.heads.get('draft_length')}"


def _notices(run: History) -> list[str]:
    found = []
    if not run.finished:
        found.append(
            f"Not finished: the run goes on, or was killed. This is what it had recorded by step {run.last_step:,}; "
            f"mtp-train report {shlex.quote(str(run.folder))} writes the page anew."
        )
    if not run.metrics:
        found.append("Nothing was recorded yet.")
    elif MONITOR not in run.metrics:
        found.append("There was no validation, so there is no acceptance length.")
    elif run.samples is None:
        found.append(
            "No decoded texts were kept: model.decode.prompts was not set, or the run is of an earlier version."
        )
    contradiction = doubt(run.best, run.longest)
    return [*found, *([contradiction[0].upper() + contradiction[1:] + "."] if contradiction else [])]


def _tiles(run: History) -> list[Tile]:
    best = run.best
    step = f"at step {best['step']:,.0f}" if best else ""
    named = {
        MONITOR: ("τ implied", f"by α on validation data, {step}"),
        DECODED: ("τ decoded", f"validation prompts really decoded, {step}"),
        "val/alpha/1": ("α₁", f"chance that the first draft stays, {step}"),
        "decode/tok_per_s": ("decoding", f"tokens per second, {step}"),
    }
    found = [Tile(name, f"{best[key]:.2f}", about) for key, (name, about) in named.items() if key in best]
    if "tokens_trained" in run.run:
        about = f"in {run.run.get('steps', 0):,} steps, {_minutes(run.run.get('seconds_training', 0.0))}"
        found.append(Tile("tokens trained", f"{run.run['tokens_trained']:,}", about))
    return found


def _minutes(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _facts(run: History) -> list[tuple[str, str]]:
    heads, record = run.heads, run.run
    base: Mapping[str, Any] = heads.get("base") or {}
    vocabulary = heads.get("draft_vocab_size") or heads.get("vocab_size")
    found = {
        "base": f"{base['name']}{' @ ' + base['revision'] if base.get('revision') else ''}" if "name" in base else None,
        "heads": heads.get("kind"),
        "parameters": f"{record['parameters']:,}" if "parameters" in record else None,
        "draft length K": heads.get("draft_length"),
        "draft vocabulary": f"{vocabulary:,} of {heads['vocab_size']:,} tokens" if vocabulary else None,
        "feature layers": ", ".join(map(str, heads.get("feature_layers") or [])) or None,
        "tokens trained": f"{record['tokens_trained']:,}" if "tokens_trained" in record else None,
        "steps": f"{record.get('steps', run.last_step):,}",
        "training took": _minutes(record["seconds_training"]) if "seconds_training" in record else None,
        "seed": record.get("seed"),
        "device": f"{record['device']}, {failures.counted(record.get('threads', 1), 'thread')}"
        if "device" in record
        else None,
        "revision": record.get("git_revision"),
        "python": record.get("python"),
        "versions": ", ".join(f"{name} {number}" for name, number in record.get("versions", {}).items()) or None,
    }
    return [(name, str(value)) for name, value in found.items() if value is not None]


def _commands(run: History) -> list[tuple[str, str]]:
    heads, folder = shlex.quote(str(run.folder / "heads")), shlex.quote(str(run.folder))
    found = [
        ("Trained by", shlex.join(map(str, run.run.get("command", [])))),
        ("Decode with the heads", f'mtp-decode generate --heads {heads} --prompt "Why is the sky blue?"'),
        ("Measure speed, into a page like this",
         f"mtp-decode bench --heads {heads} --prompts configs/prompts/demo_heldout.jsonl --limit 8 "
         f"--report {shlex.quote(str(run.folder / 'bench.html'))}"),
        ("Write this page anew", f"mtp-train report {folder}"),
    ]  # fmt: skip
    return [(what, command) for what, command in found if command and (heads not in command or run.heads)]


# ---- sections --------------------------------------------------------------------------------------------------------


def _lengths(run: History) -> Section:
    about = (
        "Acceptance length τ is how many tokens a step commits; plain decoding is 1. Implied: 1 + Σ Π α, from the "
        "chance α that each draft position is kept on validation data. Decoded: of validation prompts, with the engine "
        "that users decode with. The best heads, by the implied one, are those on disk."
    )
    plain = (1.0, "plain decoding")
    named = {"implied": MONITOR, "decoded": DECODED, "implied, greedy": "val/accept_len_implied_greedy"}
    validated = _chart(run, "Acceptance length", "Tokens per step, at each validation.", named, 1.0, plain, best=True)
    training = {"implied": "train/accept_len_implied", "implied, greedy": "train/accept_len_implied_greedy"}
    seen = "Tokens per step that α on the training data implies, before each step."
    trained = _chart(run, "On training data", seen, training, 1.0, plain)
    return _section("Acceptance length", about, [validated, trained])


def _positions(run: History) -> Section:
    about = (
        "αₖ is the chance Σ min(p, q) that rejection sampling keeps draft k, given that all before it were kept. "
        "Conditional: how often it was kept then. Cumulative: how often, or with which chance, drafts 1…k are all kept."
    )
    charts: list[Chart] = [
        _by_position(run, "α, on validation data", "Σ min(p, q) of draft k behind the data's own text.", "val/alpha"),
        _by_position(run, "α, decoded", "Σ min(p, q) of draft k in the steps that kept all before it.", "decode/alpha"),
        _by_position(run, "Conditional, decoded", "Kept, of the steps that kept all before.", "decode/conditional"),
        _by_position(run, "Cumulative, implied", "Π α₁…αₖ on validation data.", "val/cumulative"),
        _by_position(run, "Cumulative, decoded", "Share of the steps that kept drafts 1…k.", "decode/accepted"),
        _by_position(run, "Greedy agreement", "How often q's likeliest token is p's.", "val/greedy"),
        _final(run),
    ]
    return _section("Acceptance per draft position", about, charts)


def _final(run: History) -> Bars:
    """The same at the best step."""
    best = run.best
    named = {
        "α": "val/alpha",
        "α, decoded": "decode/alpha",
        "conditional": "decode/conditional",
        "cumulative": "val/cumulative",
        "cumul., decoded": "decode/accepted",
    }
    bars = tuple(
        Bar(f"draft {k}", name, best[f"{key}/{k}"])
        for k in range(1, run.positions + 1)
        for name, key in named.items()
        if f"{key}/{k}" in best
    )
    when = f"step {best['step']:,.0f}" if best else "the best step"
    about = f"At {when}. On validation data, and in decoding the validation prompts."
    return Bars("Of the best heads", about, bars, most=1)


def _failures(run: History) -> Section:
    if run.samples is None:
        return failures.section([], "The run kept no decoded texts.")
    prompts = failures.counted(len(run.samples.texts), "validation prompt")
    about = (
        f"From {prompts}, decoded with the heads of step {run.samples.step:,}. Categories come from the key of that "
        "name in the file of prompts; more prompts (model.decode.limit) say more."
    )
    return failures.section(run.samples.texts, about)


def _speed(run: History) -> Section:
    about = (
        "Of decoding the validation prompts, all at once, beside training. mtp-decode bench measures speed by itself, "
        "against other ways to decode, and what a row of the base costs."
    )
    rate, row = {"decoding": "decode/tok_per_s"}, {"verify": "decode/verify_ms_per_row"}
    parts = {name: f"decode/share/{name}" for name in ("verify", "draft", "rule", "other")}
    sizes = {f"{n} token{'s' * (n > 1)}": f"decode/committed/{n}" for n in range(1, run.positions + 2)}
    items: list[Chart | Table] = [
        _chart(run, "Decoding", "Tokens per second, prefill included.", rate, 0.0, best=True),
        _chart(run, "Shares of a step", "The base's forward, drafting, the rule, the rest.", parts, 0.0, best=True),
        _chart(run, "Cost per row", "Milliseconds of the base's forward per row that it checks.", row, 0.0, best=True),
        _chart(run, "Steps by committed tokens", "Share of the steps.", sizes, 0.0, best=True),
    ]
    if run.samples is not None:
        items += _of_samples(run.samples)
    return _section("Speed", about, items)


def _of_samples(samples: Samples) -> list[Chart | Table]:
    counts, seconds = samples.stats.get("histogram"), samples.stats.get("seconds")
    bars, table = failures.phases(seconds or {}, int(samples.stats.get("steps", 0)))
    return [failures.committed(samples.texts, counts), *([bars, table] if seconds else [])]


def _health(run: History) -> Section:
    def one(title: str, about: str, name: str, key: str) -> Lines:
        return _chart(run, title, about, {name: key}, 0.0)

    charts: list[Chart] = [
        _chart(run, "Loss", "The objective per supervised position.", {"train": "train/loss", "val": "val/loss"}),
        _by_position(run, "Loss per position, validation", "Of draft k.", "val/loss"),
        _by_position(run, "Loss per position, training", "Of draft k.", "train/loss"),
        one("Gradient norm", "Of all heads, before clipping.", "norm", "train/grad_norm"),
        _by_position(run, "Gradient norm per position", "To the states of draft k, per position.", "train/grad_norm"),
        one("Learning rate", "Of the optimiser's first group.", "rate", "train/lr"),
        one("Throughput", "Tokens trained on per second.", "training", "train/tokens_per_s"),
        one("Share of the machine", "Matrix products per second, of the best seen here.", "share", "train/peak_share"),
        one("Coverage", "Supervised tokens that the heads can propose.", "share", "val/draft_vocab_coverage"),
    ]
    return _section("Training health", "How the heads learn, and how fast the machine trains them.", charts)


def _everything(run: History) -> Section:
    best = dict(run.at(run.best["step"])) if run.best else {}
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (key, points[-1][1], points[-1][0], dict(points)[run.best["step"]] if key in best else None, len(points))
        for key, points in run.metrics.items()
    )
    columns = ("metric", "last value", "at step", "at the best step", "values")
    items = [Table("Metrics", "From csv/version_*/metrics.csv.", columns, rows)] if rows else []
    return Section("Every metric", "Whatever the run recorded, by the name that it has in the records.", tuple(items))


def _section(title: str, about: str, items: list[Chart] | list[Chart | Table]) -> Section:
    """Without charts of what was not recorded."""
    return Section(title, about, tuple(item for item in items if isinstance(item, Table) or not item.empty))


def _chart(
    run: History,
    title: str,
    about: str,
    named: Mapping[str, str],
    least: float | None = None,
    level: tuple[float, str] | None = None,
    best: bool = False,
) -> Lines:
    lines = [Line(name, tuple(run.metrics[key])) for name, key in named.items() if key in run.metrics]
    mark = (run.best["step"], f"best: step {told(run.best['step'])}") if best and run.best else None
    return Lines(title, about, thinned(lines), _STEP, least, mark, level)


def _by_position(run: History, title: str, about: str, key: str) -> Lines:
    named = {f"k = {k}": f"{key}/{k}" for k in range(1, run.positions + 1)}
    least = None if "loss" in key else 0.0
    return _chart(run, title, about, named, least, best=key.startswith(("val/", "decode/")))
