"""Blackwell's own product of two NVFP4 tensors, through `torch.nn.functional.scaled_mm`.

The tensor core takes both operands row-wise along the contraction: packed codes, block scales
swizzled in tiles of 128 x 4 with their padding zero, and the two tensor scales apart. dgrad and wgrad
so multiply real transposes (`core.layout`). Compute capability 10.x; a later one is tried, and the
probe decides.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fp4repro.backends.backend import Backend, Results
from fp4repro.backends.emulation import emulated_layer
from fp4repro.core.formats import E2M1, E4M3
from fp4repro.core.layout import swizzle_scales, transpose
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import Fp4ReproError

BLOCK = 16
# What `scaled_mm` demands: packed rows of whole 16 bytes, and whole 16 rows of the second operand.
K_MULTIPLE, N_MULTIPLE = 32, 16
CAPABILITY = (10, 0)

_RECIPE = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
_SWIZZLE = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]


def native_matmul(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a (M, K) @ b (N, K).T -> (M, N) in BF16 or FP32, by the FP4 units.

    Both in NVFP4, blocks 1x16 or 16x16. Raises for other formats, and for shapes the units refuse.
    """
    _check(a, b)
    (codes_a, scales_a), (codes_b, scales_b) = _operand(a), _operand(b)
    return scaled_mm(
        codes_a,
        codes_b.T,
        scales_a,
        _RECIPE,
        scales_b,
        _RECIPE,
        swizzle_a=_SWIZZLE,
        swizzle_b=_SWIZZLE,
        output_dtype=dtype,
    )


def _operand(q: QuantizedTensor) -> tuple[Tensor, list[Tensor]]:
    """Packed codes (rows, K / 2), and block scales as the units read them beside the tensor's."""
    codes = q.codes.view(torch.float4_e2m1fn_x2)
    return codes, [swizzle_scales(q.scales), q.tensor_scale]


def _check(a: QuantizedTensor, b: QuantizedTensor) -> None:
    for q in (a, b):
        nvfp4 = q.format.element is E2M1 and q.format.scale is E4M3 and q.format.tensor_scale
        if not nvfp4 or q.format.block[1] != BLOCK:
            raise Fp4ReproError(
                f"the FP4 units multiply NVFP4 with blocks of 1x16 or 16x16, not {q.format.name} with "
                f"{q.format.block[0]}x{q.format.block[1]}: transpose an operand whose blocks are upright"
            )
        if len(q.shape) != 2:
            raise Fp4ReproError(f"native_matmul takes matrices, got shape {tuple(q.shape)}")
    if a.shape[1] != b.shape[1]:
        raise Fp4ReproError(
            f"native_matmul multiplies (M, K) by (N, K) transposed, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    for what, side, multiple in (("K", a.shape[1], K_MULTIPLE), ("N", b.shape[0], N_MULTIPLE)):
        if side % multiple:
            raise Fp4ReproError(f"native_matmul needs {what} to be a multiple of {multiple}, got {side}")


def three_products(
    multiply: Callable[[QuantizedTensor, QuantizedTensor, torch.dtype], Tensor],
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
) -> Results:
    """y, dx, dw from packed operands that equal the emulated layer's to the bit, random bits included."""
    plan = emulated_layer(weight).plan

    def stored(slot: str, tensor: Tensor, key: RandomKey) -> QuantizedTensor:
        q = plan.store(slot, tensor, key)
        return transpose(q) if plan.slots[slot].axis == 0 else q

    forward = plan.key
    backward = plan.backward_key(plan.store("x_wgrad", x, forward))
    return (
        multiply(stored("x_fprop", x, forward), stored("w_fprop", weight, forward), x.dtype),
        multiply(stored("dy_dgrad", dy, backward), stored("w_dgrad", weight, forward), dy.dtype),
        multiply(stored("dy_wgrad", dy, backward), stored("x_wgrad", x, forward), dy.dtype),
    )


def linear(x: Tensor, weight: Tensor, dy: Tensor) -> Results:
    """y, dx, dw of a linear by the FP4 units; refuses a device that has none."""
    if x.device.type != "cuda":
        raise Fp4ReproError("no CUDA device")
    capability = torch.cuda.get_device_capability(x.device)
    if capability < CAPABILITY:
        raise Fp4ReproError(
            f"compute capability {capability[0]}.{capability[1]} has no FP4 units, which came with "
            f"{CAPABILITY[0]}.{CAPABILITY[1]}"
        )
    return three_products(native_matmul, x, weight, dy)


NATIVE = Backend("native", linear)
