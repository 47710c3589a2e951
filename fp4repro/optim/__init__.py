"""Optimisers: AdamW with FP32 states, AdamW with states in NVFP4, and Muon with Newton-Schulz in NVFP4."""

from fp4repro.optim.adamw import adamw, parameter_groups
from fp4repro.optim.adopt import adopt_adamw
from fp4repro.optim.build import build_optimizer
from fp4repro.optim.muon import NVFP4Muon
from fp4repro.optim.nvfp4_adamw import NVFP4AdamW

__all__ = ["NVFP4AdamW", "NVFP4Muon", "adamw", "adopt_adamw", "build_optimizer", "parameter_groups"]
