"""What storing AdamW's moments in 4 bits does: to the states, to the next update, to a training run.

States come from a tiny model trained with FP32 AdamW. Each is encoded and decoded once; then one more step
is taken from it. `update error` is |u' - u| / |u| of a matrix, `inflation` the largest factor by which an
element's denominator shrank, so that its step grew. The error of v alone is no measure: stored directly it
has a small one, and training diverges (the second half of the table).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from fp4repro.fullstack import tiny_lm
from fp4repro.fullstack.rivals import RIVALS, rival
from fp4repro.fullstack.tiny_lm import Setup
from fp4repro.optim.buckets import MOMENTS
from fp4repro.optim.codecs import decode_matrix, encode_matrix
from fp4repro.optim.nvfp4_adamw import why_fp32
from fp4repro.recipes.optimizer import (
    ADAMW,
    FIRST_MOMENTS,
    SECOND_MOMENTS,
    OptimizerRecipe,
    StateCodec,
)
from fp4repro.report import optimizer_tables as names
from fp4repro.report.schema import NOT_RUN

RECOMMENDED = "sqrt-mean-hadamard-floor"


@dataclass(frozen=True)
class States:
    """Moments of one matrix and the gradient that comes next; float32 (rows, columns) each."""

    m: Tensor
    v: Tensor
    g: Tensor


@dataclass(frozen=True)
class Fidelity:
    """Of one matrix: relative squared error of v, relative error of the next update, largest inflation."""

    mse: float
    update: float
    inflation: float


def through(x: Tensor, codec: StateCodec) -> Tensor:
    """x (rows, columns) encoded and decoded."""
    noise = torch.zeros(2, dtype=torch.int32)
    return decode_matrix(encode_matrix(x, codec, noise), codec, x.shape)


def fidelity(states: States, codec: StateCodec, setup: Setup) -> Fidelity:
    """Of a second moment's codec. Bias corrections are taken as 1."""
    beta1, beta2 = setup.betas
    stored = through(states.v, codec)
    m = beta1 * states.m + (1 - beta1) * states.g

    def denominator(v: Tensor) -> Tensor:
        return (beta2 * v + (1 - beta2) * states.g.square()).sqrt() + setup.eps

    exact, ours = denominator(states.v), denominator(stored)
    update, error = m / exact, m / ours - m / exact
    return Fidelity(
        mse=float((stored - states.v).square().sum() / states.v.square().sum()),
        update=float(error.norm() / update.norm()),
        inflation=float((exact / ours).max()),
    )


def trained_states(setup: Setup, seed: int) -> list[States]:
    """States before the last step of an FP32 run, with that step's gradients."""
    found: list[States] = []
    before: dict[int, tuple[Tensor, Tensor]] = {}
    done = [0]

    def after(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        done[0] += 1
        for p in tiny_lm.matrices(net):
            moments = tuple(optimizer.state[p][name] for name in MOMENTS)
            if done[0] == setup.steps and not why_fp32(p, SECOND_MOMENTS.values()):
                found.append(States(*before[id(p)], p.grad.clone()))
            before[id(p)] = tuple(t.clone() for t in moments) if done[0] == setup.steps - 1 else ()

    tiny_lm.run(setup, ADAMW, seed, after)
    return found


def recipes() -> dict[str, OptimizerRecipe]:
    """What is trained, by name: each codec of either moment alone, then both."""
    alone = {f"v-{name}": ADAMW.replace(second=codec) for name, codec in SECOND_MOMENTS.items()}
    alone |= {f"m-{name}": ADAMW.replace(first=codec) for name, codec in FIRST_MOMENTS.items()}
    fp32 = alone.pop("v-fp32")
    del alone["m-fp32"]
    both = OptimizerRecipe(first=FIRST_MOMENTS["nvfp4"], second=SECOND_MOMENTS[RECOMMENDED])
    return {"fp32": fp32, **alone, "both": both}


def figures(
    setup: Setup, seeds: tuple[int, ...], trained: tuple[str, ...]
) -> Iterator[tuple[str, str, float | None, str]]:
    """Setting, metric, value (None where there is none) and note; `trained` names recipes."""
    states = trained_states(setup, seeds[0])
    note = f"{len(states)} matrices after {setup.steps - 1} steps of FP32 AdamW"
    for name, codec in SECOND_MOMENTS.items():
        if codec is not None:
            yield from _state_figures(f"v-{name}", [fidelity(s, codec, setup) for s in states], note)
            yield f"v-{name}", names.BITS, codec.bits, "the tensor's FP32 amax left out"
    for name, codec in FIRST_MOMENTS.items():
        if codec is not None:
            yield f"m-{name}", names.BITS, codec.bits, "the tensor's FP32 amax left out"
    known = recipes()
    for seed in seeds:
        for name in trained:
            yield from _training_figures(f"{name}/seed-{seed}", tiny_lm.run(setup, known[name], seed), setup)
        for name in RIVALS:
            make, why_not = rival(name, setup)
            if make is None:
                yield f"{name}/seed-{seed}", names.VALIDATION_LOSS, None, NOT_RUN + why_not
            else:
                yield from _training_figures(f"{name}/seed-{seed}", tiny_lm.run(setup, make, seed), setup)


def _state_figures(setting: str, found: list[Fidelity], note: str) -> Iterator[tuple[str, str, float, str]]:
    yield setting, names.MSE_V, median(f.mse for f in found), f"median over {note}"
    yield setting, names.UPDATE_ERROR, median(f.update for f in found), f"median over {note}"
    yield setting, names.WORST_UPDATE_ERROR, max(f.update for f in found), f"worst of {note}"
    yield setting, names.INFLATION, max(f.inflation for f in found), f"largest in {note}"


def _training_figures(
    setting: str, outcome: tiny_lm.Outcome, setup: Setup
) -> Iterator[tuple[str, str, float | None, str]]:
    note = (
        outcome.diverged or f"{setup.steps} steps of {setup.batch * setup.context} bytes, width {setup.width}"
    )
    yield setting, names.VALIDATION_LOSS, outcome.validation, note
    yield setting, names.LARGEST_LOSS, outcome.largest_later, note
