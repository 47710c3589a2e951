"""Evaluations by lm-eval of any model here or on the hub, in BF16, FP8, MXFP4 or NVFP4 arithmetic."""
