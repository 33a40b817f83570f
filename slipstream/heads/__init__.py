"""Draft heads: small networks that read the target's hidden states, as torch modules for training and inference, and
their checkpoint formats. The drafting strategies are in `drafters`."""
