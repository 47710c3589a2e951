"""Layers that take a recipe, and putting them into a model."""

from fp4repro.layers.convert import Conversion, convert, set_step
from fp4repro.layers.linear import QuantLinear

__all__ = ["Conversion", "QuantLinear", "convert", "set_step"]
