"""Validation by really decoding: the engine that users decode with, on a few prompts.

Knows: which process decodes which prompts, and how their counts come together. Refuses to know: when that is done, and
where the numbers go.
"""

from collections.abc import Sequence

from decode import Decoder
from decode.stats import DecodeStats
from decode.text import Prompt, plain_text
from decode.together import batch_fault
from decode.trace import TracedText, trace
from train.options import DecodeOptions
from train.sharded import merged

_AT_ONCE = 16  # prompts


def decode_share(
    decoder: Decoder, prompts: Sequence[tuple[Prompt, str | None]], options: DecodeOptions, ranks: tuple[int, int]
) -> tuple[DecodeStats | None, list[TracedText]]:
    """What decoding counted on prompts with their categories, None where the counts are another process's, and the
    texts, with special tokens.

    ranks: this process's number and how many there are. Each process decodes its share, and the first gets the counts
    of all and the texts of its own. A sharded base runs on all processes at once, so there they all decode the same.
    """
    base = decoder.base
    first, count = (0, 1) if base.sharded else ranks
    share = prompts[first::count]
    results = decoder.generate_many(
        [prompt for prompt, _ in share],
        batch_size=1 if batch_fault(base) else _AT_ONCE,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    total: DecodeStats | None = None
    traces, to_text = [], plain_text(base.tokenizer, special=True)
    for result, (prompt, category) in zip(results, share, strict=True):
        total = result.stats.empty() if total is None else total
        total.merge(result.stats)
        traces.append(trace(result, prompt, category, to_text))
    return total if count == 1 else merged(total, count), traces
