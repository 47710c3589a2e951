"""How close quantised values stay to the originals, format by format."""
