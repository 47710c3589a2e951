"""How many more tokens a format needs to reach another's loss (arXiv 2509.25149, section 5: MXFP4 1.36).

Each seed's final losses at several token factors are fitted by a line in the logarithm of the factor;
where it crosses the other format's loss at factor 1 is that seed's factor. The interval is Student's t
over seeds, of the logarithm. A factor beyond those that ran is extrapolated, and the note says so.
"""

import math
from collections.abc import Mapping

import numpy as np

from fp4repro.errors import Fp4ReproError
from fp4repro.report.stats import Estimate, estimate


def token_factor(losses: Mapping[float, Mapping[int, float]], target: Mapping[int, float]) -> Estimate:
    """`losses` by token factor and seed, `target` by seed; the seeds that have all of them count."""
    seeds = sorted(set(target).intersection(*losses.values()))
    if len(losses) < 2 or not seeds:
        raise Fp4ReproError("a token factor needs runs of two lengths and the target, of the same seed")
    factors = np.log(list(losses))
    crossings = []
    for seed in seeds:
        slope, level = np.polyfit(factors, [losses[f][seed] for f in losses], 1)
        if slope >= 0:
            raise Fp4ReproError(
                f"the loss of seed {seed} does not fall with more tokens: no factor reaches it"
            )
        crossings.append(float((target[seed] - level) / slope))
    found = estimate(crossings)
    ends = [None if end is None else math.exp(end) for end in (found.low, found.high)]
    return Estimate(math.exp(found.mean), *ends, found.n)
