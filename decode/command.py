"""What the commands of `mtp-decode` share: options for base, heads and prompts, loading both, and the JSON document.

Knows: options, and what is told of loading. Refuses to decode.
"""

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from decode.decoder import Decoder
from decode.report import as_json
from decode.terminal import Terminal
from mtp.other_base import OTHER_BASE

HEADS = "folder of heads, smollm2-135m, or you/name[@revision]"


def add_models(parser: ArgumentParser, heads_help: str = HEADS) -> None:
    """Which base and heads, and where they run."""
    add = parser.add_argument_group("base and heads").add_argument
    add("--heads", type=str, metavar="H", help=heads_help)
    add("--base", type=str, metavar="B", help="the base, if not found by the name in the heads' config")
    add("--revision", type=str, metavar="R", help="revision of a base on the Hub")
    told = f"take a base the heads were not trained for: {OTHER_BASE}"
    add("--allow-other-base", action="store_true", help=told)
    add("--device", type=str, default="auto", metavar="D", help="auto, cpu, cuda, cuda:N")
    add("--dtype", type=str, default="auto", metavar="T", help="auto, float32, bfloat16 or float16")
    told = "faster steps, by compiled kernels on a CPU and CUDA graphs on a GPU: auto, on or off"
    add("--compile", type=str, default="auto", metavar="M", help=told)
    told = "int8: round the base's weights, which is then another p (needs torchao)"
    add("--quantise", type=str | None, metavar="Q", help=told)
    add("--trust-remote-code", action="store_true", help="run model code that comes with the base")


def add_prompts(parser: ArgumentParser) -> Any:
    """Where prompts come from; returns the group's `add_argument` for what else belongs there."""
    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", type=Path | None, metavar="FILE", help="JSONL file; each line has prompt, messages or turns")
    add("--limit", type=int | None, metavar="N", help="use only the first prompts of the file")
    return add


def add_json(parser: ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON document")


def load_decoder(options: Namespace, terminal: Terminal) -> Decoder:
    """The decoder that the options name; --verbose tells what it is made of."""
    with terminal.waiting("loading"):
        decoder = Decoder.from_pretrained(
            options.heads,
            options.base,
            revision=options.revision,
            device=options.device,
            dtype=options.dtype,
            quantise=options.quantise,
            trust_remote_code=options.trust_remote_code,
            compile=options.compile,
            allow_other_base=options.allow_other_base,
            on_progress=terminal.say,
        )
    for line in loaded(decoder, options.heads):
        terminal.detail(line)
    return decoder


def loaded(decoder: Decoder, heads_name: str | None) -> list[str]:
    """What was loaded, a line each."""
    base, heads = decoder.base, decoder.heads
    count = sum(weights.numel() for weights in base.model.parameters())
    how = "kernels" if base.kernels is not None else "no kernels"
    steps = "compiled steps" if base.steps is not None else "steps in transformers"
    device, dtype = base.device, str(base.dtype).removeprefix("torch.")
    lines = [f"base {base.name}: {count / 1e6:.1f} M parameters, {device}, {dtype}, {how}, {steps}"]
    if heads is not None:
        config, size = heads.config, sum(weights.numel() for weights in heads.parameters())
        lines.append(
            f"heads {heads_name}: {config.kind}, K = {config.draft_length}, {size / 1e6:.1f} M parameters, drafts from "
            f"{config.proposals:,} of {config.vocab_size:,} tokens"
        )
    return lines


def print_json(document: dict[str, Any]) -> None:
    """The last line of stdout."""
    print(as_json(document), flush=True)
