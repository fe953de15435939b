"""The card of heads: README.md in the Hub's format, for people and for the Hub's search.

Knows: which metadata the Hub reads, what a card tells of a config, and how a card that somebody wrote is amended.
Refuses to know: where facts come from, and to guess one: what was not stated, a licence above all, is left out.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from mtp.config import BaseRef, HeadsConfig
from mtp.embedded import EMBEDDED
from mtp.errors import UserError
from mtp.licenses import LICENSES
from mtp.suggest import nearest

LIBRARY, PIPELINE = "mtp-heads", "text-generation"
TAGS = ("speculative-decoding", "multi-token-prediction")
PLACE = "<this folder>"
"""Stands in a card for the name of the heads, until they have one on the Hub."""
_METADATA = re.compile(r"\s*---\s*\n")


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card tells beside the config, as somebody stated or measured it; empty where nobody did.

    Args:
        license: of the heads, as the Hub spells it (`apache-2.0`).
        datasets: ids on the Hub of what they were trained on.
        data: sentences on the data, a line each.
        recipe: rows of a table, name and value.
        acceptance: rows of a table; the first is its head.
        measured: how that was measured, and the acceptance length.
    """

    license: str | None = None
    datasets: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    recipe: tuple[tuple[str, str], ...] = ()
    acceptance: tuple[tuple[str, ...], ...] = ()
    measured: str = ""


def make_card(config: HeadsConfig, facts: CardFacts = CardFacts()) -> str:
    """The card of heads: metadata, base, figures, data, recipe and use; Markdown."""
    metadata: dict[str, Any] = {} if facts.license is None else {"license": check_license(facts.license)}
    if (base_id := hub_name(config.base)) is not None:
        metadata["base_model"] = base_id
    if facts.datasets:
        metadata["datasets"] = list(facts.datasets)
    metadata |= {"library_name": LIBRARY, "pipeline_tag": PIPELINE, "tags": list(TAGS)}
    parts = [_head(config)]
    if facts.acceptance or facts.measured:
        parts.append("\n\n".join(text for text in ("## Acceptance", _table(facts.acceptance), facts.measured) if text))
    if facts.data:
        parts.append("## Data\n\n" + "\n".join(f"- {line}" for line in facts.data))
    if facts.recipe:
        parts.append("## Recipe\n\n" + _table((("", ""), *facts.recipe)))
    return _with_metadata(metadata, "\n\n".join([*parts, _use(config), _LICENCE]) + "\n")


def amend_card(
    card: str, config: HeadsConfig, *, license: str | None = None, base: BaseRef | None = None, place: str | None = None
) -> str:
    """A card with what the Hub needs: metadata that are missing, and what is stated here in place of what was.

    config: of the heads as the card describes them. base: what they name as their base from now on. place: their name
    on the Hub. UserError where the metadata cannot be read.
    """
    metadata = read_metadata(card)
    text = _body(card)
    if base is not None and base != config.base:
        text = text.replace(_revised(config.base), _revised(base))
        text = text.replace(f"`{shown_base(config.base)}`", f"`{shown_base(base)}`")
        metadata.pop("base_model", None)
    if place is not None:
        text = text.replace(PLACE, place)
    if license is not None:
        metadata["license"] = check_license(license)
    if (base_id := hub_name(base or config.base)) is not None:
        metadata.setdefault("base_model", base_id)
    metadata = {"library_name": LIBRARY, "pipeline_tag": PIPELINE} | metadata
    tags = metadata.get("tags") or []
    metadata["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *TAGS]))
    return _with_metadata(metadata, text)


def read_metadata(card: str) -> dict[str, Any]:
    """The metadata of a card, {} where it has none. UserError where they are not what the Hub reads."""
    if not _METADATA.match(card):
        return {}
    try:
        found: dict[str, Any] = ModelCard(card).data.to_dict()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"the card README.md has metadata that cannot be read ({' '.join(str(error).split())}); correct the lines "
            "between its two ---."
        ) from None
    return found


def check_license(license: str, option: str = "--license") -> str:
    """The licence as it is. UserError unless it is an identifier of the Hub's."""
    if license in LICENSES:
        return license
    near = nearest(license, sorted(LICENSES))
    raise UserError(
        f"{option} is {license!r}; use one of the Hub's identifiers, such as apache-2.0, mit or unknown, and "
        "other for a licence that its list lacks (huggingface.co/docs/hub/repositories-licenses)"
        + ("." if near is None else f"; did you mean {near!r}?")
    )


def hub_name(base: BaseRef) -> str | None:
    """The base's id on the Hub; None for one that only this machine has."""
    if base.name in EMBEDDED:
        return EMBEDDED[base.name].hub_id
    return base.name if base.revision is not None else None


def shown_base(base: BaseRef) -> str:
    """The base's name for others to read: of a local one not the path, which is nobody's business."""
    return base.name if base.name in EMBEDDED or base.revision is not None else Path(base.name).name


def named_base(base: BaseRef, stated: str | None) -> BaseRef:
    """The base under a name that others can find it by. stated: `owner/name` or `owner/name@revision`, on the Hub.

    UserError for a base that only this machine has where nothing is stated.
    """
    if stated is not None:
        name, _, revision = stated.partition("@")
        if name.count("/") != 1:
            raise UserError(f"--base-model is {stated!r}; name a base on the Hub as owner/name or owner/name@revision.")
        return replace(base, name=name, revision=revision or "main")
    if base.name in EMBEDDED or base.revision is not None:
        return base
    raise UserError(
        f"the heads name their base {base.name!r}, which only this machine has under that name; say where others find "
        "the same weights with --base-model OWNER/NAME[@REVISION]."
    )


def _head(config: HeadsConfig) -> str:
    base, layers = config.base, ", ".join(map(str, config.feature_layers))
    rows = (
        ("base", _revised(base)),
        ("fingerprint of its weights", f"`{base.fingerprint or '-'}`"),
        ("kind", f"`{config.kind}`"),
        ("draft length K", str(config.draft_length)),
        ("draft vocabulary", f"{config.proposals:,} of {config.vocab_size:,} tokens"),
        ("feature layers", layers),
    )
    return (
        f"# {config.kind.capitalize()} heads for `{shown_base(base)}`\n\n"
        f"Multi-token-prediction heads: the proxy q that proposes up to {config.draft_length} tokens per step for the "
        "frozen base p. Decoding with them is lossless: rejection sampling keeps the output's distribution exactly the "
        f"base's.\n\n{_table((('', ''), *rows))}"
    )


def _revised(base: BaseRef) -> str:
    return f"`{shown_base(base)}`, revision `{base.revision or '-'}`"


def _use(config: HeadsConfig) -> str:
    return f"""## Use

```
mtp-decode generate --heads {PLACE} --prompt "Why is the sky blue?"
```

```python
from decode import Decoder

decoder = Decoder.from_pretrained("{PLACE}")  # loads the base, at the revision above
print(decoder.generate("Why is the sky blue?", max_new_tokens=64).text)
```

They are for the base above and no other: one with other weights is refused by its fingerprint."""


_LICENCE = """## Licence

The one that the metadata of this card state; where they state none, ask the author. The base has its own."""


def _table(rows: tuple[tuple[str, ...], ...]) -> str:
    if not rows:
        return ""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _with_metadata(metadata: dict[str, Any], text: str) -> str:
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=10**6)
    return f"---\n{head}---\n{text}"


def _body(card: str) -> str:
    """The Markdown behind the metadata."""
    return ModelCard(card).text if _METADATA.match(card) else card
