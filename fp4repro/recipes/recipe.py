"""A training recipe as data: what each of the six operands of a linear layer's three products becomes.

    fprop  y  = x  W^T    slots x_fprop, w_fprop     contraction over features in
    dgrad  dx = dy W      slots dy_dgrad, w_dgrad    over features out
    wgrad  dW = dy^T x    slots dy_wgrad, x_wgrad    over tokens

A slot's format gives its block along the contraction first-hand: (1, 16) are 16 values along it. None
leaves the operand in BF16. Every part of a published recipe is one field, so an ablation is
`dataclasses.replace` with one or two of them (arXiv 2509.25149, sections 3 and 4).
"""

from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from typing import Literal

from fp4repro.core.accumulate import Accumulate, check_accumulate
from fp4repro.core.formats import BlockFormat
from fp4repro.core.hadamard import SIZES, Signs
from fp4repro.errors import Fp4ReproError
from fp4repro.recipes.attention import AttentionRecipe
from fp4repro.recipes.optimizer import ADAMW, OptimizerRecipe
from fp4repro.recipes.projections import LoraSVD

SLOTS = ("x_fprop", "w_fprop", "dy_dgrad", "w_dgrad", "dy_wgrad", "x_wgrad")
PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class KeepBF16:
    """Which blocks of a model stay in BF16.

    first, last  numbers of blocks (mixers: each Mamba-2, FFN or attention module counts) at either
                 end, of a model of `of` blocks; another depth keeps the same shares, rounded.
                 `of` None: the numbers as they are at any depth.
    names        shell patterns of linears that stay in BF16 wherever they are.
    """

    first: int = 0
    last: int = 0
    of: int | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 0 or (self.of is not None and self.first + self.last > self.of):
            raise Fp4ReproError(
                f"KeepBF16(first={self.first}, last={self.last}, of={self.of}): the numbers of blocks "
                "must not be negative and must fit into the model"
            )

    def blocks(self, count: int) -> set[int]:
        """Indices of the blocks of a model of `count` that stay in BF16."""
        first, last = self.first, self.last
        if self.of is not None and first + last:
            total = round(count * (first + last) / self.of)
            last = round(total * last / (first + last))
            first = total - last
        return {i for i in range(count) if i < first or i >= count - last}

    def by_name(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.names)


@dataclass(frozen=True)
class LateBF16:
    """Products that leave 4 bits for BF16 when the share `after` of a run's steps is done, to the end
    (arXiv 2509.25149, appendix D)."""

    after: float
    products: tuple[str, ...] = PRODUCTS

    def __post_init__(self) -> None:
        wrong = [p for p in self.products if p not in PRODUCTS]
        if wrong or not self.products or not 0 < self.after < 1:
            raise Fp4ReproError(
                f"LateBF16(after={self.after}, products={self.products}): after must lie between 0 and 1 "
                f"and products must be some of {', '.join(PRODUCTS)}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """See the module docstring; `fp4repro.recipe(name)` returns the published ones.

    stochastic      slots that round stochastically; the others round to nearest
    random_bits     random bits an element for that: 8 as in hardware, 16 or 32
    hadamard        products whose two operands are transformed along the contraction
    hadamard_size, hadamard_signs    see `fp4repro.hadamard`; "drawn" draws anew at every step
    keep            which linears stay in BF16
    wgrad_dtype     type that weight gradients are rounded to; FP32 costs an FP32 product on a CPU
    accumulate      how products of two FP4 operands are summed: "fp32", or "blackwell" as its units
                    do (`core.accumulate`); other products are always summed in FP32
    lora_svd        leading directions of W in BF16, the residual quantised (`recipes.projections`)
    late_bf16       products that go to BF16 late in the run, None for none; see `at`
    optimizer       AdamW or Muon and how their states are stored; plain AdamW with FP32 states by default
    attention       how attention's own products are quantised; None leaves it to torch
    """

    name: str
    x_fprop: BlockFormat | None = None
    w_fprop: BlockFormat | None = None
    dy_dgrad: BlockFormat | None = None
    w_dgrad: BlockFormat | None = None
    dy_wgrad: BlockFormat | None = None
    x_wgrad: BlockFormat | None = None
    stochastic: tuple[str, ...] = ()
    random_bits: int = 8
    hadamard: tuple[str, ...] = ()
    hadamard_size: int = 16
    hadamard_signs: Signs = "te"
    keep: KeepBF16 = KeepBF16()
    wgrad_dtype: Literal["bf16", "fp32"] = "bf16"
    accumulate: Accumulate = "fp32"
    lora_svd: LoraSVD | None = None
    late_bf16: LateBF16 | None = None
    optimizer: OptimizerRecipe = ADAMW
    attention: AttentionRecipe | None = None

    def __post_init__(self) -> None:
        for given, known, what in (
            (self.stochastic, SLOTS, "stochastic"),
            (self.hadamard, PRODUCTS, "hadamard"),
        ):
            for value in given:
                if value not in known:
                    raise Fp4ReproError(
                        f"recipe {self.name}: {what} names {value!r}, which is none of {', '.join(known)}"
                    )
        if self.random_bits not in (8, 16, 32):
            raise Fp4ReproError(
                f"recipe {self.name}: random_bits must be 8, 16 or 32, not {self.random_bits}"
            )
        if self.hadamard_size not in SIZES:
            raise Fp4ReproError(
                f"recipe {self.name}: hadamard_size must be one of {SIZES}, not {self.hadamard_size}"
            )
        if self.hadamard_signs not in ("te", "none", "drawn"):
            raise Fp4ReproError(f"recipe {self.name}: hadamard_signs must be te, none or drawn")
        if self.wgrad_dtype not in ("bf16", "fp32"):
            raise Fp4ReproError(f"recipe {self.name}: wgrad_dtype must be bf16 or fp32")
        check_accumulate(self.accumulate)
        if self.lora_svd is not None and not isinstance(self.lora_svd, LoraSVD):
            raise Fp4ReproError(f"recipe {self.name}: lora_svd must be a LoraSVD, not {self.lora_svd!r}")
        if not isinstance(self.attention, AttentionRecipe | None):
            raise Fp4ReproError(f"recipe {self.name}: attention must be an AttentionRecipe or None")

    @property
    def quantises(self) -> bool:
        """False for plain BF16."""
        return any(getattr(self, slot) is not None for slot in SLOTS)

    def for_run(self, steps: int) -> "Recipe":
        """The recipe with what depends on the length of the run filled in."""
        if self.lora_svd is None:
            return self
        return replace(self, lora_svd=replace(self.lora_svd, every=self.lora_svd.every_in(steps)))

    def at(self, done: float) -> "Recipe":
        """The recipe that holds once the share `done` of a run's steps is done."""
        late = self.late_bf16
        if late is None or done < late.after:
            return self
        bf16 = dict.fromkeys(slot for slot in SLOTS if slot.split("_")[1] in late.products)
        hadamard = tuple(product for product in self.hadamard if product not in late.products)
        return replace(self, **bf16, hadamard=hadamard)

    def same_as(self, other: "Recipe") -> bool:
        """Whether both are the same arithmetic, whatever their names."""
        return self == replace(other, name=self.name)

    def replace(self, **changes: object) -> "Recipe":
        """The recipe with other fields; a wrong name is refused with the list of the right ones."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise Fp4ReproError(f"recipe {self.name} has no field {name!r}; it has {', '.join(known)}")
        return replace(self, **changes)
