"""How fast and how small: benchmarks that state ratios taken in one run."""
