"""Several prompts to several results: one after the other, or in a batch.

Knows: what a batch cannot do, and that a text which fails has its error in place of a result. Refuses to know: how a
text is begun, and what a forward is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from decode.engine import Decoding
from decode.request import Request
from decode.stream import Result, Stream
from decode.text import Prompt
from decode.together import Begin, run_together
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.processors import TextProcessors

Prepare = Callable[[Prompt, Request], tuple[Begin, Stream]]
"""How to begin a text, and the stream of its steps if it is alone."""
Done = tuple[int, Result | UserError]
"""The number of a prompt, and what became of it."""


def check_batch_size(batch_size: int) -> None:
    """UserError for a batch without texts."""
    if batch_size < 1:
        raise UserError(f"--batch-size is {batch_size}; use at least 1.")


def check_batch(
    base: FrozenBase, requests: Sequence[Request], batch_size: int, find_fault: Callable[[], str | None]
) -> None:
    """UserError on what cannot be done with so many texts at a time. `find_fault`: that of the base
    (`decode.together.batch_fault`), which takes a moment to find."""
    check_batch_size(batch_size)
    if batch_size == 1:
        return
    several = f"--batch-size is {batch_size}, but"
    for request in {id(one): one for one in requests}.values():
        _check_request(base, request, several)
    fault = find_fault()
    if fault is not None:
        raise UserError(f"{several} base {base.name!r} takes one text at a time: {fault}; use 1.")


def _check_request(base: FrozenBase, request: Request, several: str) -> None:
    if request.tree is not None:
        raise UserError(f"{several} --tree is {request.tree}, and trees are for single texts; leave one of them out.")
    processors = TextProcessors(request, 1, base.eos_token_ids, base.vocab_size, base.device)
    if processors.stateful:
        raise UserError(
            f"{several} a processor of the request may keep state, and would be shown several texts in turns; use 1, "
            "or give it an attribute `stateless` that is true if it keeps none."
        )


def one_by_one(prepare: Prepare, prompts: Sequence[Prompt], requests: Sequence[Request]) -> Iterator[Done]:
    """Each text to its end before the next one begins."""
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        try:
            stream = prepare(prompt, request)[1]
            for _ in stream:
                pass
            found: Result | UserError = stream.result
        except UserError as error:
            found = error
        yield index, found


def several_at_once(
    base: FrozenBase, prepare: Prepare, prompts: Sequence[Prompt], requests: Sequence[Request], batch_size: int
) -> Iterator[Done]:
    """Up to `batch_size` texts share the base's forwards; results come as they are done."""
    streams: dict[int, Stream] = {}

    def begin(index: int) -> Decoding:
        read, streams[index] = prepare(prompts[index], requests[index])
        return read()

    texts = ((index, partial(begin, index)) for index in range(len(prompts)))
    for index, step in run_together(base, texts, min(batch_size, len(prompts))):
        if isinstance(step, UserError):
            yield index, step
            continue
        streams[index].add(step)
        if step.finish_reason is not None:
            yield index, streams.pop(index).result


def in_order(done: Iterable[Done]) -> Iterator[Result]:
    """The results in the order of the prompts, each as soon as it and all before it are there. A UserError is raised
    when its turn comes."""
    early: dict[int, Result | UserError] = {}
    following = 0
    for index, found in done:
        early[index] = found
        while following in early:
            result = early.pop(following)
            if isinstance(result, UserError):
                raise result
            yield result
            following += 1
