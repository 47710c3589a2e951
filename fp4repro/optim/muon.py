"""Muon and ROOT: hidden matrices by Newton-Schulz in NVFP4, every other parameter by NVFP4AdamW.

    M = mu M + (1 - mu) g;   N = (1 - mu) g + mu M (Nesterov);   B = clip(N, +-q);   O = NS(B)
    W = (1 - lr decay) W - lr s O,  s such that the update's root mean square is `rms` (Moonshot's 0.2)

The clip is ROOT's: N less its soft threshold at the quantile q of |N| (arXiv 2511.20626). The momentum may
be stored in NVFP4. Since a blown-up iteration looks like a larger learning rate, `watch` keeps each
update's root mean square and its cosine to what Newton-Schulz in FP32 would have given. Of a sharded matrix
(FSDP2) each rank keeps its part of the momentum; the whole is gathered, and every rank iterates it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4repro.core.quantize import quantize
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import Fp4ReproError
from fp4repro.optim.newton_schulz import GEMMS, Trace, bf16_gemm, coefficients, newton_schulz
from fp4repro.optim.nvfp4_adamw import NVFP4AdamW, with_gradients
from fp4repro.optim.shards import (
    gathered,
    groups_of,
    largest_of,
    local,
    number_of,
    part_of,
    sharded_axes,
)
from fp4repro.recipes.optimizer import BLOCK, NVFP4_MUON, OptimizerRecipe

MOMENTUM = "momentum"


@dataclass(frozen=True)
class Update:
    """One matrix's last update: before scaling, `rms` and `rms_fp32` are of the two iterations' outputs."""

    name: str
    rms: float
    rms_fp32: float
    cosine: float
    guard_hits: int


def soft_threshold(m: Tensor, at: Tensor | float) -> Tensor:
    """sign(m) max(|m| - at, 0)."""
    return m.sign() * (m.abs() - at).clamp_min(0)


def clip_to_quantile(m: Tensor, quantile: float) -> Tensor:
    """m less its soft threshold at that quantile of |m|: every element cut to +- it."""
    magnitudes = m.abs().flatten()
    rank = max(1, math.ceil(quantile * magnitudes.numel()))  # torch.quantile stops at 2**24 elements
    return m - soft_threshold(m, magnitudes.kthvalue(rank).values)


class NVFP4Muon(NVFP4AdamW):
    """Groups with `muon=True` hold matrices for Muon; the others go to AdamW with `recipe`'s codecs.

    `guard_hits` counts over the run; with `watch` set, `updates` holds an `Update` for each matrix.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        recipe: OptimizerRecipe = NVFP4_MUON,
        seed: int = 0,
        watch: bool = False,
    ) -> None:
        self.recipe = recipe
        self.watch = watch
        self.guard_hits = 0
        self.updates: list[Update] = []
        super().__init__(
            params, lr, betas, eps, weight_decay, first=recipe.first, second=recipe.second, seed=seed
        )
        coefficients(recipe.schedule, (1, 1))  # an unknown name is refused now
        for group in self.param_groups:
            for p in group["params"] if group.setdefault("muon", False) else ():
                if p.ndim != 2:
                    raise Fp4ReproError(
                        f"Muon takes matrices, but a parameter of its group has shape {tuple(p.shape)}: "
                        "put it into a group without muon=True"
                    )

    def _step_group(self, number: int, group: dict) -> None:
        if not group["muon"]:
            super()._step_group(number, group)
            return
        if number == self._first_muon_group():
            self.updates = []
        names = {id(p): name for name, p in self.named()}
        for place, p in enumerate(with_gradients(group)):
            self._step_matrix(group, p, names[id(p)], layer=1000 * number + place)

    def _begin_group(self, number: int, group: dict) -> None:
        if not group["muon"]:
            super()._begin_group(number, group)
            return
        for p in group["params"]:
            if not self.state[p]:
                zeros = torch.zeros_like(local(p), dtype=torch.float32)
                momentum = self.store_momentum(zeros, p, RandomKey(self.seed, 0, 0))
                self.state[p] |= {"step": 0, MOMENTUM: momentum}

    def row(self, p: Tensor, moment: str, field: str) -> int:
        if moment != MOMENTUM:
            return super().row(p, moment, field)
        columns = p.shape[1]
        return {"values": columns, "codes": columns // 2, "scales": columns // BLOCK, "amax": 0}[field]

    def _first_muon_group(self) -> int:
        return next(i for i, group in enumerate(self.param_groups) if group["muon"])

    def _step_matrix(self, group: dict, p: Tensor, name: str, layer: int) -> None:
        recipe, state, g = self.recipe, self.state[p], local(p.grad).float()
        state["step"] = step = state.get("step", 0) + 1
        m = self._load(state[MOMENTUM], p) if MOMENTUM in state else torch.zeros_like(g)
        m.lerp_(g, 1 - recipe.momentum)
        state[MOMENTUM] = self.store_momentum(m, p, RandomKey(self.seed, step, layer))
        b = gathered(g.lerp(m, recipe.momentum) if recipe.nesterov else m, p)
        if recipe.clip_quantile is not None:
            b = clip_to_quantile(b, recipe.clip_quantile)
        trace = Trace()
        steps = coefficients(recipe.schedule, p.shape)
        last = bf16_gemm if recipe.last_step_bf16 else None
        o = newton_schulz(b, steps, GEMMS[recipe.gemm], recipe.guard, last, trace)
        self.guard_hits += trace.guard_hits
        if self.watch:
            self.updates.append(_compared(name, o, newton_schulz(b, steps), trace.guard_hits))
        own = local(p)
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(part_of(o, p).to(p.dtype), alpha=-group["lr"] * self._scale(o))

    def _scale(self, o: Tensor) -> float:
        if self.recipe.rms_of == "shape":  # an orthogonal (m, n) has the root mean square 1 / sqrt(max)
            return self.recipe.rms * math.sqrt(max(o.shape))
        rms = float(_rms(o))
        return self.recipe.rms / rms if rms > 0 else 0.0

    def _storable(self, p: Tensor) -> bool:
        first = self.recipe.first
        return (
            first is not None and not first.hadamard and p.shape[1] % BLOCK == 0 and not any(sharded_axes(p))
        )

    def store_momentum(self, m: Tensor, p: Tensor, key: RandomKey) -> dict[str, Tensor]:
        """FP32, or codes, scales and amax where the recipe stores first moments in NVFP4 and rows fit. `m` is
        the rank's part of p's momentum, amax that of the whole."""
        if not self._storable(p):
            return {"values": m}
        first, groups = self.recipe.first, groups_of(p)
        amax = largest_of(m.abs().amax() if m.numel() else m.new_zeros(()), groups) if groups else None
        key = replace(key, rank=number_of(groups))
        q = quantize(m, first.format, first.rounding, key, nonfinite="poison", amax=amax)
        return {"codes": q.codes, "scales": q.scales, "amax": q.amax}

    def _load(self, stored: dict[str, Tensor], p: Tensor) -> Tensor:
        if "values" in stored:
            return stored["values"]
        fields = (stored[name] for name in ("codes", "scales", "amax"))
        return QuantizedTensor(*fields, self.recipe.first.format, local(p).shape).dequantize()

    def state_dict(self) -> dict:
        """As torch's, with the number of guard hits."""
        return super().state_dict() | {"guard_hits": self.guard_hits}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.guard_hits = state_dict.get("guard_hits", 0)

    _pickled = ("codecs", "seed", "recipe", "watch", "guard_hits", "updates")


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _compared(name: str, o: Tensor, exact: Tensor, guard_hits: int) -> Update:
    cosine = (o * exact).sum() / (o.norm() * exact.norm()).clamp_min(1e-30)
    return Update(name, float(_rms(o)), float(_rms(exact)), float(cosine), guard_hits)
