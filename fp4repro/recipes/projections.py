"""LoRA-SVD as data: which part of a linear's weight stays in BF16, how it is found, and how often.

Full-Stack FP4 (arXiv 2607.04422) keeps the leading components of W in BF16, quantises the residual, and
re-aligns the two by a randomised SVD every 4,000 steps. Rank, sketch, what is trained, and what becomes
of wgrad are not public: each is a field here. `layers/lora_svd.py` has the algorithm.
"""

from dataclasses import dataclass
from typing import Literal

from fp4repro.errors import Fp4ReproError

EVERY = 4000  # steps, arXiv 2607.04422
RANK, WIDTH_A_DIRECTION = 32, 32


@dataclass(frozen=True)
class LoraSVD:
    """The side path of a recipe's linears.

    rank               singular directions in BF16; None: 32, or a 32nd of the narrower side below 1,024;
                       0: no side path
    every              steps between refreshes; None: 4,000; in a run of known length a twentieth of it,
                       at least 50 and at most 4,000
    oversampling       further columns of the random sketch
    power_iterations   of the randomised SVD (Halko, Martinsson and Tropp, arXiv 0909.4061)
    protect_wgrad      dW within the subspace from unquantised operands
    trainable_factors  train the two factors beside the residual and merge them at each refresh, in place
                       of training W
    factor_states      the optimizer's states of these factors at a refresh: "reset", or "keep" as they are
    side_input         "unquantised"; "quantised" feeds the forward's side path with what x_fprop holds, a
                       control
    """

    rank: int | None = None
    every: int | None = None
    oversampling: int = 4
    power_iterations: int = 2
    protect_wgrad: bool = False
    trainable_factors: bool = False
    factor_states: Literal["reset", "keep"] = "reset"
    side_input: Literal["unquantised", "quantised"] = "unquantised"

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("every", 1), ("oversampling", 0), ("power_iterations", 0)):
            value = getattr(self, name)
            if value is None and name in ("rank", "every"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Fp4ReproError(f"lora_svd: {name} must be an integer from {least} up, not {value!r}")
        for name, known in (
            ("factor_states", ("reset", "keep")),
            ("side_input", ("unquantised", "quantised")),
        ):
            if getattr(self, name) not in known:
                raise Fp4ReproError(
                    f"lora_svd: {name} must be {' or '.join(known)}, not {getattr(self, name)!r}"
                )
        if self.trainable_factors and (self.protect_wgrad or self.side_input == "quantised"):
            raise Fp4ReproError(
                "lora_svd: trainable_factors have gradients of their own from unquantised operands: leave "
                "protect_wgrad and side_input at their defaults"
            )

    def rank_of(self, out_features: int, in_features: int) -> int:
        """The rank in a layer of that shape; one that it does not have is refused."""
        width = min(out_features, in_features)
        rank = min(RANK, max(width // WIDTH_A_DIRECTION, 1)) if self.rank is None else self.rank
        if rank > width:
            raise Fp4ReproError(
                f"lora_svd: rank {rank} is above the width of a linear of {in_features} to {out_features} "
                f"features, which has {width} singular directions: lower the rank"
            )
        return rank

    def every_in(self, steps: int) -> int:
        """Steps between refreshes in a run of `steps`."""
        return min(EVERY, max(50, steps // 20)) if self.every is None else self.every
