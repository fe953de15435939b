"""Do exported heads work in a real engine? `python -m tests.serving.proof --vllm PYTHON`, with vLLM's interpreter.

Heads are exported, served by vLLM in float32 on their base, and asked for greedy texts. For each format: the texts are
those of vLLM without drafts, drafts are accepted at each position as often as by our engine, and the server answers a
plain chat completion. With --control, an EAGLE-3 folder that names its feature layers off by one must be noticed by
what is accepted, while its texts stay the same. Exit code 0 if all of that holds, else 1.

Knows: what is compared, and the table. Refuses to know: how a server is run (`tests.serving.server`) and how steps of
our engine are counted (`tests.serving.ours`).

Shapes: K draft position.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import Decoder
from decode.prompts import read_categorised
from mtp.embedded import EMBEDDED, default_home, ensure_embedded
from mtp.errors import UserError
from mtp.formats.catalogue import FORMATS
from mtp.formats.export import export
from mtp.formats.tensors import CONFIG
from mtp.hub import find_heads, read_config
from tests.serving.ours import Difference, count, difference, follow
from tests.serving.server import Answer, Counts, Messages, Server, find_port, serve

MOST_POINTS = 0.02
"""By which a share of accepted drafts may differ from ours: near ties move texts, and then all that follows."""
METHODS = {"eagle3": "eagle3", "vllm-medusa": "medusa", "speculators": None}
"""Formats that vLLM loads, by the method that it is told; None where the folder says it itself."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_PACKAGES = ("vllm", "torch", "transformers")
_VERSIONS = f"import {', '.join(_PACKAGES)}; print(*(one.__version__ for one in ({', '.join(_PACKAGES)})))"


@dataclass(frozen=True)
class Case:
    """One format of one folder of heads, as it was served."""

    heads: str
    format: str
    k: int
    texts: int
    differences: list[Difference]
    """Of vLLM's texts with drafts from those without."""
    ours_differ: list[Difference]
    """Of our texts from vLLM's without drafts."""
    ours: Counts
    vllm: Counts
    answers: bool
    """Whether a plain chat completion gave a text."""
    control: bool = False
    """Whether the folder was spoiled, so that other drafts are expected, and the same texts."""

    @property
    def apart(self) -> float:
        """The largest difference between shares of accepted drafts."""
        return max(abs(a - b) for a, b in zip(self.ours.shares, self.vllm.shares, strict=True))

    @property
    def passed(self) -> bool:
        ties = all(found.is_tie for found in [*self.differences, *self.ours_differ])
        if self.control:
            return self.answers and ties and self.apart > MOST_POINTS
        return self.answers and ties and sum(self.vllm.accepted_at) > 0 and self.apart <= MOST_POINTS

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = ("heads", "format", "control", "k", "texts", "answers", "apart", "passed")
        told = {name: getattr(self, name) for name in names}
        for name in ("differences", "ours_differ"):
            told[name] = [vars(found) | {"is_tie": found.is_tie} for found in getattr(self, name)]
        for name, counts in (("mtp", self.ours), ("vllm", self.vllm)):
            told[name] = {"steps": counts.steps, "accepted_at": counts.accepted_at, "shares": counts.shares}
        return told


def main(args: Sequence[str] | None = None) -> int:
    """0 if all holds, 1 if not, or if it could not be found out."""
    options = build_parser().parse_args(args)
    try:
        report = prove(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(as_table(report))
    if options.json:
        print(json.dumps(report))
    return 0 if report["passed"] else 1


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.serving.proof", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--vllm", type=Path, required=True, help="the interpreter of the environment that has vLLM")
    add("--heads", nargs="+", default=["smollm2-135m"], help="of one base: folders, or smollm2-135m")
    add("--formats", nargs="+", default=list(METHODS), choices=METHODS, help="those that the heads fit are served")
    add("--prompts", type=Path, default=Path("configs/prompts/demo_heldout.jsonl"), help="JSONL, as for mtp-decode")
    add("--limit", type=int, help="use only the first prompts of the file (8, without --per-category)")
    add("--per-category", type=int, help="use only the first prompts of each `category`")
    add("--max-new-tokens", type=int, default=48, help="tokens per text")
    add("--control", action="store_true", help="serve eagle3 a second time, with its feature layers off by one")
    add("--port", type=int, default=0, help="of the server; 0 for any that is free")
    add("--wait", type=int, default=900, help="seconds that a server may take to start")
    add("--json", action="store_true", help="the last line of stdout is one JSON document")
    return parser


