"""`mtp-decode lab`: what each rule does to the base's law, on numbers you type or on a real base and its heads.

Knows: options, the loop that collects p and q along a text, and how to tell the result. Refuses to derive anything
(`mtp.rules`), to draw (`decode.lab_picture`), and to decode for use: here every token of the text comes from p.

Shapes: K draft position, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from decode.cli import INTERRUPTED
from decode.decoder import Decoder
from decode.drafters import HeadsDrafter
from decode.lab_picture import FEW, Anchor, Depth, Exhibit, draw, readable, show
from decode.png import check_path
from decode.report import as_json
from decode.target import BaseTarget
from decode.terminal import Terminal
from decode.text import encode
from mtp import rules
from mtp.errors import UserError
from mtp.sampling import RandomSource, SamplingConfig, finite_rows, to_probs

_MOST_RANDOM = 20_000
_DEPTHS = (1, 2, 3, 4, 5)
_MOST_IN_JSON = 1_000  # numbers of a law
_KEPT = 64  # anchors whose p and q stay in memory, for the one that is shown
_FOR_HEADS: dict[str, tuple[Any, Any, str]] = {
    "base": (str, None, "the base, if not found by the name in the heads' config"),
    "revision": (str, None, "revision of a base on the Hub"),
    "prompt": (str, None, "what the base answers"),
    "max_new_tokens": (int, 32, "most tokens of the answer, one anchor each"),
    "temperature": (float, 1.0, "0 is greedy, where p and q are one-hot"),
    "top_k": (int, 0, "keep the k likeliest tokens; 0 is off"),
    "top_p": (float, 1.0, "keep the likeliest tokens up to this mass; 1 is off"),
    "min_p": (float, 0.0, "keep tokens this likely relative to the likeliest; 0 is off"),
    "device": (str, "auto", "auto, cpu, cuda, cuda:N"),
    "dtype": (str, "auto", "auto, float32, bfloat16 or float16"),
    "no_chat": (bool, False, "do not put the prompt into the chat template"),
    "trust_remote_code": (bool, False, "run model code that comes with the base"),
}
"""Options that only mean something with --heads: type, default, help."""


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `lab`."""
    add = parser.add_argument
    add("--p", type=str, help="the base's law, as in 0.1,0.2,0.3,0.4; goes with --q")
    add("--q", type=str, help="the heads' law, as many numbers")
    add("--random", type=int | None, help="instead: random p and q over this many tokens")
    add("--heads", type=str, help="instead: p and q of trained heads and their base, with --prompt")
    add("--scale", type=float, default=0.5, help="c of the rule that keeps c min(1, p/q), from 0 to 1")
    add("--seed", type=int | None, help="of --random, or of the text that the base writes; default 0")
    add("--out", type=Path | None, help="write a picture here (.png)")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")
    for name, (kind, default, about) in _FOR_HEADS.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
        add("--" + name.replace("_", "-"), help=f"with --heads: {about}", **how)


def run(options: Namespace) -> int:
    """`mtp-decode lab`."""
    collect = _source(options)
    rules.check_scale(options.scale)
    if options.out is not None:
        check_path(options.out)
    terminal = Terminal.of(options)
    exhibit = collect(options)
    if options.out is not None:
        draw(exhibit, options.out)
        terminal.say(f"picture: {options.out}")
    if not (options.json and terminal.quiet):
        show(exhibit, to_stderr=options.json)
    if options.json:
        print(as_json(_report(exhibit, options)), flush=True)
    if exhibit.interrupted:
        terminal.say(f"interrupted after {len(exhibit.anchors)} anchors; the same command starts again.")
        return INTERRUPTED
    return 0


def _source(options: Namespace) -> Callable[[Namespace], Exhibit]:
    """What makes p and q; UserError unless exactly one thing does and no option is meant for another."""
    pair = options.p is not None or options.q is not None
    given = {"--p and --q": pair, "--random": options.random is not None, "--heads": options.heads is not None}
    named = [name for name, there in given.items() if there]
    if len(named) != 1:
        found = " with ".join(named) or "none"
        raise UserError(
            f"lab takes one of --p LAW --q LAW, --random V, or --heads H --prompt TEXT; found {found}: name one."
        )
    if not given["--heads"]:
        for name, (_, default, _) in _FOR_HEADS.items():
            if options[name] != default:
                raise UserError(
                    f"--{name.replace('_', '-')} is {options[name]!r}, but it only applies to --heads; leave it out."
                )
    if pair and options.seed is not None:
        raise UserError(f"--seed is {options.seed}, but it only applies to --random and --heads; leave it out.")
    return _from_numbers if pair else _from_heads if given["--heads"] else _from_random


# ---- p and q -------------------------------------------------------------------------------------------------------


