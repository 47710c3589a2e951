"""Does a measured difference support a published claim? The rules, fixed before anything was measured.

The difference d is 100 * (loss - loss of the other) / loss of the other, of pairs of runs, in per cent.
MARGIN is the smallest difference of interest: a quarter of a per cent of the loss, a sixth of the gap of
1.5 % at which the paper calls its recipe comparable to the baseline.

worse     supported: the 95 % interval of d lies above 0 and reaches MARGIN or beyond; not supported: it
          lies below MARGIN, so whatever is there is too small to matter; undecided otherwise
better    the mirror image
same      supported: the 90 % interval lies within +-MARGIN (two one-sided tests at 5 %); not supported: the
          95 % interval excludes 0 and the 90 % interval is not within; undecided otherwise
diverges  supported: more than half of the runs diverged; not supported: none did and, by the rule for
          `worse`, the loss is not worse either; undecided otherwise, since a short run cannot
          rule out that a longer one diverges

Without two seeds in the spread nothing is decided.
"""

from dataclasses import dataclass
from typing import Literal

from fp4repro.ablations import Expectation
from fp4repro.report.stats import Spread

MARGIN = 0.25  # per cent of the loss
Verdict = Literal["supported", "not supported", "undecided"]


@dataclass(frozen=True)
class Difference:
    """What was measured: the mean difference of `n` pairs, their spread, and runs that diverged."""

    mean: float | None  # None where no pair ended
    n: int
    spread: Spread | None
    diverged: int = 0  # of the entry's runs
    runs: int = 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        if self.mean is None or self.spread is None:
            return None
        return self.spread.interval(self.mean, self.n, confidence)

    @property
    def negative(self) -> "Difference":
        mean = None if self.mean is None else -self.mean
        return Difference(mean, self.n, self.spread, self.diverged, self.runs)


def verdict(expect: Expectation, d: Difference) -> Verdict:
    """The module's rules on one difference."""
    if expect == "diverges":
        if d.runs and 2 * d.diverged > d.runs:
            return "supported"
        refuted = not d.diverged and verdict("worse", d) == "not supported"
        return "not supported" if refuted else "undecided"
    if expect == "worse" and d.runs and 2 * d.diverged > d.runs:
        return "supported"  # nothing is worse than to diverge
    if expect == "better":
        return verdict("worse", Difference(d.negative.mean, d.n, d.spread))
    ends = d.interval()
    if ends is None:
        return "undecided"
    low, high = ends
    if expect == "worse":
        if high < MARGIN:
            return "not supported"
        return "supported" if low > 0 else "undecided"
    inner_low, inner_high = d.interval(0.90)
    if inner_low > -MARGIN and inner_high < MARGIN:
        return "supported"
    return "not supported" if low > 0 or high < 0 else "undecided"
