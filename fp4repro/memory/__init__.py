"""How much memory a recipe takes: operands, what waits for the backward, and the states of training."""
