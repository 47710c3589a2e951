"""The four speed-ups that are easily mixed up, and the linears that lose by FP4.

    peak         data-sheet rates of the two formats' units: a bound, no result
    kernel       the products of the linears that the recipe quantises, operands ready
    quantised    the same with the passes that quantise the operands
    end to end   the whole training step, each recipe with its own layers in BF16

Each is the baseline's time over the recipe's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fp4repro.models import ModelConfig
from fp4repro.models.config import KINDS
from fp4repro.recipes import Recipe
from fp4repro.roofline.devices import Device
from fp4repro.roofline.factors import Factors
from fp4repro.roofline.gemm import operand_class
from fp4repro.roofline.linears import Linear, block_linears, format_of, quantised_blocks
from fp4repro.roofline.passes import seconds_by_tensor
from fp4repro.roofline.step import Setting, step

# Token counts among which the break-even is looked for.
TOKENS = tuple(2**n for n in range(7, 18))


@dataclass(frozen=True)
class Speedups:
    """See the module docstring."""

    peak: float
    kernel: float
    quantised: float
    end_to_end: float


@dataclass(frozen=True)
class LinearGain:
    """One linear's three products with their passes; `break_even`: the fewest of `TOKENS` from which
    on the recipe is faster, None where it never is."""

    linear: Linear
    gain: float
    break_even: int | None


def linear_seconds(
    linear: Linear, tokens: int, recipe: Recipe, on: Device, factors: Factors, microbatches: int = 1
) -> tuple[float, float]:
    """Seconds of a linear's three products, and of the passes that quantise their operands."""
    products = sum(g.seconds(on, factors) for g in linear.gemms(tokens, recipe))
    passes = seconds_by_tensor(recipe, linear.values(tokens), on, factors)
    passes["w"] /= microbatches
    return products, sum(passes.values())


def quantised_linears(config: ModelConfig, recipe: Recipe, tp: int = 1) -> list[Linear]:
    """Every linear that the recipe quantises, one entry for each time it stands in the model."""
    rule = quantised_blocks(config, recipe)
    kinds = [KINDS[letter] for letter, swapped in zip(config.pattern, rule, strict=True) if swapped]
    return [linear for kind in kinds for linear in block_linears(config, kind, tp)]


def speedups(
    config: ModelConfig, recipe: Recipe, baseline: Recipe, on: Device, factors: Factors, setting: Setting
) -> Speedups:
    """Of the recipe over the baseline."""
    products, passes = [0.0, 0.0], [0.0, 0.0]
    for linear in quantised_linears(config, recipe, setting.tp):
        for i, r in enumerate((recipe, baseline)):
            p, q = linear_seconds(linear, setting.tokens, r, on, factors, setting.microbatches)
            products[i] += p
            passes[i] += q
    steps = [step(config, r, on, factors, setting).seconds for r in (recipe, baseline)]
    operands = [operand_class(format_of(r, "fprop")) for r in (recipe, baseline)]
    if not products[0]:  # nothing is quantised
        return Speedups(on.peak_ratio(*operands), 1.0, 1.0, steps[1] / steps[0])
    return Speedups(
        on.peak_ratio(*operands),
        products[1] / products[0],
        (products[1] + passes[1]) / (products[0] + passes[0]),
        steps[1] / steps[0],
    )


def linear_gains(
    config: ModelConfig, recipe: Recipe, baseline: Recipe, on: Device, factors: Factors, setting: Setting
) -> list[LinearGain]:
    """Each distinct linear that the recipe quantises, in the model's order."""

    def gain(linear: Linear, tokens: int) -> float:
        times = [linear_seconds(linear, tokens, r, on, factors) for r in (recipe, baseline)]
        return sum(times[1]) / sum(times[0])

    distinct = dict.fromkeys(quantised_linears(config, recipe, setting.tp))
    return [
        LinearGain(found, gain(found, setting.tokens), _break_even([gain(found, t) for t in TOKENS]))
        for found in distinct
    ]


def _break_even(gains: Sequence[float]) -> int | None:
    """The first of `TOKENS` from which every gain is above one."""
    losing = [i for i, g in enumerate(gains) if g <= 1]
    first = losing[-1] + 1 if losing else 0
    return TOKENS[first] if first < len(TOKENS) else None
