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
    """Figures of one architecture; `record` is its run.json, `measured` come from `train.compare.measure`."""
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
    ks = " / ".join(map(str, range(1, document["draft_length"] + 1)))
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
    return (
        f"{about['base']}, {about['dtype']}, {about['hardware']}, {about['threads']} threads. Each trained on "
        f"{first['tokens_trained']:,} tokens ({first['steps']:,} steps) of {about['data']}, on {first['device']} with "
        f"{first['threads']} threads; minutes without validation and without the features that are kept on disk. α_k "
        f"of the best validation. Decoding: {about['num_prompts']} prompts of {about['prompts']}, "
        f"{about['max_new_tokens']} new tokens each, seed {about['seed']}, batch 1, one run; {rules}; tokens/s at the K "
        f"that was fastest here, prefill included. {versions}."
    )


def markdown(document: dict[str, Any]) -> str:
    """Table and footer."""
    heads = headings(document)
    lines = [heads, ["---"] * len(heads), *cells(document)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{footer(document)}\n"


def console_table(document: dict[str, Any]) -> Table:
    """The same for a terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in headings(document):
        table.add_column(column, justify="left" if column == "heads" else "right")
    for line in cells(document):
        table.add_row(*line)
    return table


def with_block(readme: str, block: str, where: str) -> str:
    """The text with `block` between the markers, in place of what was there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"--readme {where} lacks the lines {BEGIN} and {END}; add them where the table belongs.")
    return f"{before}{BEGIN}\n{block}{END}{after}"
