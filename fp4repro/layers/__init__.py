"""Layers that take a recipe, and putting them into a model."""

from fp4repro.layers.convert import Conversion, blocks_of, convert, set_step
from fp4repro.layers.linear import QuantLinear

__all__ = ["Conversion", "QuantLinear", "blocks_of", "convert", "set_step"]
