"""Draft heads: small networks that read the target's hidden states. What they are, how they are read and run.

    eagle.py       EAGLE-1, -2 and -3: one decoder layer that continues the target's features
    eagle_*.py     their checkpoints (format), what a target lends them (fit), their KV cache (rows), and the two
                   runtimes (torch; the native ones are in `backends.native`)
    medusa.py      Medusa: K residual blocks that each guess one place further
    checkpoint.py  the field's checkpoint formats, recognised and read

The torch modules here are trained and run as they are; drafting strategy lives in `drafters`.
"""
