"""Layers that take a recipe, and putting them into a model."""

from fp4repro.layers.convert import Conversion, blocks_of, convert, set_step
from fp4repro.layers.linear import QuantLinear
from fp4repro.layers.lora_factors import follow_splits
from fp4repro.layers.side_path import carried_state, restore_carried_state

__all__ = [
    "Conversion",
    "QuantLinear",
    "blocks_of",
    "carried_state",
    "convert",
    "follow_splits",
    "restore_carried_state",
    "set_step",
]