def prove(options: argparse.Namespace) -> dict[str, Any]:
    """All cases one after the other, each with a server of its own."""
    find_port(options.port)
    check_one_base(options.heads)
    versions = vllm_versions(options.vllm)
    limit = 8 if (options.limit, options.per_category) == (None, None) else options.limit
    found = read_categorised(options.prompts, limit, options.per_category)
    prompts = [as_messages(prompt) for prompt, _ in found]
    decoders = {heads: load(heads) for heads in options.heads}
    base = next(iter(decoders.values())).base.name
    with tempfile.TemporaryDirectory() as scratch:
        proof = Proof(options, Path(scratch), base, prompts)
        cases = [case for heads, decoder in decoders.items() for case in proof.cases(heads, decoder)]
    if not cases:
        raise UserError(f"--heads {' '.join(options.heads)} fit none of --formats {' '.join(options.formats)}.")
    settings = {"base": base, "prompts": len(prompts), "max_new_tokens": options.max_new_tokens}
    told = [case.to_json() for case in cases]
    return {**settings, **versions, "cases": told, "passed": all(case.passed for case in cases)}


Ours = tuple[list[list[int]], list[int]]
"""Our texts, and all steps' accepted drafts."""


class Proof:
    """Servers of one base, asked the same prompts; the one without drafts comes first."""

    def __init__(self, options: argparse.Namespace, scratch: Path, base: str, prompts: list[Messages]) -> None:
        self.options, self.scratch, self.base, self.prompts = options, scratch, base, prompts
        self.tokens = options.max_new_tokens
        say("vLLM without drafts")
        with self._serve(base, []) as server:
            self.plain = self._ask(server)

    def cases(self, heads: str, decoder: Decoder) -> list[Case]:
        """Those of one folder of heads, in all formats that it fits."""
        assert decoder.heads is not None
        names = [name for name in self.options.formats if FORMATS[name].fault(decoder.heads, decoder.base) is None]
        if not names:
            return []
        ours, found = self._ours(decoder), []
        for name in names:
            for control in (False, True) if self.options.control and name == "eagle3" else (False,):
                found.append(self._case(heads, decoder, name, ours, control))
        return found

    def _case(self, heads: str, decoder: Decoder, name: str, ours: Ours, control: bool) -> Case:
        assert decoder.heads is not None
        say(f"{heads} as {name}{', layers off by one' if control else ''}")
        k, folder = decoder.heads.config.draft_length, self.scratch / f"{Path(heads).name}-{name}"
        export(decoder.heads, decoder.base, name, folder, overwrite=True)
        if control:
            spoil(folder)
        with self._serve(*arguments(name, folder, self.base, k)) as server:
            before, answers = server.counts(), self._ask(server)
            counts, replied = server.counts().since(before), answers_plainly(server, self.prompts[0])
        texts, accepted = ours
        parted = [self._parted(decoder, other) for other in ([one.tokens for one in answers], texts)]
        return Case(heads, name, k, len(answers), *parted, count(accepted, k), counts, replied, control)

    def _serve(self, model: Path | str, more: list[str]) -> Any:
        options = self.options
        return serve(options.vllm, model, more, port=options.port, log=self.scratch / "log", wait=options.wait)

    def _ask(self, server: Server) -> list[Answer]:
        return [server.answer(prompt, self.tokens) for prompt in self.prompts]

    def _ours(self, decoder: Decoder) -> Ours:
        """Our texts of the prompts' ids, which are the server's, and all steps' accepted drafts."""
        found = [follow(decoder, answer.prompt, self.tokens) for answer in self.plain]
        return [text for text, _ in found], [number for _, steps in found for number in steps]

    def _parted(self, decoder: Decoder, texts: list[list[int]]) -> list[Difference]:
        """Where texts part from the server's without drafts."""
        pairs = zip(self.plain, texts, strict=True)
        found = [difference(decoder, plain.prompt, plain.tokens, text) for plain, text in pairs]
        return [one for one in found if one is not None]


