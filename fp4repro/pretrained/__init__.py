"""Real pretrained models, by the name that a user gives."""

from fp4repro.pretrained.load import NAMED, Pretrained, Unavailable, load_pretrained

__all__ = ["NAMED", "Pretrained", "Unavailable", "load_pretrained"]
