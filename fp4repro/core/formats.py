"""Number formats as data: element types, scale types, and how blocks of elements share a scale.

A `Minifloat` is a small float by its exponent and mantissa widths; a `BlockFormat` says which
element type is stored, how large a block shares one scale, of which type that scale is, how it is
rounded, and whether one FP32 scale for the whole tensor stands above it. NVFP4: arXiv 2509.25149,
appendix B; MX: OCP Microscaling 1.0; FP8 blocks: the paper's section 3 baseline. Every quantiser
reads these values; none has a format of its own.
"""

from dataclasses import dataclass, replace
from typing import Literal

from fp4repro.errors import Fp4ReproError

FP32_MAX = float.fromhex("0x1.fffffep127")


@dataclass(frozen=True)
class Minifloat:
    """A float of `exponent_bits` and `mantissa_bits`; `emin` is the exponent of its smallest normal."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    emin: int
    max: float
    signed: bool = True

    def __hash__(self) -> int:  # formats are looked up at each call of a kernel
        return hash(self.name)

    @property
    def min_normal(self) -> float:
        return 2.0**self.emin

    @property
    def min_step(self) -> float:
        """The spacing of subnormals, which is also the smallest positive value."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + self.signed


E2M1 = Minifloat("e2m1", 2, 1, emin=0, max=6.0)
E4M3 = Minifloat("e4m3", 4, 3, emin=-6, max=448.0)
E5M2 = Minifloat("e5m2", 5, 2, emin=-14, max=57344.0)
UE5M3 = Minifloat("ue5m3", 5, 3, emin=-14, max=61440.0, signed=False)
# The code 0 of UE8M0 (2**-127) is left unused: it is subnormal in FP32, where scales are computed.
UE8M0 = Minifloat("ue8m0", 8, 0, emin=-126, max=2.0**127, signed=False)
# Scales only: FP32 kept as it is.
FP32 = Minifloat("fp32", 8, 23, emin=-126, max=FP32_MAX)

ScaleRounding = Literal["nearest", "up", "down"]
ScaleOrder = Literal["te", "te-2.13", "paper"]

WHOLE = 0  # a block side that spans the tensor


@dataclass(frozen=True)
class BlockFormat:
    """How a tensor is stored as small floats with shared scales.

    block           (rows, columns) that share a scale; the columns run along the last axis, the
                    contraction of a product. `WHOLE` for a side that spans the tensor.
    scale           type of the block scale; `scale_rounding` says which neighbour is taken.
    tensor_scale    True: an FP32 scale of the tensor maps its amax to `scale_target * target`
                    (NVFP4's second level); False: block scales stand alone.
    target          the magnitude that a block's amax is scaled to, normally the element's maximum;
                    smaller leaves head-room (16/17 of it: no clipping after nearest scales).
    scale_target    the block scale that the tensor's largest block gets (two levels only).
    order           which order of FP32 operations makes the block scale: Transformer Engine's
                    since 2.14 (`te`), or the paper's equation (`paper`), which it followed until
                    2.13 (`te-2.13`).
    four_over_six   None, or the error ("mse", "mae") by which a block chooses between mapping its
                    amax to 6 and to 4 (arXiv 2512.02010).
    pads            whether a last block that the tensor does not fill is filled with zeros (FP8's
                    128) or the shape refused, as FP4 hardware does.
    """

    name: str
    element: Minifloat
    block: tuple[int, int]
    scale: Minifloat
    tensor_scale: bool = False
    scale_rounding: ScaleRounding = "nearest"
    target: float = 0.0
    scale_target: float = 0.0
    order: ScaleOrder = "te"
    four_over_six: Literal["mse", "mae"] | None = None
    pads: bool = False

    def __hash__(self) -> int:
        return hash((self.name, self.element, self.block))

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self.target or self.element.max)
        object.__setattr__(self, "scale_target", self.scale_target or self.scale.max)
        if len(self.block) != 2 or any(side < 0 for side in self.block):
            raise Fp4ReproError(
                f"{self.name}: block {self.block} must be two sizes (rows, columns), 0 for the whole side"
            )
        if self.block[1] > 1 and self.block[1] % 16:
            raise Fp4ReproError(
                f"{self.name}: a block of {self.block[1]} columns must be of 1, of 16 n, or 0 for all"
            )
        if self.scale_rounding not in ("nearest", "up", "down"):
            raise Fp4ReproError(
                f"{self.name}: scale_rounding {self.scale_rounding!r} must be nearest, up or down"
            )
        if self.order not in ("te", "te-2.13", "paper"):
            raise Fp4ReproError(f"{self.name}: order {self.order!r} must be te, te-2.13 or paper")
        if self.four_over_six not in (None, "mse", "mae"):
            raise Fp4ReproError(f"{self.name}: four_over_six {self.four_over_six!r} must be mse, mae or None")
        if self.four_over_six and self.element is not E2M1:
            raise Fp4ReproError(f"{self.name}: four_over_six needs E2M1 elements, not {self.element.name}")
        if self.element.bits not in (4, 8):
            raise Fp4ReproError(f"{self.name}: elements of {self.element.bits} bits cannot be packed")

    def with_block(self, rows: int, columns: int) -> "BlockFormat":
        """The same format with another block, e.g. `NVFP4.with_block(16, 16)` for weights."""
        return replace(self, block=(rows, columns))

    def replace(self, **fields: object) -> "BlockFormat":
        """The same format with other fields."""
        return replace(self, **fields)

    @property
    def transposed(self) -> "BlockFormat":
        """The format whose blocks run along the other axis of a matrix kept in its layout."""
        return self.with_block(*reversed(self.block))

    @property
    def exact_in_bf16(self) -> bool:
        """Whether element times block scale always has at most BF16's 8 significant bits."""
        element, scale = self.element.mantissa_bits + 1, self.scale.mantissa_bits + 1
        return element + (scale if scale > 1 else 0) <= 8

    @property
    def bits_per_value(self) -> float:
        """Stored bits a value without padding, block scales as stored (once a row), amax left out."""
        rows, columns = self.block
        share = columns if columns > 1 else rows
        return self.element.bits + (self.scale.bits / share if share else 0.0)


NVFP4 = BlockFormat("nvfp4", E2M1, (1, 16), E4M3, tensor_scale=True)
# The paper rounds the power-of-two scale up, so that the block maximum is never clipped.
MXFP4 = BlockFormat("mxfp4", E2M1, (1, 32), UE8M0, scale_rounding="up")
MXFP8 = BlockFormat("mxfp8", E4M3, (1, 32), UE8M0, scale_rounding="up")
# The paper's FP8 baseline: 1x128 for activations and gradients, `with_block(128, 128)` for weights.
# Powers of two, Transformer Engine's default for block scaling, keep code times scale exact in BF16.
FP8 = BlockFormat("fp8", E4M3, (1, 128), UE8M0, scale_rounding="up", pads=True)
FP8_FP32_SCALES = BlockFormat("fp8_fp32_scales", E4M3, (1, 128), FP32, pads=True)
FP8_TENSOR = BlockFormat("fp8_tensor", E4M3, (WHOLE, WHOLE), FP32, pads=True)

FORMATS = {f.name: f for f in (NVFP4, MXFP4, MXFP8, FP8, FP8_FP32_SCALES, FP8_TENSOR)}
