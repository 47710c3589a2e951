"""Optimisers: AdamW with FP32 states."""

from fp4repro.optim.adamw import adamw, parameter_groups

__all__ = ["adamw", "parameter_groups"]
