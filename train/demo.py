"""`make demo`: the whole path on the embedded base, in minutes.

The base answers a few prompts; heads are trained from `configs/demo.yaml`; a held-out prompt is decoded with them; the
same prompts are timed against transformers. Knows: the order of these steps and what to show of each. Refuses to know:
how any of them works, all are what the command lines run.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from decode import Decoder
from decode.bench import bench
from decode.prompts import read_prompts
from decode.report import show_bench
from decode.request import Request
from mtp.errors import UserError
from train.fit import fit
from train.regenerate_cli import run_regenerate
from train.run import wandb_folder

CONFIG = "configs/demo.yaml"
TRAIN_PROMPTS, HELD_OUT = Path("configs/prompts/demo_train.jsonl"), Path("configs/prompts/demo_heldout.jsonl")
SHIPPED, ANSWERS = "configs/data/demo_answers.jsonl", Path("runs/demo-answers.jsonl")
FRESH_ANSWERS, FRESH_TOKENS = 12, 32  # enough to show it; the bulk of the answers ships with the project
SHOWN_TOKENS, BENCH_PROMPTS, BENCH_TOKENS = 40, 4, 40


def main() -> int:
    """Run the demo; the last line of stdout is one JSON document. Returns the exit code."""
    console, started = Console(highlight=False), time.monotonic()
    try:
        document = run(console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; make demo starts again; answers that are written are kept", file=sys.stderr)
        return 130
    console.print(f"done in {time.monotonic() - started:.0f} s; the heads and all records are in {document['run_dir']}")
    print(json.dumps(document), flush=True)
    return 0


def run(console: Console) -> dict[str, Any]:
    """All steps; returns the document of the last line."""
    console.rule("1  the base answers a few prompts")
    fresh = ["--prompts", str(TRAIN_PROMPTS), "--out", str(ANSWERS), "--limit", str(FRESH_ANSWERS)]
    run_regenerate([*fresh, "--max-new-tokens", str(FRESH_TOKENS), "--batch-size", str(FRESH_ANSWERS), "--seed", "1"])

    console.rule("2  heads are trained on answers of the base")
    folder = fit(["--config", CONFIG, "--data.train", json.dumps([SHIPPED, str(ANSWERS)])])

    console.rule("3  a prompt the heads have never seen; ⟦several tokens in one step⟧")
    decoder = Decoder.from_pretrained(folder / "heads")
    show_text(console, decoder, str(read_prompts(HELD_OUT, 1)[0]))

    console.rule("4  rejection sampling at temperature 1, against transformers")
    prompts = read_prompts(HELD_OUT, 1 + BENCH_PROMPTS)[1:]
    request = Request(max_new_tokens=BENCH_TOKENS, temperature=1.0, seed=0)
    report = bench(decoder, prompts, request, str(folder / "heads"), against=("transformers",))
    show_bench(report, to_stderr=False)
    mtp, baseline = report["results"]
    return {
        "accept_len": mtp["accept_len"],
        "tok_per_s": mtp["tok_per_s"],
        "baseline_tok_per_s": baseline["tok_per_s"],
        "run_dir": str(folder),
        "wandb_dir": str(wandb_folder(folder) or ""),
        "bench": report,
    }


def show_text(console: Console, decoder: Decoder, prompt: str) -> None:
    """Stream one answer; what a single step committed beyond one token stands between ⟦ and ⟧, and is underlined."""
    console.print(f"[bold]{prompt}[/bold]")
    stream = decoder.stream(prompt, max_new_tokens=SHOWN_TOKENS)
    for piece in stream:
        several = len(piece.token_ids) > 1
        text = f"⟦{piece.text}⟧" if several else piece.text
        console.print(text, end="", style="underline" if several else None, markup=False, soft_wrap=True)
    stats = stream.stats
    counts = f"{stats.committed} tokens in {stats.steps} steps"
    console.print(f"\n[dim]{counts}: acceptance length {stats.accept_len:.2f}[/dim]")


if __name__ == "__main__":
    sys.exit(main())
