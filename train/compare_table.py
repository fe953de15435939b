"""What a comparison comes to, in words: one document, a Markdown table, a table for the console, a block of a README.

Knows: which figures stand in which column. Refuses to know: how they were measured, and where files lie.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from mtp.errors import UserError

BEGIN, END = "<!-- compare:begin -->", "<!-- compare:end -->"
NO_HEADS = "none"


def row(name: str, record: dict[str, Any], kind: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one architecture; `record` is its run.json, `measured` come from `train.compare_measure.measure`."""
    best = record.get("best") or {}
    count = max(one["draft_length"] for one in measured)
    alphas = [best.get(f"val/alpha/{k}") for k in range(1, count + 1)]
    fields = ("parameters", "seconds_training", "tokens_trained", "steps", "device", "threads")
    return {
        "name": name,
        "kind": kind,
        **{field: record.get(field) for field in fields},
        "best_step": best.get("step"),
        "alpha": [] if None in alphas else alphas,
        "measured": measured,
    }


def lengths(measured: Sequence[dict[str, Any]], temperature: float) -> list[float]:
    """Acceptance lengths by K."""
    return [one["accept_len"] for one in measured if one["temperature"] == temperature]


def fastest(measured: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """The measurement with most tokens per second."""
    return max((one for one in measured if one["temperature"] == temperature), key=lambda one: one["tok_per_s"])


def headings(document: dict[str, Any]) -> list[str]:
    """Column heads."""
    last = document["draft_length"]
    ks = f"1…{last}" if last > 1 else "1"
    at = [f"T = {temperature:g}" for temperature in document["temperatures"]]
    return [
        "heads",
        "parameters",
        "minutes",
        f"α_k, k = {ks}",
        *(f"τ at {one}, K = {ks}" for one in at),
        *(f"tokens/s at {one} (K)" for one in at),
    ]


def cells(document: dict[str, Any]) -> list[list[str]]:
    """Rows under `headings`; the last is decoding without heads."""
    rows = []
    for one in document["rows"]:
        measured, temperatures = one["measured"], document["temperatures"]
        best = [fastest(measured, temperature) for temperature in temperatures]
        rows.append(
            [
                one["name"],
                f"{one['parameters'] / 1e6:.1f} M",
                f"{one['seconds_training'] / 60:.1f}",
                _joined(one["alpha"]) or "-",
                *(_joined(lengths(measured, temperature)) for temperature in temperatures),
                *(f"{fast['tok_per_s']:.1f} ({fast['draft_length']})" for fast in best),
            ]
        )
    plain = [fastest(document["plain"], temperature)["tok_per_s"] for temperature in document["temperatures"]]
    rows.append([NO_HEADS, "-", "-", "-", *("1" for _ in plain), *(f"{speed:.1f}" for speed in plain)])
    return rows


def _joined(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def footer(document: dict[str, Any]) -> str:
    """What belongs to the figures."""
    about, first = document["about"], document["rows"][0]
    rules = ", ".join(f"{rule} at T = {t}" for t, rule in document["rules"].items())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    decoded_on, trained_on = _count(about["threads"], "thread"), _count(first["threads"], "thread")
    return (
        f"{about['base']}, {about['dtype']}, {about['hardware']}, {decoded_on}. Each trained on "
        f"{first['tokens_trained']:,} tokens ({first['steps']:,} steps) of {about['data']}, on {first['device']} with "
        f"{trained_on}; minutes without validation and without the features that are kept on disk. α_k of the best "
        f"validation. Decoding: {_count(about['num_prompts'], 'prompt')} of {about['prompts']}, "
        f"{about['max_new_tokens']} new tokens each, seed {about['seed']}, batch 1, one run; {rules}; tokens/s at "
        f"the K that was fastest here, prefill included. {versions}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def markdown(document: dict[str, Any]) -> str:
    """Table and footer."""
    heads = headings(document)
    lines = [heads, ["---"] * len(heads), *cells(document)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{footer(document)}\n"


def console_tables(document: dict[str, Any]) -> list[Table]:
    """The same for a terminal, narrow enough for 80 columns: training, then decoding."""
    ks = [str(k) for k in range(1, document["draft_length"] + 1)]
    training = _table("heads", "parameters", "minutes", *(f"α_{k}" for k in ks))
    decoding = _table("heads", "T", *(f"τ, K={k}" for k in ks), "tokens/s (K)")
    for (name, parameters, minutes, *_), one in zip(cells(document), document["rows"], strict=False):
        training.add_row(name, parameters, minutes, *(f"{alpha:.2f}" for alpha in one["alpha"]))
    for name, measured in [
        *((one["name"], one["measured"]) for one in document["rows"]),
        (NO_HEADS, document["plain"]),
    ]:
        for temperature in document["temperatures"]:
            fast = fastest(measured, temperature)
            taus = [f"{tau:.2f}" for tau in lengths(measured, temperature)] if fast["draft_length"] else ["1"] * len(ks)
            decoding.add_row(name, f"{temperature:g}", *taus, f"{fast['tok_per_s']:.1f} ({fast['draft_length']})")
    return [training, decoding]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column == "heads" else "right")
    return table


def with_block(readme: str, block: str, where: str) -> str:
    """The text with `block` between the markers, in place of what was there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"--readme {where} lacks the lines {BEGIN} and {END}; add them where the table belongs.")
    return f"{before}{BEGIN}\n{block}{END}{after}"
