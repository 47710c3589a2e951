"""Transformer Engine, the one place that knows its names.

It is imported only when asked for: without a GPU its import raises, and what it raises differs by
version. Its own check of availability looks at the device alone (it is true where kernels then fail),
so it counts here only when it says no. `quantize` reads private fields, as its own tests do.
"""

from importlib import metadata

import torch
from torch import Tensor

from fp4repro.backends.backend import Backend, Results, forward_and_backward
from fp4repro.core.formats import NVFP4
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import Fp4ReproError


def version() -> str | None:
    """The installed version, without importing it; None where there is none."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def linear(x: Tensor, weight: Tensor, dy: Tensor) -> Results:
    """y, dx, dw of `te.Linear` under NVFP4BlockScaling with its defaults: the whole recipe."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import NVFP4BlockScaling

    available, reason = te.is_nvfp4_available(return_reason=True)
    if not available:
        raise Fp4ReproError(f"Transformer Engine says no: {reason}")
    features_out, features_in = weight.shape
    layer = te.Linear(features_in, features_out, bias=False, params_dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return forward_and_backward(layer, x, dy, te.autocast(enabled=True, recipe=NVFP4BlockScaling()))


def quantize(x: Tensor, tiles: bool = False, columnwise: bool = False, rht: bool = False) -> QuantizedTensor:
    """What Transformer Engine's kernels make of `x` (R, C) in BF16, nearest rounding, as our type.

    tiles       16x16 blocks
    columnwise  the copy along the rows, stored as its transpose (C, R)
    rht         Hadamard-transformed along the rows before (columnwise only)
    """
    import transformer_engine.pytorch as te

    quantizer = te.NVFP4Quantizer(
        rowwise=not columnwise,
        columnwise=columnwise,
        with_rht=rht,
        with_post_rht_amax=rht,
        with_2d_quantization=tiles,
        stochastic_rounding=False,
    )
    q = quantizer(x)
    if columnwise:
        shape, parts = x.T.shape, (q._columnwise_data, q._columnwise_scale_inv, q._amax_columnwise)
    else:
        shape, parts = x.shape, (q._rowwise_data, q._rowwise_scale_inv, q._amax_rowwise)
    codes, scales, amax = parts
    scales = scales.view(torch.uint8)[: shape[0], : shape[1] // 16].contiguous()  # padding trimmed
    return QuantizedTensor(
        codes.view(torch.uint8).view(shape[0], -1),
        scales.view(torch.float8_e4m3fn),
        amax.view(()),
        NVFP4.with_block(16, 16) if tiles else NVFP4,
        torch.Size(shape),
    )


TRANSFORMER_ENGINE = Backend("transformer_engine", linear, own_random_bits=True)
