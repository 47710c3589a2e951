"""LoRA-SVD with trainable factors: A and B in BF16 products beside a trainable residual.

    y = Q(x) Q(R)^T + (x B) A^T       trained: R (the layer's `weight`), A (out, rank), B (in, rank)

Every so many steps the three are merged, W = R + A B^T, and split anew, A = W V, B = V, R = W - A B^T, so
that the first step after a split is that of `lora_svd`. arXiv 2607.04422 does not say which factors are
trained. The rule for the optimizer: what it knows of A and B is dropped at a split, since their
coordinates are new; what it knows of R, whose coordinates are W's, stays. Weight decay acts on R, A, B.

`state_dict` gives and takes W, so that files are those of the plain model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fp4repro.core.random import RandomKey
from fp4repro.layers.linear import Plan, QuantLinear
from fp4repro.layers.lora_svd import LoraSVDLinear

FACTORS = ("factor_a", "factor_b")


class LoraFactorLinear(LoraSVDLinear):
    """`weight` holds R; `split_anew` tells the optimizer's hook of a split since its last step."""

    factor_a: nn.Parameter
    factor_b: nn.Parameter
    split_anew: bool

    def attach(self, plan: Plan) -> None:
        QuantLinear.attach(self, plan)
        self.epoch, self.split_anew = None, False
        rank = self.settings.rank_of(self.out_features, self.in_features)
        for name, side in zip(FACTORS, (self.out_features, self.in_features), strict=True):
            values = self.weight.new_zeros(side, rank)
            self.register_parameter(name, nn.Parameter(values, self.weight.requires_grad))

    @torch.no_grad()
    def detach(self) -> None:
        self.weight.copy_(self.merged())
        del self.factor_a, self.factor_b, self.epoch, self.split_anew

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W, in the type of the weight."""
        with torch.autocast(self.weight.device.type, enabled=False):
            low_rank = self.factor_a.float() @ self.factor_b.float().T
        return (self.weight.float() + low_rank).to(self.weight.dtype)

    def align(self, key: RandomKey) -> None:
        w = self.merged().float()
        b = self._directions(w, key)
        a = (w @ b.float()).bfloat16()
        self.factor_a.copy_(a)
        self.factor_b.copy_(b)
        self.weight.copy_(w - a.float() @ b.float().T)
        self.split_anew = True

    def matrix(self) -> Tensor:
        return QuantLinear.matrix(self)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        self.refresh()
        y = QuantLinear.multiply(self, x, weight)
        with torch.autocast(x.device.type, enabled=False):
            a, b = (getattr(self, name).bfloat16() for name in FACTORS)
            return y + (x.bfloat16() @ b @ a.T).to(y.dtype)

    def carried(self) -> dict[str, Tensor | int | None]:
        held = {name: getattr(self, name).detach() for name in ("weight", *FACTORS)}
        return {"epoch": self.epoch, **held}

    @torch.no_grad()
    def carry_on(self, state: dict[str, Tensor | int | None]) -> None:
        self.epoch = state["epoch"]
        for name in ("weight", *FACTORS):
            getattr(self, name).copy_(state[name])

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.merged()
        for name in FACTORS:
            del destination[prefix + name]

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        *_, missing, _, _ = rest  # local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "weight" in state_dict:  # all of W, to be split at the next forward
            self.epoch = None
            for name in FACTORS:
                getattr(self, name).zero_()
        missing[:] = [key for key in missing if key not in {prefix + name for name in FACTORS}]


def follow_splits(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer's states in step with the splits of its model's factors, by the rule of
    `LoraSVD.factor_states`. Does nothing to a model without trainable factors."""
    layers = [m for m in model.modules() if isinstance(m, LoraFactorLinear)]

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for layer in layers:
            if layer.split_anew and layer.settings.factor_states == "reset":
                for name in FACTORS:
                    optimizer.state.pop(getattr(layer, name), None)
            layer.split_anew = False

    if layers:
        optimizer.register_step_pre_hook(before_step)
