"""What one call asks for: the sampling settings, and how to draft, verify and stop. One schema for Python and shell.

Knows: every option, its default, its help text, and which of them contradict each other. Refuses to know models: what
depends on the heads or the base is checked where these are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from decode.lookup import MOST_DRAFTS
from decode.tree_shape import TREE_RULE, TreeShape
from mtp.errors import UserError
from mtp.sampling import SamplingConfig, check_seed, option
from mtp.suggest import did_you_mean
from mtp.verify import check_rule


@dataclass(frozen=True, kw_only=True)
class Request(SamplingConfig):
    """Settings of one decoding; the defaults are greedy decoding with all the drafts the heads were trained for."""

    max_new_tokens: int = option(128, "most tokens to generate per prompt; the base's context may end it earlier")
    seed: int | None = option(None, "makes the draws repeatable; each prompt starts from it")
    draft_length: int | Literal["auto"] | None = option(
        None, "K; default: what was trained; 0 decodes plainly; auto: the fastest, chosen anew in every step"
    )
    verify: str | None = option(
        None, "acceptance rule: block (default), token, match or lossy-typical (not exact); greedy at temperature 0"
    )
    reproducible: bool = option(
        False, "draws depend on seed and position only: the same text for every K, all heads, or none; rule: match"
    )
    tree: str | None = option(
        None, "several drafts per position: 3,2,1 (children per level) or dynamic:16 (the 16 likeliest nodes)"
    )
    draft_temperature: float | None = option(None, "temperature of q alone; changes speed, never the output's law")
    draft_min_confidence: float = option(0.0, "draft no further once the largest q is below this; 0 is off")
    draft_max_entropy: float | None = option(None, "draft no further once the entropy of q exceeds this, in nats")
    draft_min_prob: float = option(0.0, "draft no further behind a draft whose q is below this; 0 is off")
    lookup: int = option(
        0, "draft up to so many tokens that followed the text's last ones earlier in it, heads or none; 0 is off"
    )
    stop: tuple[str, ...] = option((), "texts that end generation")
    stop_ids: tuple[int, ...] = option((), "token ids that end generation, besides the base's own")
    ignore_eos: bool = option(False, "go on after an end-of-sequence token")
    bad_words: tuple[str, ...] = option((), "texts that must not be generated")
    logprobs: bool = option(False, "log-probabilities of the committed tokens under the base, before any processor")
    chat: bool = option(True, "put a prompt into the chat template, if the base has one")
    stop_when: Callable[[Sequence[int]], bool] | None = option(
        None, "called with all committed ids after each; True ends the text", python_only=True
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            if isinstance(item.default, tuple):
                object.__setattr__(self, item.name, _as_tuple(getattr(self, item.name)))
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        self._validate_numbers()
        if self.verify is not None:
            check_rule(self.verify)
        if self.verify == "greedy" and not self.greedy:
            raise UserError(f"--verify is greedy, but --temperature is {self.temperature}; use 0, or another rule.")
        self._validate_reproducible()
        self._validate_drafting()
        self._validate_lookup()
        if self.tree is not None:
            self._validate_tree()

    def _validate_numbers(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens is {self.max_new_tokens}; use at least 1.")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"--min-new-tokens is {self.min_new_tokens}, but --max-new-tokens is {self.max_new_tokens}; use less."
            )
        if isinstance(self.draft_length, str) and self.draft_length != "auto":
            raise UserError(f"--draft-length is {self.draft_length!r}; use auto, 0 (off) or a positive number.")
        if isinstance(self.draft_length, int) and self.draft_length < 0:
            raise UserError(f"--draft-length is {self.draft_length}; use auto, 0 (off) or a positive number.")
        if self.seed is not None:
            check_seed(self.seed)
        if any(token < 0 for token in self.stop_ids):
            raise UserError(f"--stop-ids is {min(self.stop_ids)}; use token ids, from 0 on.")

    def _validate_reproducible(self) -> None:
        if not self.reproducible:
            return
        if self.verify not in (None, "match", "greedy"):
            raise UserError(f"--reproducible decides by match, but --verify is {self.verify}; leave one of them out.")
        if self.seed is None and not self.greedy:
            raise UserError("--reproducible needs a seed to reproduce; give --seed.")

    def _validate_drafting(self) -> None:
        heat = self.draft_temperature
        if heat is not None and not (heat == 0 or 1e-30 <= heat <= 1e30):
            raise UserError(
                f"--draft-temperature is {heat}; use 0 (the likeliest draft) or a positive number, 1e-30 to 1e+30."
            )
        if heat is not None and self.greedy:
            raise UserError(
                f"--draft-temperature is {heat}, but at --temperature 0 only the likeliest draft can be kept; leave "
                "it out, or set --temperature."
            )
        for name, value, top in (
            ("--draft-min-confidence", self.draft_min_confidence, 1.0),
            ("--draft-min-prob", self.draft_min_prob, 1.0),
            ("--draft-max-entropy", self.draft_max_entropy or 0.0, math.inf),
        ):
            if not 0 <= value <= top:
                raise UserError(f"{name} is {value}; use a number from 0 to {top:g}.")

    def _validate_lookup(self) -> None:
        if not 0 <= self.lookup <= MOST_DRAFTS:
            raise UserError(f"--lookup is {self.lookup}; use a number from 0 (off) to {MOST_DRAFTS}.")
        if self.lookup and self.tree is not None:
            raise UserError(
                f"--lookup is {self.lookup}, but --tree is {self.tree}, and what is looked up is a chain; leave one of "
                "them out."
            )

    def _validate_tree(self) -> None:
        assert self.tree is not None
        TreeShape.parse(self.tree)
        if self.draft_length == 0:
            raise UserError(f"--tree is {self.tree}, but --draft-length is 0, which drafts nothing; leave one out.")
        if self.draft_length == "auto":
            raise UserError(f"--tree is {self.tree}, which has a size of its own; leave out --draft-length auto.")
        if self.adaptive:
            raise UserError(
                f"--tree is {self.tree}, which has a size of its own; leave out --draft-min-confidence, "
                "--draft-max-entropy and --draft-min-prob."
            )
        if self.verify == "lossy-typical":
            raise UserError("--verify lossy-typical judges chains only; leave out --tree, or use another rule.")

    @property
    def rule(self) -> str:
        """The rule for chains that really judges: at temperature 0 all of them are greedy."""
        if self.greedy:
            return "greedy"
        return "match" if self.reproducible else self.verify or "block"

    @property
    def reported_rule(self) -> str:
        """The name of the rule in statistics, which for a tree is another one."""
        return self.rule if self.tree is None or self.greedy else TREE_RULE[self.rule]

    @property
    def adaptive(self) -> bool:
        """Whether K may end early in a step."""
        return self.draft_min_confidence > 0 or self.draft_min_prob > 0 or self.draft_max_entropy is not None

    @property
    def drafting(self) -> SamplingConfig:
        """The settings that q goes through: the request's, but for its temperature.

        The nodes of a tree are chosen by the order of q, and K by how sure it is, neither of which greedy q would show.
        """
        if self.greedy and (self.tree is not None or self.adaptive):
            return SamplingConfig(temperature=1.0)
        if self.draft_temperature is None:
            return self
        heat = self.draft_temperature
        return replace(self, temperature=heat, draft_temperature=None, reproducible=False, verify=None)


def make_request(options: Mapping[str, Any]) -> Request:
    """A Request from names and values. An unknown name is a UserError with the nearest one."""
    known = sorted(item.name for item in fields(Request))
    for name in options:
        if name not in known:
            raise UserError(f"{name!r} is no option of decoding; {did_you_mean(name, known)}")
    return Request(**options)


def _as_tuple(value: Any) -> Any:
    """Lists as tuples, also inside; one text or number as a tuple of it, and None as an empty one."""
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(_as_tuple(item) if isinstance(item, (list, tuple)) else item for item in value)
