"""Full-Stack FP4 (arXiv 2607.04422), module by module: what each does to errors, and what it costs."""
