"""How long training takes: what was measured so far, and what is left of it.

Knows: seconds per optimiser step and per validation, and how to say a time. Refuses to know: what a step is made of,
and who shows it.
"""

import math
import time

SETTLE = 1  # steps at the start that are not counted: they fill caches and build kernels
SURE = 3  # counted steps after which the rate is told


class Pace:
    """A clock for steps and validations. `guess`: seconds per step before any was measured."""

    def __init__(self) -> None:
        self.guess: float | None = None
        self.steps = 0
        self._counted, self._seconds, self._validations, self._validating = 0, 0.0, 0, 0.0
        self._since = time.monotonic()

    def begin(self) -> None:
        """What follows is training."""
        self._since = time.monotonic()

    def stepped(self) -> None:
        """One optimiser step is done."""
        now = time.monotonic()
        if self.steps >= SETTLE:
            self._counted, self._seconds = self._counted + 1, self._seconds + now - self._since
        self.steps, self._since = self.steps + 1, now

    def validated(self, seconds: float) -> None:
        """One validation took so long."""
        self._validations, self._validating = self._validations + 1, self._validating + seconds
        self.begin()

    @property
    def sure(self) -> bool:
        """Whether enough steps were measured to tell the rate."""
        return self._counted >= SURE

    @property
    def per_step(self) -> float | None:
        """Seconds of a step: measured, or else guessed."""
        return self._seconds / self._counted if self._counted else self.guess

    @property
    def per_validation(self) -> float | None:
        """Seconds of a validation; None before the first."""
        return self._validating / self._validations if self._validations else None

    def left(self, steps: float, validations: float) -> float | None:
        """Seconds for so many steps and validations; None before a step is known, infinite without an end."""
        if self.per_step is None:
            return None
        return steps * self.per_step + (validations * (self.per_validation or 0.0) if validations else 0.0)


def in_words(seconds: float) -> str:
    """A duration, to two figures: `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(seconds):
        return "no end"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
