"""Real text as token files: corpus, byte-level BPE, `.bin` files or shards, batches by seed and step."""
