"""Attention whose products take quantised operands, and putting it into models."""

from fp4repro.attention.attend import fp4_attention

__all__ = ["fp4_attention"]
