"""Studies of the rest of the stack in 4 bits, beside the linears."""
