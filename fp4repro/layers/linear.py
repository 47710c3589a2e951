"""A linear layer whose three products take quantised operands.

    fprop  y  = Q(x) Q(W)^T        dgrad  dx = Q(dy) Q(W)        wgrad  dW = Q(dy)^T Q(x)

Each operand is quantised from the high-precision tensor under its recipe slot; gradients pass the
quantisers straight through. What waits for the backward is x as wgrad will multiply it, packed (4.5
bits a value for NVFP4), and W packed, kept by the layer and shared by every use until W changes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fp4repro.core.accumulate import Accumulate, on_fp4_units
from fp4repro.core.compiled import outside_graphs
from fp4repro.core.products import product
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.layers.operands import Slot, Watch, amax_bits
from fp4repro.recipes import SLOTS, Recipe

# Tokens are padded with zero rows to a whole number of these in wgrad: zeros add nothing to the sum.
TOKEN_MULTIPLE = 128


@dataclass
class Clock:
    """What the layers of one model share: the seed, and the step that `set_step` advances."""

    seed: int = 0
    step: int = -1  # no step set: streams are then told apart by the data
    microbatch: int = 0


@dataclass
class Plan:
    """One layer's part in a converted model."""

    recipe: Recipe
    clock: Clock
    layer: int
    slots: dict[str, Slot] = field(init=False)
    calls: Counter = field(default_factory=Counter)  # quantised operands by slot
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self.slots = {name: Slot.of(self.recipe, name) for name in SLOTS}

    @property
    def key(self) -> RandomKey:
        clock = self.clock
        return RandomKey(clock.seed, clock.step, self.layer, microbatch=clock.microbatch)

    def backward_key(self, x: Tensor | QuantizedTensor) -> RandomKey:
        """Keys the gradients of one use of the layer: the amax of its input, as kept for wgrad, tells it
        from other uses in the same step."""
        amax = x.amax if isinstance(x, QuantizedTensor) else x.abs().amax().float()
        return replace(self.key, salt=amax_bits(amax))

    def operand(self, slot: str, x: Tensor, key: RandomKey) -> tuple[Tensor, Tensor | float]:
        self._count(slot)
        return self.slots[slot].operand(x, key, self.watch)

    def store(self, slot: str, x: Tensor, key: RandomKey) -> Tensor | QuantizedTensor:
        self._count(slot)
        return self.slots[slot].store(x, key, self.watch)

    def weight_slot(self, slot: str) -> str:
        """w_fprop for w_dgrad too where both are the same values, as with 16x16 tiles."""
        fprop, dgrad = self.slots["w_fprop"], self.slots["w_dgrad"]
        apart = fprop.stochastic or dgrad.stochastic or fprop.hadamard or dgrad.hadamard
        return slot if apart or fprop.format != dgrad.format else "w_fprop"

    def accumulate(self, product_name: str) -> Accumulate:
        """How a product is summed: in the recipe's way where both operands are FP4, else in FP32."""
        formats = [slot.format for name, slot in self.slots.items() if name.endswith(f"_{product_name}")]
        return self.recipe.accumulate if on_fp4_units(*formats) else "fp32"

    def _count(self, slot: str) -> None:
        if self.slots[slot].format is not None:
            self.calls[slot] += 1