def _from_numbers(options: Namespace) -> Exhibit:
    p, q = _law(options.p, "--p"), _law(options.q, "--q")
    if len(p) != len(q):
        raise UserError(f"--p has {len(p)} numbers and --q has {len(q)}; give as many to each.")
    return _toy(p, q, options.scale, f"p = ({_short(p)}), q = ({_short(q)})")


def _law(text: str | None, option: str) -> Tensor:
    if text is None:
        raise UserError(f"{option} is missing; --p and --q go together, as in --p 0.4,0.6 --q 0.5,0.5.")
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} is {text!r}; give numbers with commas between, as in 0.4,0.6.") from None
    return rules.as_law(values, option)


def _short(law: Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in law[:FEW].tolist()) + (", …" if len(law) > FEW else "")


def _from_random(options: Namespace) -> Exhibit:
    if not 2 <= options.random <= _MOST_RANDOM:
        raise UserError(f"--random is {options.random}; use a number of tokens from 2 to {_MOST_RANDOM:,}.")
    seed = options.seed or 0
    p, q = RandomSource(seed).uniform((2, options.random)).log().neg()  # normalised, uniform over all laws
    title = f"random p and q, V = {options.random:,}, seed {seed}"
    return _toy(p / p.sum(), q / q.sum(), options.scale, title)


def _toy(p: Tensor, q: Tensor, scale: float, title: str) -> Exhibit:
    depths = []
    for drafts in _DEPTHS:
        if len(p) ** drafts <= rules.MAX_DRAFTS:
            chain = rules.chain(p, q, drafts)
            depths.append(Depth(drafts, chain.token, chain.block, bias=chain.variations[1]))
    return Exhibit(title, p, q, rules.all_rules(p, q, scale), depths)


