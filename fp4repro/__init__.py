"""fp4repro: benchmark and reproducibility suite for 4-bit (NVFP4) LLM pretraining.

The public names; each is documented where it is defined.
"""

from fp4repro.attention import fp4_attention
from fp4repro.core.formats import FP8, MXFP4, MXFP8, NVFP4, BlockFormat
from fp4repro.core.hadamard import hadamard
from fp4repro.core.products import matmul
from fp4repro.core.quantize import NonFiniteError, fake_quantize, quantize
from fp4repro.core.random import RandomKey
from fp4repro.core.tensor import QuantizedTensor
from fp4repro.errors import Fp4ReproError
from fp4repro.layers import Conversion, QuantLinear, convert, set_step
from fp4repro.recipes import AttentionRecipe, KeepBF16, Recipe, recipe

__all__ = [
    "FP8",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "AttentionRecipe",
    "BlockFormat",
    "Conversion",
    "Fp4ReproError",
    "KeepBF16",
    "NonFiniteError",
    "QuantLinear",
    "QuantizedTensor",
    "RandomKey",
    "Recipe",
    "convert",
    "fake_quantize",
    "fp4_attention",
    "hadamard",
    "matmul",
    "quantize",
    "recipe",
    "set_step",
]
