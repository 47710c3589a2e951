"""LoRA-SVD: the leading singular directions of W in BF16, the residual quantised.

    L = W V                 V (in, rank), orthonormal; L (out, rank); both BF16, as they are multiplied
    R = W - L V^T           takes W's place in the weight slots, so W itself is never quantised
    y  = Q(x) Q(R)^T + (x V) L^T          dx = Q(dy) Q(R) + (dy L) V^T

The second terms take the unquantised x and dy (arXiv 2607.04422; the split is SVDQuant's, 2411.05007).
W stays the one parameter and dW that of the base recipe, or, protected, dW (I - V V^T) + dy^T (x V) V^T.
V is found anew by a randomised SVD (Halko, Martinsson and Tropp, 0909.4061) every so many steps; as R is
made from the V in use, an old V costs a little accuracy and never W's value.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fp4repro.core.products import product
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.layers.linear import Plan, QuantLinear
from fp4repro.recipes import LoraSVD
from fp4repro.recipes.projections import EVERY

_ROLE = 200  # of the sketch in random keys, apart from those of slots and transforms


def leading_directions(w: Tensor, rank: int, settings: LoraSVD, key: RandomKey) -> Tensor:
    """The leading right singular directions of w (out, in): float32 (in, rank), orthonormal columns.

    The same key gives the same sketch on every device. A w that is not finite has no directions: unit
    vectors stand in, and the NaN comes out of the products.
    """
    w = w.float()
    if not bool(w.isfinite().all()):
        return torch.eye(w.shape[1], rank, device=w.device)
    low, high = key.words()
    generator = torch.Generator().manual_seed((high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF)
    columns = min(rank + settings.oversampling, *w.shape)
    sketch = torch.randn(w.shape[1], columns, generator=generator).to(w.device)
    q = _orthonormal(w @ sketch)  # (out, columns), near the leading left directions
    for _ in range(settings.power_iterations):
        q = _orthonormal(w @ _orthonormal(w.T @ q))
    return torch.linalg.svd(q.T @ w, full_matrices=False).Vh[:rank].T.contiguous()


def _orthonormal(x: Tensor) -> Tensor:
    return torch.linalg.qr(x).Q


class LoraSVDLinear(QuantLinear):
    """A `QuantLinear` with the side path.

    basis  V, a buffer that is left out of `state_dict`, so that a model's files stay as they were; a
           run that is to go on bit for bit keeps it by `carried_state`
    epoch  the step's number of refreshes that it belongs to; None before the first
    """

    basis: Tensor | None
    epoch: int | None

    def attach(self, plan: Plan) -> None:
        super().attach(plan)
        self.epoch = None
        self.register_buffer("basis", None, persistent=False)

    def detach(self) -> None:
        del self.epoch, self.basis

    @property
    def settings(self) -> LoraSVD:
        return self.plan.recipe.lora_svd

    def refresh(self) -> None:
        """Align the side path with W where the step asks for it. Steps that nobody counts: once."""
        epoch = self.plan.clock.step // (self.settings.every or EVERY)
        if epoch != self.epoch:
            with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
                self.align(replace(self.plan.key, step=epoch, role=_ROLE, microbatch=0))
            self.epoch = epoch
            self.forget_quantised()  # scales of tiles change when other directions are taken out

    def align(self, key: RandomKey) -> None:
        self.basis = self._directions(self.weight, key)

    def _directions(self, w: Tensor, key: RandomKey) -> Tensor:
        rank = self.settings.rank_of(self.out_features, self.in_features)
        return leading_directions(w.detach(), rank, self.settings, key).bfloat16()

    def factors(self) -> tuple[Tensor, Tensor]:
        """L (out, rank) and V (in, rank), BF16."""
        self.refresh()
        basis = self.basis.bfloat16()  # a model that was cast casts its buffers
        with torch.autocast(basis.device.type, enabled=False):
            return (self.weight.detach().float() @ basis.float()).bfloat16(), basis

    def matrix(self) -> Tensor:
        """R, float32."""
        left, basis = self.factors()
        with torch.autocast(basis.device.type, enabled=False):
            return self.weight.detach().float() - left.float() @ basis.float().T

    def quantised_weight(self, slot: str) -> Tensor | QuantizedTensor:
        self.refresh()
        return super().quantised_weight(slot)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        left, basis = self.factors()
        if not self.settings.protect_wgrad:
            return super().multiply(x, weight) + _SidePath.apply(x, None, self, left, basis)
        outside = _Outside.apply(weight, basis)
        return super().multiply(x, outside) + _SidePath.apply(x, weight, self, left, basis)

    def side_input(self, rows: Tensor) -> tuple[Tensor, Tensor | float]:
        """x (tokens, in) as V multiplies it, BF16, and the factor of the product."""
        if self.settings.side_input == "unquantised":
            return rows.bfloat16(), 1.0
        # Without fprop's Hadamard transform, which V does not have.
        return replace(self.plan.slots["x_fprop"], hadamard=False).operand(rows, self.plan.key)

    def carried(self) -> dict[str, Tensor | int | None]:
        """What the weights alone do not give back."""
        return {"epoch": self.epoch, "basis": self.basis}

    def carry_on(self, state: dict[str, Tensor | int | None]) -> None:
        """The inverse of `carried`."""
        self.forget_quantised()
        self.epoch, basis = state["epoch"], state["basis"]
        self.basis = None if basis is None else basis.to(self.weight.device)


class _SidePath(torch.autograd.Function):
    """(x V) L^T; with `weight` given, its gradient within the subspace."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, layer: LoraSVDLinear, left: Tensor, basis: Tensor):
        rows = x.reshape(-1, x.shape[-1])
        ctx.left, ctx.basis, ctx.shape = left, basis, x.shape
        with torch.autocast(x.device.type, enabled=False):
            values, scale = layer.side_input(rows)
            inner = product(values, basis.to(values.dtype), scale, torch.bfloat16)  # (tokens, rank)
            y = product(inner, left.T, 1.0, x.dtype)
        if ctx.needs_input_grad[1]:
            ctx.dtype = weight.dtype
            ctx.save_for_backward(inner)
        return y.view(*x.shape[:-1], left.shape[0])

    @staticmethod
    def backward(ctx, dy: Tensor):
        dx = dw = None
        rows = dy.reshape(-1, dy.shape[-1]).bfloat16()
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                inner = product(rows, ctx.left, 1.0, torch.bfloat16)
                dx = product(inner, ctx.basis.T, 1.0, dy.dtype).view(ctx.shape)
            if ctx.needs_input_grad[1]:
                (inner,) = ctx.saved_tensors
                within = product(rows.T, inner, 1.0, torch.float32)  # (out, rank)
                dw = (within @ ctx.basis.float().T).to(ctx.dtype)
        return dx, dw, None, None, None


class _Outside(torch.autograd.Function):
    """W itself; its gradient loses the component in the subspace, dW (I - V V^T)."""

    @staticmethod
    def forward(ctx, weight: Tensor, basis: Tensor) -> Tensor:
        ctx.basis = basis
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dw: Tensor) -> tuple[Tensor, None]:
        basis = ctx.basis.float()
        with torch.autocast(dw.device.type, enabled=False):
            inside = (dw.float() @ basis) @ basis.T
        return (dw - inside).to(dw.dtype), None
