"""Real text as token files: corpus, byte-level BPE, `.bin` files, batches by seed and step."""
