"""Studies of the rest of the stack in 4 bits (arXiv 2607.04422), each a subcommand that writes rows."""
