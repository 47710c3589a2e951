"""Warmup-stable-decay learning rate (WSD; arXiv 2404.06395), a pure function of the step.

Linear warmup from zero, then the peak, then a fall to a share of it over the last steps. The NVFP4
paper states peak, end and the share of the fall, but neither warmup nor shape; `minus-sqrt` is the
shape that reports of later models of the same family name.
"""

import math

from fp4repro.config import Training


def learning_rate(step: int, settings: Training) -> float:
    """Learning rate of step `step`, counted from 0; the last step has the final rate."""
    warmup = round(settings.warmup_fraction * settings.steps)
    decay = round(settings.decay_fraction * settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step + 1 - (settings.steps - decay)) / decay if decay else 0.0
    if done <= 0:
        return settings.learning_rate
    fallen = math.sqrt(done) if settings.decay_shape == "minus-sqrt" else done
    return settings.learning_rate * (1 - (1 - settings.final_learning_rate_ratio) * fallen)
