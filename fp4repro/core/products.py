"""Products of quantised operands, emulated exactly.

Element code times block scale is exact in BF16, so a BF16 product with FP32 accumulation computes
what the tensor core does, up to the order of its sums. The two tensor scales multiply the FP32
accumulator before the one rounding to the output type, as the hardware's epilogue does: scaling a
BF16 product afterwards would round twice and change a quarter of the outputs.
"""

import torch
from torch import Tensor

from fp4repro.core.accumulate import Accumulate, check_accumulate, grouped_product, on_fp4_units
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import Fp4ReproError


def _bf16_is_native(device: torch.device) -> bool:
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product(
    a: Tensor, b: Tensor, scale: Tensor | float, dtype: torch.dtype, accumulate: Accumulate = "fp32"
) -> Tensor:
    """a (M, K) @ b (K, N) times `scale`, summed in FP32, rounded once to `dtype`.

    Operands in BF16 take the BF16 units where the output is BF16; an FP32 output costs an FP32
    product on a CPU, several times the time, for the same sums. FP32 operands (formats whose scales
    do not fit BF16) always do. `accumulate="blackwell"` sums as `core.accumulate` says, at two to three times
    the FP32 product's time.
    """
    if accumulate == "blackwell":
        return grouped_product(a, b).mul_(scale).to(dtype)
    if a.device.type == "cpu":
        factor = float(scale)
        bf16 = a.dtype == b.dtype == dtype == torch.bfloat16
        if bf16 and _bf16_is_native(a.device):
            out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
            return torch.addmm(out, a, b, beta=0, alpha=factor, out=out)
        return (a.float() @ b.float()).mul_(factor).to(dtype)
    if a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32).mul_(scale).to(dtype)
    return (a.float() @ b.float()).mul_(scale).to(dtype)


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    dtype: torch.dtype = torch.float32,
    accumulate: Accumulate = "fp32",
) -> Tensor:
    """a (..., K) @ b (N, K).T -> (..., N): the product of two quantised tensors along their blocks.

    accumulate  "fp32", or "blackwell" for the order and rounding of sums of Blackwell's FP4 units,
                which only FP4 operands have
    """
    check_accumulate(accumulate)
    if accumulate == "blackwell" and not on_fp4_units(a.format, b.format):
        raise Fp4ReproError(
            f"accumulate='blackwell' is how FP4 units sum; {a.format.name} times {b.format.name} is not "
            "multiplied by them: use accumulate='fp32'"
        )
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        raise Fp4ReproError(
            f"matmul takes two quantised tensors, got {type(a).__name__} and {type(b).__name__}"
        )
    if a.shape[-1] != b.shape[-1] or len(b.shape) != 2:
        raise Fp4ReproError(
            f"matmul multiplies a (..., K) by b (N, K) transposed, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.format.block[1] == 1 or b.format.block[1] == 1:
        raise Fp4ReproError("matmul contracts the last axis, but an operand's blocks run down its columns")
    exact = a.format.exact_in_bf16 and b.format.exact_in_bf16
    left, right = (q.operand() if exact else q.dequantize(torch.float32) for q in (a, b))
    scale = a.tensor_scale * b.tensor_scale if exact else 1.0
    return product(left.reshape(-1, a.shape[-1]), right.T, scale, dtype, accumulate).view(*a.shape[:-1], -1)
