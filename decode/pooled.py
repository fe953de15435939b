"""The next chains of several texts, drafted side by side: heads are asked for a position of all of them at once.

Knows: that a text which stops drafting early leaves the others to it, and that one whose processors fail has its error
in place of a chain. Refuses to know: the base, what is kept, and how a single chain is drafted.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from decode.chain import Chain, Chaining, copy_chain, grow_chain
from decode.drafters import Drafter, draft_together, ingest_together
from decode.engine import Decoding, Plan
from mtp.errors import UserError


def propose_together(texts: Sequence[Decoding]) -> list[Chain | UserError]:
    """What `Decoding.propose` gives for each, without trees."""
    found: dict[int, Chain | UserError] = {}
    plans: dict[int, Plan] = {}
    for index, text in enumerate(texts):
        try:
            plans[index] = text.plan()
        except UserError as error:
            found[index] = error
    news = [texts[index] for index, plan in plans.items() if plan.count and texts[index].waiting]
    ingest_together([(text.drafter, *text.take_waiting()) for text in news if text.drafter is not None])
    chains = {index: grow_chain(plan.given, plan.count) for index, plan in plans.items() if not plan.copied}
    found |= grow_together(chains, {index: plan.given.drafter for index, plan in plans.items()})
    found |= {index: copy_chain(plan.given, plan.copied) for index, plan in plans.items() if plan.copied}
    return [found[index] for index in range(len(texts))]


def grow_together(
    growing: Mapping[int, Chaining], drafters: Mapping[int, Drafter | None]
) -> dict[int, Chain | UserError]:
    """Drive chains to their ends, each by its own drafter: a position of all of them, then the next."""
    found: dict[int, Chain | UserError] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(growing)
    while answers:
        asked: dict[int, tuple[int, Tensor]] = {}
        for index, logits in answers.items():
            try:
                asked[index] = growing[index].send(logits)  # type: ignore[arg-type]  # None starts it
            except StopIteration as done:
                found[index] = done.value
            except UserError as error:
                found[index] = error
        pairs = [(drafters[index], *one) for index, one in asked.items()]
        drafts = draft_together([(drafter, k, previous) for drafter, k, previous in pairs if drafter is not None])
        answers = dict(zip(asked, drafts, strict=True))
    return found
