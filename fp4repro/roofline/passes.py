"""The passes that quantise operands, by the bytes that they move.

One tensor feeds two products (x: fprop and wgrad, dy: dgrad and wgrad, W: fprop and dgrad), so it is
stored in up to two orientations. Where a scale spans the tensor (NVFP4, tensor-wise FP8) a first
pass reads it for the amax; the second reads it again and writes every orientation, Hadamard
transform and stochastic rounding included. Both are free of bytes: the transform costs 32 FLOP a
value on the BF16 units, random bits come from registers. Tensor-wise FP8 needs no second
orientation where the units take either, which came with those for FP4 (Blackwell).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp4repro.core.formats import WHOLE, BlockFormat
from fp4repro.recipes import Recipe
from fp4repro.roofline.devices import Device
from fp4repro.roofline.factors import Factors

SOURCE_BYTES = 2  # BF16
# The two slots of each tensor of a linear.
SLOTS_OF = {"x": ("x_fprop", "x_wgrad"), "dy": ("dy_dgrad", "dy_wgrad"), "w": ("w_fprop", "w_dgrad")}


@dataclass(frozen=True)
class Pass:
    """One kernel over a tensor."""

    what: str  # amax or cast
    bytes: float
    flops: float = 0.0

    def seconds(self, device: Device, factors: Factors) -> float:
        traffic = self.bytes / (factors.passes * device.bytes_per_second)
        return max(traffic, self.flops / factors.rate(device, "bf16")) + factors.launch


def needs_amax(fmt: BlockFormat) -> bool:
    """Whether one scale spans the tensor, so that it must be read before it is quantised."""
    return fmt.tensor_scale or WHOLE in fmt.block


def quantisation(
    recipe: Recipe, slots: Sequence[str], values: int, device: Device, transposed: bool = True
) -> list[Pass]:
    """The kernels that turn a BF16 tensor of `values` into the operands of `slots`.

    transposed  False where a transposed copy is not made at all
    """
    formats = [fmt for slot in slots if (fmt := getattr(recipe, slot)) is not None]
    if not formats:
        return []
    if not transposed or _either_orientation(formats, device):
        formats = formats[:1]
    passes = []
    turned = [s for s in slots if s.split("_")[1] in recipe.hadamard and getattr(recipe, s) is not None]
    flops = 2.0 * recipe.hadamard_size * values if turned else 0.0
    if any(needs_amax(fmt) for fmt in formats):
        passes.append(Pass("amax", SOURCE_BYTES * values, flops))
    written = sum(fmt.bits_per_value / 8 for fmt in formats)
    passes.append(Pass("cast", (SOURCE_BYTES + written) * values, flops))
    return passes


def seconds_by_tensor(
    recipe: Recipe, values: Mapping[str, int], device: Device, factors: Factors
) -> dict[str, float]:
    """Seconds to quantise each tensor of a linear (x, dy, w) of so many values."""
    return {
        tensor: sum(p.seconds(device, factors) for p in quantisation(recipe, slots, values[tensor], device))
        for tensor, slots in SLOTS_OF.items()
    }


def _either_orientation(formats: Sequence[BlockFormat], device: Device) -> bool:
    whole = all(fmt.block == (WHOLE, WHOLE) for fmt in formats)
    return whole and "fp4" in device.peak
