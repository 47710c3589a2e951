"""Other libraries' NVFP4 fake quantisation, compiled, for comparison in the same process.

They are development-only extras: where one is not installed, or fails, its row says why.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp4repro import NVFP4, fake_quantize

# Their arithmetic differs from ours in a few scales; a call gone wrong differs in everything.
AGREEMENT = 0.02


def compressed_tensors() -> Callable[[Tensor], Tensor]:
    """Its calibration-time path: dynamic block scales under a global scale, then fake_quantize."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )

    def run(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 16))  # (rows, blocks, 16)
        low, high = blocks.amin(-1), blocks.amax(-1)
        whole = generate_gparam(low.amin(), high.amax())
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        return theirs(x, scale, zero, args, global_scale=whole)

    return torch.compile(run)


def torchao() -> Callable[[Tensor], Tensor]:
    """To its NVFP4 tensor and back."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def run(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)

    return torch.compile(run)


RIVALS = {"compressed-tensors": compressed_tensors, "torchao": torchao}


def rival(name: str, x: Tensor) -> tuple[Callable[[], Tensor] | None, str]:
    """The rival's fake quantisation of `x`, called once and compared with ours; or None and why not."""
    try:
        run = RIVALS[name]()
    except ModuleNotFoundError as error:
        missing = error.name.split(".")[0].replace("_", "-")
        return None, f"{name} is not installed" if missing == name else f"{name} needs {missing}"
    try:
        theirs = run(x)
    except Exception as error:  # whatever another library and the compiler raise: it differs by version
        return None, f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    ours = fake_quantize(x, NVFP4)
    apart = ((theirs - ours).norm() / x.norm()).item()
    if not apart < AGREEMENT:
        return None, f"{name} differs from NVFP4 by {apart:.2g} of the norm: not the same task"
    return (lambda: run(x)), ""
