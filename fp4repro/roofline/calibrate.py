"""Fitting the factors on the published rows marked `fit`, and comparing with those held out.

Rows are entries of `configs/published.yaml` with a `case`. Two fits, both least squares of
log(predicted / published): the four factors of products and passes on single products of one GPU,
then `step` on four steps of one model. Held-out rows are never seen by either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from fp4repro.config import MODELS
from fp4repro.errors import Fp4ReproError
from fp4repro.models import ModelConfig
from fp4repro.recipes import KeepBF16, Recipe
from fp4repro.report.published import Published, load_published
from fp4repro.roofline.devices import device
from fp4repro.roofline.factors import Factors
from fp4repro.roofline.gemm import Gemm
from fp4repro.roofline.linears import block_linears
from fp4repro.roofline.passes import SLOTS_OF, Pass, quantisation
from fp4repro.roofline.recipes import speed_recipe
from fp4repro.roofline.step import Setting, step

PUBLISHED = MODELS.parent / "published.yaml"
FIT, HELD_OUT = "fit", "held-out"
GEMM, STEP = "gemm", "step"
START = Factors(math_bf16=0.6, math_fp8=0.6, math_fp4=1.2, passes=0.5)
_SETTING = ("sequence", "microbatch", "batch", "gpus", "tp", "pp", "vp", "cp")


@dataclass(frozen=True)
class Check:
    """A published row beside the model's prediction; `error` is predicted / published - 1."""

    entry: Published
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.entry.value - 1

    @property
    def role(self) -> str:
        return self.entry.case["role"]


@cache
def model_config(name: str) -> ModelConfig:
    """A model of configs/models by its file's name."""
    known = sorted(path.stem for path in MODELS.glob("*.yaml"))
    if name not in known:
        raise Fp4ReproError(f"there is no model {name!r} in configs/models, which has: {', '.join(known)}")
    return ModelConfig.from_yaml(MODELS / f"{name}.yaml")


def cases(path: Path = PUBLISHED) -> list[Published]:
    """The published rows that the model predicts."""
    return [entry for entry in load_published(path) if entry.case]


def recipe_of(case: dict) -> Recipe:
    """The recipe that a row was measured with: its own layers in BF16, which default to none."""
    first, last = case.get("keep", (0, 0))
    return speed_recipe(case["recipe"], KeepBF16(first=2 * first, last=2 * last))  # two blocks a layer


def predict(entry: Published, factors: Factors) -> float:
    """What the model says of a row, in the row's unit."""
    case = entry.case
    if case["kind"] == GEMM:
        return 1e3 * _gemm_seconds(case, factors)
    setting = Setting(**{name: case[name] for name in _SETTING if name in case})
    config = model_config(case["model"])
    predicted = step(config, recipe_of(case), device(case["device"]), factors, setting)
    return predicted.tokens_per_second if entry.unit == "tokens/s" else predicted.tflops


def _gemm_seconds(case: dict, factors: Factors) -> float:
    keys = ("model", "recipe", "device", "tokens", "part", "quantised")
    on = device(case["device"])
    return sum(kernel.seconds(on, factors) for kernel in _kernels(*(case[key] for key in keys)))


@cache
def _kernels(
    model: str, recipe_name: str, on: str, tokens: int, part: str, quantised: bool
) -> tuple[Gemm | Pass, ...]:
    """Products of one layer; with quantisation as Transformer Engine times it: every product as a
    forward of its shape, whose input gets both orientations and whose weight gets one."""
    config, recipe = model_config(model), speed_recipe(recipe_name)
    product, _, wanted = part.partition(".")
    linears = [linear for kind in ("attention", "ffn") for linear in block_linears(config, kind)]
    kernels: list[Gemm | Pass] = []
    for linear in linears:
        if wanted and linear.name != wanted:
            continue
        gemm = next(g for g in linear.gemms(tokens, recipe) if g.product == product)
        kernels.append(gemm)
        if quantised:
            kernels += quantisation(recipe, SLOTS_OF["x"], gemm.m * gemm.k, device(on))
            kernels += quantisation(recipe, SLOTS_OF["w"], gemm.n * gemm.k, device(on), transposed=False)
    return tuple(kernels)


def fit(entries: Sequence[Published], start: Factors = START) -> Factors:
    """The factors that fit the rows marked `fit`."""
    rows = [entry for entry in entries if entry.case["role"] == FIT]
    gemms = [entry for entry in rows if entry.case["kind"] == GEMM]
    steps = [entry for entry in rows if entry.case["kind"] == STEP]
    factors = _least_squares(gemms, start, ("math_bf16", "math_fp8", "math_fp4", "passes"))
    return _least_squares(steps, factors, ("step",))


def _least_squares(rows: Sequence[Published], start: Factors, names: Sequence[str]) -> Factors:
    if len(rows) < len(names):
        raise Fp4ReproError(
            f"{len(rows)} published rows are marked fit, too few for {', '.join(names)}: mark more"
        )

    def residuals(logs: np.ndarray) -> np.ndarray:
        factors = replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.array([np.log(predict(entry, factors) / entry.value) for entry in rows])

    begin = np.log([getattr(start, name) for name in names])
    found = least_squares(residuals, begin, diff_step=1e-3)
    return replace(start, **dict(zip(names, np.exp(found.x).tolist(), strict=True)))


@cache
def fitted() -> Factors:
    """The factors of `configs/published.yaml`."""
    return fit(cases())


def checks(entries: Sequence[Published], factors: Factors) -> list[Check]:
    """Every row with its prediction."""
    return [Check(entry, predict(entry, factors)) for entry in entries]


def median_error(found: Sequence[Check]) -> float:
    """Median of the absolute errors."""
    return float(np.median([abs(check.error) for check in found]))