def arguments(name: str, folder: Path, base: str, k: int) -> tuple[Path | str, list[str]]:
    """The model that vLLM is to serve, and what it is told of the drafts."""
    method = METHODS[name]
    if method is None:
        return folder, []
    told = {"method": method, "model": str(folder), "num_speculative_tokens": k}
    return base, ["--speculative-config", json.dumps(told)]


def spoil(folder: Path) -> None:
    """Let an EAGLE-3 folder name the layers behind those that its heads were trained on."""
    path = folder / CONFIG
    document = json.loads(path.read_text(encoding="utf-8"))
    document[_LAYERS] = [layer + 1 for layer in document[_LAYERS]]
    path.write_text(json.dumps(document), encoding="utf-8")


def answers_plainly(server: Server, prompt: Messages) -> bool:
    """Whether a chat completion with nothing but standard fields gives a text."""
    document = server.chat(prompt, 16)
    return document["object"] == "chat.completion" and bool(document["choices"][0]["message"]["content"])


def as_messages(prompt: Any) -> Messages:
    """A prompt of the file as a conversation."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def load(heads: str) -> Decoder:
    """Heads and their base in float32 on the CPU, as vLLM runs them here; its name is where vLLM finds it."""
    name = read_config(find_heads(heads)).base.name
    base = str(ensure_embedded(name, default_home(os.environ), say)) if name in EMBEDDED else name
    return Decoder.from_pretrained(heads, base, device="cpu", dtype="float32", compile="off", on_progress=say)


def check_one_base(heads: Sequence[str]) -> None:
    """UserError where these belong to several bases: one is served, and what is compared are drafts for its text."""
    bases = {one: read_config(find_heads(one)).base for one in heads}
    first = bases[heads[0]]
    for one, base in bases.items():
        if (base.fingerprint or base.name) != (first.fingerprint or first.name):
            raise UserError(
                f"--heads {heads[0]} are for the base {first.name}, and {one} for {base.name} with other weights; "
                "give heads of one base, and run the proof once for each."
            )


def vllm_versions(python: Path) -> dict[str, str]:
    """Versions in the other environment. UserError where it has no vLLM."""
    try:
        told = subprocess.run([str(python), "-c", _VERSIONS], capture_output=True, text=True, check=True, env={})
        return dict(zip(_PACKAGES, told.stdout.splitlines()[-1].split(), strict=True))
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
    except (IndexError, ValueError):  # another program, or something that is no text
        why = "it does not tell its versions"
    raise UserError(f"--vllm {python} cannot import vLLM ({why}); name the python of its environment.")


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def as_table(report: dict[str, Any]) -> str:
    """One row per case, as Markdown."""
    where = f"vLLM {report['vllm']}, torch {report['torch']}, transformers {report['transformers']}, float32"
    rows = ["| format | K | texts | accepted at k = 1…K: mtp | vLLM | |", "| --- | --- | --- | --- | --- | --- |"]
    for case in report["cases"]:
        shares = [" / ".join(f"{share:.3f}" for share in case[name]["shares"]) for name in ("mtp", "vllm")]
        verdict = ("is noticed" if case["control"] else "holds") if case["passed"] else "FAILS"
        rows.append(f"| {_name(case)} | {case['k']} | {_texts(case)} | {shares[0]} | {shares[1]} | {verdict} |")
    notes = [note for case in report["cases"] for note in _notes(case)]
    settings = f"{report['prompts']} prompts, {report['max_new_tokens']} tokens each"
    return "\n".join([*rows, "", f"{where}; {settings}, greedy.", *notes])


def _name(case: dict[str, Any]) -> str:
    return f"{case['format']}{', layers off by one' if case['control'] else ''}"


def _texts(case: dict[str, Any]) -> str:
    return f"{case['texts'] - len(case['differences'])} of {case['texts']} alike"


def _notes(case: dict[str, Any]) -> list[str]:
    """Each text that is not the one of vLLM without drafts, and how near the tokens were."""
    sides = (("vLLM with drafts", "differences"), ("mtp", "ours_differ"))
    return [
        f"{_name(case)}: {who} parts from vLLM without drafts at token {found['place'] + 1}; the logits there are "
        f"{abs(found['gap']):.1e} apart, {'a near tie' if found['is_tie'] else 'which is NO near tie'}."
        for who, name in sides
        for found in case[name]
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, by which the server is stopped too
    sys.exit(main())