class QuantLinear(nn.Linear):
    """An `nn.Linear` under a recipe: same parameters, same names. Made by `convert`."""

    plan: Plan

    # A compiled model breaks its graph here: the kernels within are compiled by themselves, once for
    # all layers, and would be traced anew for every layer otherwise.
    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out), in autocast's type where it is on, else in x's."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = self.multiply(x.to(dtype), self.weight)
        return y if self.bias is None else y + self.bias.to(dtype)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The three products; the gradient of W goes to `weight`, W itself or what was made of it."""
        return _QuantLinear.apply(x, weight, self, torch.is_grad_enabled())

    def attach(self, plan: Plan) -> None:
        """Begin to work by a plan; `convert` has just given the layer its class."""
        self.plan = plan
        self.forget_quantised()

    def detach(self) -> None:
        """Leave the layer as a plain linear needs it."""

    def forget_quantised(self) -> None:
        self.__dict__.pop("_quantised", None)

    def matrix(self) -> Tensor:
        """What the weight slots quantise."""
        return self.weight.detach()

    def quantised_weight(self, slot: str) -> Tensor | QuantizedTensor:
        """W as fprop or dgrad multiplies it, quantised once for each state of the parameter."""
        slot = self.plan.weight_slot(slot)
        cache = self.__dict__.setdefault("_quantised", {})
        state = self._weight_state()
        if not cache or not _same(cache["state"], state):
            cache.clear()
            cache["state"] = state
        if slot not in cache:
            cache[slot] = self.plan.store(slot, self.matrix(), self.plan.key)
        return cache[slot]

    def _weight_state(self) -> tuple:
        """Changes whenever the weight or the step does."""
        w = self.weight.detach()
        clock = self.plan.clock
        version = self.weight._version
        state = (w.data_ptr(), version, w.dtype, w.device, id(self.plan), clock.seed, clock.step)
        if any(self.plan.slots[s].stochastic for s in ("w_fprop", "w_dgrad")):
            state += (clock.microbatch,)
        # Writing through `.data` leaves the version as it is, but not the sums of the bits of each row.
        # Not on a GPU, where looking would wait for the device: there a new step makes it anew.
        return state, _row_sums(w) if w.device.type == "cpu" else None

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "_quantised"}


def _row_sums(w: Tensor) -> Tensor:
    """Of the bits, which no single change leaves alone, and of the values, since signs of an even number
    of elements turned together cancel among the bits; (2, rows)."""
    whole_words = w.is_contiguous() and w.shape[-1] * w.element_size() % 4 == 0
    bits = w.view(torch.int32) if whole_words else w.float().contiguous().view(torch.int32)
    sums = bits.sum(-1, dtype=torch.int32), w.sum(-1, dtype=torch.float32).view(torch.int32)
    return torch.stack(sums)


def _same(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and (a[1] is None or torch.equal(a[1], b[1]))


class _QuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer: QuantLinear, training: bool) -> Tensor:
        plan, key = layer.plan, layer.plan.key
        rows = x.reshape(-1, x.shape[-1])  # (tokens, in)
        ctx.layer, ctx.key, ctx.shape = layer, key, x.shape
        if rows.shape[0] == 0:  # an expert without tokens
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            x_q, x_scale = plan.operand("x_fprop", rows, key)
            w = layer.quantised_weight("w_fprop")
            w_q, w_scale = Slot.load(w)
            y = product(x_q, w_q.T, x_scale * w_scale, x.dtype, plan.accumulate("fprop"))  # (tokens, out)
            if training and ctx.needs_input_grad[1]:
                kept = plan.store("x_wgrad", _whole_tokens(rows), key)
                _save(ctx, kept)
                ctx.key = plan.backward_key(kept)
            if training and ctx.needs_input_grad[0]:
                # dgrad must see this forward's weight even if the parameter is changed before it.
                shared = plan.weight_slot("w_dgrad") == "w_fprop"
                ctx.weight = w if shared else layer.quantised_weight("w_dgrad")
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        layer, key = ctx.layer, ctx.key
        plan, weight = layer.plan, layer.weight
        dx = dw = None
        rows = dy.reshape(-1, dy.shape[-1])  # (tokens, out)
        if rows.shape[0] == 0:
            dx = dy.new_zeros(ctx.shape) if ctx.needs_input_grad[0] else None
            return dx, torch.zeros_like(weight) if ctx.needs_input_grad[1] else None, None, None
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dy_q, dy_scale = plan.operand("dy_dgrad", rows, key)
                w_q, w_scale = Slot.load(ctx.weight)
                dx = product(dy_q, w_q, dy_scale * w_scale, dy.dtype, plan.accumulate("dgrad"))
                dx = dx.view(ctx.shape)
            if ctx.needs_input_grad[1]:
                dy_q, dy_scale = plan.operand("dy_wgrad", _whole_tokens(rows), key)
                x_q, x_scale = Slot.load(_load(ctx))
                dtype = torch.float32 if plan.recipe.wgrad_dtype == "fp32" else dy.dtype
                dw = product(dy_q.T, x_q, dy_scale * x_scale, dtype, plan.accumulate("wgrad"))
                dw = dw.to(weight.dtype)
        return dx, dw, None, None


def _save(ctx, kept: Tensor | QuantizedTensor) -> None:
    """Through autograd, so that hooks see it and a second backward is refused in the usual words."""
    if isinstance(kept, QuantizedTensor):
        ctx.kept = (kept.format, kept.shape, kept.tensor_scale)
        ctx.save_for_backward(kept.codes, kept.scales, kept.amax)
    else:
        ctx.kept = None
        ctx.save_for_backward(kept)


def _load(ctx) -> Tensor | QuantizedTensor:
    saved = ctx.saved_tensors
    if ctx.kept is None:
        return saved[0]
    fmt, shape, scale = ctx.kept
    return QuantizedTensor(*saved, fmt, shape).with_tensor_scale(scale)


def _whole_tokens(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % TOKEN_MULTIPLE
    return pad(rows, (0, 0, 0, missing)) if missing else rows
