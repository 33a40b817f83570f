"""KV cache: which sequence owns which block. Each backend stores the blocks in its own layout."""
