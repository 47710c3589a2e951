"""The hybrid Mamba-2 / feed-forward / attention language model."""

from fp4repro.models.config import ModelConfig
from fp4repro.models.hybrid import HybridModel, parameter_count

__all__ = ["HybridModel", "ModelConfig", "parameter_count"]
