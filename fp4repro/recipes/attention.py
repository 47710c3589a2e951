"""Attention's settings as data: which of its seven products are lowered to 4 bits, and from what.

    qk        S = Q K^T / sqrt(d)        over head_dim, in the forward
    pv        O = P V                    over keys
    qk_again  S once more                over head_dim, in the backward
    p_do      dV = P^T dO                over queries
    do_v      dP = dO V^T                over head_dim
    ds_k      dQ = dS K / sqrt(d)        over keys,     dS = P (dP - D)
    ds_q      dK = dS^T Q / sqrt(d)      over queries

The defaults are what is known of Full-Stack FP4 (arXiv 2607.04422): Q, K, V and dS quantised, Q, K and
V once, as views that the backward uses again; PV, P^T dO and dO V^T in BF16. What is not known of it
(rounding of dS, the axis of a view used a second time, its tiles, smoothing) is a field.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from fp4repro.core.formats import NVFP4, BlockFormat
from fp4repro.errors import Fp4ReproError

ATTENTION_PRODUCTS = ("qk", "pv", "qk_again", "p_do", "do_v", "ds_k", "ds_q")
VIEWS = ("q", "k", "v")

_CHOICES = {
    "reuse": ("values", "requant"),
    "row_term": ("output", "high_output", "p"),
    "ds_rounding": ("nearest", "stochastic"),
    "high": ("bf16", "operands"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionRecipe:
    """See the module docstring; every field by keyword.

    lowered      products whose two operands are quantised
    views        of q, k and v: quantised once, in blocks along head_dim, stored packed, and taken by
                 every product, lowered or not. The others are stored as they came.
    format       of blocks along a product's contraction
    reuse        a view in a lowered product over keys or queries: its "values" as they are, or
                 "requant", quantised again along that axis, as FP4 units need it
    smooth       "k": K without its mean over the keys, which softmax does not see; "v": V without its
                 mean, added to the output again. Exact but for quantisation; the mean sees later
                 tokens, so that in a causal model their rounding errors do too.
    row_term     where D comes from: the "output" that is returned; "high_output", a second output from
                 a P that is not lowered (arXiv 2603.00040), which also costs its storage; or "p", the
                 sum of P dP over the row, which needs the row at once and stores no output
    ds_rounding  of dS: to "nearest", or "stochastic" by `random_bits` bits, which needs a key
    high         operands of products that are not lowered: rounded to "bf16", or taken as they are
    tile         query rows worked on at once, and what shares one tensor scale of dS, as in a fused
                 kernel
    """

    lowered: tuple[str, ...] = ("qk", "qk_again", "ds_k", "ds_q")
    views: tuple[str, ...] = VIEWS
    format: BlockFormat = NVFP4
    reuse: Literal["values", "requant"] = "values"
    smooth: tuple[str, ...] = ()
    row_term: Literal["output", "high_output", "p"] = "output"
    ds_rounding: Literal["nearest", "stochastic"] = "nearest"
    random_bits: int = 8
    high: Literal["bf16", "operands"] = "bf16"
    tile: int = 128

    def __post_init__(self) -> None:
        for what, known in (("lowered", ATTENTION_PRODUCTS), ("views", VIEWS), ("smooth", ("k", "v"))):
            for value in getattr(self, what):
                if value not in known:
                    raise Fp4ReproError(
                        f"AttentionRecipe: {what} names {value!r}, which is none of {', '.join(known)}"
                    )
        for what, known in _CHOICES.items():
            if getattr(self, what) not in known:
                raise Fp4ReproError(
                    f"AttentionRecipe: {what} is {getattr(self, what)!r}, but must be {' or '.join(known)}"
                )
        if self.random_bits not in (8, 16, 32):
            raise Fp4ReproError(f"AttentionRecipe: random_bits must be 8, 16 or 32, not {self.random_bits}")
        rows, columns = self.format.block
        if rows != 1 or columns < 16 or self.format.pads or not self.format.exact_in_bf16:
            raise Fp4ReproError(
                f"AttentionRecipe: format {self.format.name} must have blocks of one row, no padding, and "
                "values that BF16 holds, as NVFP4 has"
            )
        if self.tile < 1 or self.tile % columns:
            raise Fp4ReproError(
                f"AttentionRecipe: tile is {self.tile}, but must be a multiple of {columns}, the block of "
                f"{self.format.name}"
            )

    @cached_property
    def upright(self) -> BlockFormat:
        """The format of a product whose contraction is the rows of the matrix at hand."""
        return self.format.transposed

    @property
    def quantises(self) -> bool:
        """False where every operand stays in high precision."""
        return bool(self.lowered or self.views)

    @property
    def same_p(self) -> bool:
        """Whether the backward's P is the forward's: the same operands, or the stored views of both."""
        stored = {"q", "k"} <= set(self.views)
        return stored or ("qk" in self.lowered) == ("qk_again" in self.lowered)

    def replace(self, **changes: object) -> "AttentionRecipe":
        """The recipe with other fields; a wrong name is refused with the list of the right ones."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise Fp4ReproError(f"AttentionRecipe has no field {name!r}; it has {', '.join(known)}")
        return replace(self, **changes)