def _from_heads(options: Namespace) -> Exhibit:
    """Means over the anchors of a text; the anchor of median acceptance is the one that is shown."""
    sampling = SamplingConfig(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    if options.prompt is None:
        raise UserError("--prompt is missing; --heads needs a text to decode, as in --prompt 'Why is the sky blue?'.")
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {options.max_new_tokens}; use at least 1.")
    seed = options.seed or 0
    writer, chooser = RandomSource(seed), RandomSource(seed ^ 1)
    names = ("revision", "device", "dtype", "trust_remote_code")
    terminal, named = Terminal.of(options), {name: options[name] for name in names}
    with terminal.waiting("loading"):
        decoder = Decoder.from_pretrained(options.heads, options.base, on_progress=terminal.say, **named)
    ids = encode(decoder.base.tokenizer, options.prompt, chat=not options.no_chat)
    walk = _anchors(decoder, ids, options.max_new_tokens, sampling, writer, chooser)
    exhibit = _average(decoder, walk, options.scale, options.max_new_tokens, terminal)
    settings = f"T = {sampling.temperature:g}, {len(exhibit.anchors)} tokens, seed {seed}"
    return replace(
        exhibit,
        title=f"{decoder.base.name} and its heads on “{readable(options.prompt, 44).replace('␣', ' ')}”, {settings}",
    )


@torch.no_grad()
def _anchors(
    decoder: Decoder,
    ids: list[int],
    count: int,
    sampling: SamplingConfig,
    writer: RandomSource,
    chooser: RandomSource,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Along a text drawn from p: the token written, drafts [1, K] for its place on, and q [1, K, V], p [1, K + 1, V].

    Drafts use random numbers of their own, so that the text does not depend on the heads.
    """
    assert decoder.heads is not None
    target, drafter, vocab = BaseTarget(decoder.base), HeadsDrafter(decoder.heads), decoder.base.vocab_size
    most, length = drafter.max_draft_length, len(ids)
    room = target.context_length - length - most
    if not length or room < 1:
        raise UserError(
            f"the prompt has {length} tokens; give at least 1 and at most {target.context_length - most - 1}, which "
            f"leaves {most + 1} places of this base's context for drafts."
        )
    text = torch.tensor([ids], device=target.device)
    target.start(drafter.feature_layers)
    drafter.start(text)
    if length > 1:
        drafter.ingest(target.forward(text[:, :-1], 0).features, text[:, 1:])
    last = text[:, -1]
    for _ in range(min(count + (length == 1), room)):
        tokens, q = _draft(drafter, most if length > 1 else 0, last, sampling, chooser, vocab)
        block = torch.cat([last[:, None], tokens.to(last.device)], dim=1)
        output = target.forward(block, block.shape[1])
        p = _probs(output.logits, sampling, "the base")
        last = writer.categorical(p[:, 0]).to(last.device)
        if length > 1:  # the first token of a text has no anchor before it
            yield int(last), tokens, q, p
        target.rollback(length)
        drafter.ingest(output.features[:, :1], last[:, None])
        length += 1
        if int(last) in decoder.base.eos_token_ids:
            return


def _draft(
    drafter: HeadsDrafter, count: int, last: Tensor, sampling: SamplingConfig, chooser: RandomSource, vocab: int
) -> tuple[Tensor, Tensor]:
    """Drafts [1, K] and the q [1, K, V] they were drawn from, 0 outside the draft vocabulary."""
    tokens, rows, ids = last.new_zeros(1, 0).cpu(), [], drafter.draft_ids
    for k in range(1, count + 1):
        logits = drafter.draft(k, last)
        if ids is not None:
            logits = logits.new_full((1, vocab), -math.inf).index_copy_(1, ids, logits)
        rows.append(_probs(logits, sampling, "the heads"))
        tokens = torch.cat([tokens, chooser.categorical(rows[-1])[:, None]], dim=1)
        last = tokens[:, -1].to(last.device)
    return tokens, torch.stack(rows, dim=1) if rows else torch.zeros(1, 0, vocab, dtype=torch.float64)


def _probs(logits: Tensor, sampling: SamplingConfig, whose: str) -> Tensor:
    if not bool(finite_rows(logits).all()):
        raise UserError(f"{whose} returned NaN or infinite logits; use --dtype float32, or check the weights.")
    return to_probs(logits.cpu().double(), sampling)


def _average(
    decoder: Decoder, walk: Iterator[tuple[int, Tensor, Tensor, Tensor]], scale: float, count: int, terminal: Terminal
) -> Exhibit:
    """Over all anchors, or those up to Ctrl-C."""
    anchors: list[Anchor] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    studies, accepted = [], []
    with terminal.tracked(count, "anchors") as advance, terminal.stoppable("this anchor") as stop:
        for token, tokens, q, p in walk:
            label = readable(decoder.base.tokenizer.decode([token]))
            members = rules.all_rules(p[0, 0], q[0, 0], scale)
            anchors.append(Anchor(token, label, members[0].p_accept))
            studies.append([replace(member, law=member.law[:0]) for member in members])
            pairs += [(p[0, 0], q[0, 0])] * (len(pairs) < _KEPT)
            both = [rules.expected_accepted(tokens[:, :k], q[:, :k], p[:, : k + 1]) for k in range(1, q.shape[1] + 1)]
            accepted.append([(float(token_rule), float(block_rule)) for token_rule, block_rule in both])
            advance()
            if stop():
                break
    if not anchors:
        raise UserError("the base ended the text before any draft could be judged; use another --prompt or --seed.")
    shown = sorted(range(len(pairs)), key=lambda place: anchors[place].alpha)[len(pairs) // 2]
    means = [
        replace(
            column[0],
            total_variation=fmean(item.total_variation for item in column),
            p_accept=fmean(item.p_accept for item in column),
            exact=all(item.exact for item in column),
        )
        for column in zip(*studies, strict=True)
    ]
    depths = [_depth(k + 1, [row[k] for row in accepted]) for k in range(len(accepted[0]))]
    p, q = pairs[shown]
    top = p.topk(min(FEW, len(p))).indices.tolist()
    words = {token: readable(decoder.base.tokenizer.decode([token])) for token in top}
    return Exhibit("", p, q, means, depths, words=words, anchors=anchors, shown=shown, interrupted=stop())


def _depth(drafts: int, pairs: list[tuple[float, float]]) -> Depth:
    gains = [block - token for token, block in pairs]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return Depth(drafts, fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs), error=error)


def _report(exhibit: Exhibit, options: Namespace) -> dict[str, Any]:
    """The JSON document: what was asked, then both tables."""
    small = not exhibit.anchors and len(exhibit.p) <= _MOST_IN_JSON
    report: dict[str, Any] = {"title": exhibit.title, "vocab_size": len(exhibit.p), "scale": options.scale}
    if small:
        report |= {"p": exhibit.p.tolist(), "q": exhibit.q.tolist()}
    if exhibit.anchors:
        asked = ("heads", "base", "prompt", "temperature", "top_k", "top_p", "min_p")
        report |= {name: options[name] for name in asked}
        report["anchors"] = [vars(anchor) for anchor in exhibit.anchors]
    report |= {"seed": options.seed or 0, "rules": [], "drafts": []}
    for member in exhibit.studies:
        row = {name: value for name, value in vars(member).items() if name != "law"}
        report["rules"].append(row | ({"law": member.law.tolist()} if small else {}))
    for depth in exhibit.depths:
        report["drafts"].append({("K" if name == "drafts" else name): value for name, value in vars(depth).items()})
    return report | {"picture": None if options.out is None else str(options.out)}
