"""Does a measured difference support a published claim? The rules.

The difference d is 100 * (loss - loss of the other) / loss of the other, of pairs of runs, in per cent.
The smallest difference of interest, the margin, is a sixth of the whole recipe's own gap to BF16 under
the same protocol: 0.25 % where that gap is the paper's 1.5 %, and MARGIN where it was not measured.
docs/ablations.md tells how the rules came about.

worse     supported: the 95 % interval of d lies above 0 and reaches the margin or beyond; not supported:
          it lies below the margin, so whatever is there is too small to matter; undecided otherwise
better    the mirror image
same      supported: the 90 % interval lies within +-margin (two one-sided tests at 5 %); not supported: the
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

MARGIN_SHARE = 1 / 6  # of the whole recipe's gap
MARGIN = MARGIN_SHARE * 1.5  # per cent of the loss, for the paper's gap of 1.5 %
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


def margin_for(gap: float | None) -> float:
    """The smallest difference of interest beside this gap of the whole recipe to BF16, in per cent."""
    return MARGIN_SHARE * gap if gap and gap > 0 else MARGIN


def verdict(expect: Expectation, d: Difference, margin: float = MARGIN) -> Verdict:
    """The module's rules on one difference."""
    if expect == "diverges":
        if d.runs and 2 * d.diverged > d.runs:
            return "supported"
        refuted = not d.diverged and verdict("worse", d, margin) == "not supported"
        return "not supported" if refuted else "undecided"
    if expect == "worse" and d.runs and 2 * d.diverged > d.runs:
        return "supported"  # nothing is worse than to diverge
    if expect == "better":
        return verdict("worse", Difference(d.negative.mean, d.n, d.spread), margin)
    ends = d.interval()
    if ends is None:
        return "undecided"
    low, high = ends
    if expect == "worse":
        if high < margin:
            return "not supported"
        return "supported" if low > 0 else "undecided"
    inner_low, inner_high = d.interval(0.90)
    if inner_low > -margin and inner_high < margin:
        return "supported"
    return "not supported" if low > 0 or high < 0 else "undecided"
