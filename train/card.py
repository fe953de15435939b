"""The card of heads that a run trained: what their run's own records say, and nothing else.

Knows: which keys of config.yaml and run.json a reader of the card wants, and in which words. Refuses to know: the
card's layout (`mtp.card`). Paths on this machine are not told, only the names of files.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mtp.card import CardFacts, make_card
from mtp.config import HeadsConfig
from mtp.hub import read_config, write_card
from train.run import read_record
from train.summary import DECODED, MONITOR

_HUB_DATA = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_SHOWN = {
    "val/alpha": "α_k = Σ min(p, q), on held-out text",
    "val/cumulative": "drafts 1…k all kept, implied by α",
    "val/greedy": "q's likeliest token is p's",
    "decode/accepted": "drafts 1…k kept in decoding",
}


def card_of_run(config: HeadsConfig, run: Path, best: Mapping[str, float] | None = None) -> str:
    """The card of heads of a run's folder. best: metrics of their validation; by default those in run.json."""
    record, settings = read_record(run), _settings(run / "config.yaml")
    best = (record.get("best") or {}) if best is None else best
    sources = _sources(settings)
    facts = CardFacts(
        license=_at(settings, "run.license"),
        datasets=tuple(dict.fromkeys(name.partition(":")[0] for name in sources if _on_hub(name))),
        data=tuple(_data(settings, sources)),
        recipe=tuple(_recipe(settings, record)),
        acceptance=tuple(_acceptance(config.draft_length, best)),
        measured=_measured(settings, best, config.draft_length),
    )
    return make_card(config, facts)


def renew_card(run: Path) -> None:
    """Write the card anew, when the record of a run is complete."""
    heads = run / "heads"
    if heads.is_dir():
        write_card(heads, card_of_run(read_config(heads), run))


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _at(settings: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _sources(settings: Mapping[str, Any]) -> list[str]:
    named = _at(settings, "data.train") or []
    return [named] if isinstance(named, str) else [str(name) for name in named]


def _on_hub(name: str) -> bool:
    """Whether a source is one of the Hub's data sets, and not a file or folder."""
    return bool(_HUB_DATA.fullmatch(name)) and not name.endswith(_FILES) and not Path(name).exists()


def _named(name: str) -> str:
    return f"`{name}`" if _on_hub(name) else f"`{Path(name).name}`"


def _data(settings: Mapping[str, Any], sources: list[str]) -> Iterator[str]:
    named = _at(settings, "data.train")
    for name in sources:
        weight = named[name] if isinstance(named, Mapping) else 1
        yield _named(name) + ("" if weight == 1 else f", each record {weight:g} times an epoch")
    if sources:
        yield f"at most {_at(settings, 'data.max_length')} tokens in a row; only the assistant's are supervised"


def _recipe(settings: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if settings:
        optimizer = _at(settings, "model.optimizer") or {}
        losses = _at(settings, "model.loss") or {}
        weights = ", ".join(f"{name} {losses[name]:g}" for name in ("kl", "ce", "tv", "lk") if losses.get(name))
        batch = (_at(settings, "data.batch_size") or 0) * (_at(settings, "trainer.accumulate_grad_batches") or 1)
        start = _at(settings, "model.start_from")
        yield "start", f"`{Path(str(start)).name}`" if start else str(_at(settings, "model.heads.init"))
        yield "loss", weights or "-"
        yield "optimiser", f"{optimizer.get('kind')}, learning rate {optimizer.get('lr')}"
        yield "rows in a batch", _rows(batch, record.get("devices", 1))
        yield "precision", str(_at(settings, "trainer.precision") or "float32")
    if "tokens_trained" in record:
        yield "steps", f"{record['steps']:,}"
        yield "tokens", f"{record['tokens_trained']:,}"
        yield "minutes", f"{record['seconds_training'] / 60:.1f} on {record['device']}"
        yield "parameters", f"{record['parameters']:,}"
    if "versions" in record:
        yield "seed", str(record.get("seed"))
        yield "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        if record.get("git_revision"):
            yield "revision of mtp", f"`{record['git_revision']}`"


def _rows(batch: int, devices: int) -> str:
    """Of the batches of all devices, which make one step."""
    return str(batch) if devices == 1 else f"{batch * devices}, {batch} on each of {devices} devices"


def _acceptance(count: int, best: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    positions = range(1, count + 1)
    rows = [
        (text, *(f"{best[f'{key}/{k}']:.3f}" if f"{key}/{k}" in best else "-" for k in positions))
        for key, text in _SHOWN.items()
        if f"{key}/1" in best
    ]
    if rows:
        yield ("draft position k", *map(str, positions))
        yield from rows


def _measured(settings: Mapping[str, Any], best: Mapping[str, float], count: int) -> str:
    told = []
    if MONITOR in best:
        told.append(
            f"Acceptance length τ, the base's own token included: {best[MONITOR]:.2f} implied on held-out text at "
            f"temperature 1, at step {best.get('step', 0):.0f}."
        )
    if DECODED in best:
        asked = _at(settings, "model.decode") or {}
        prompts = Path(str(asked.get("prompts"))).name
        told.append(
            f"{best[DECODED]:.2f} in really decoding {asked.get('limit')} prompts of `{prompts}`, "
            f"{asked.get('max_new_tokens')} new tokens each, temperature {asked.get('temperature')}, K = {count}."
        )
    return " ".join(told)
