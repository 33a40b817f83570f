"""Draft heads: small networks that read the target's hidden states.

    eagle_head.py    EAGLE-1, -2 and -3: one decoder layer that predicts the target's next features
    eagle_*.py       their checkpoints (format), weights shared with the target (fit), state of each sequence (rows) and
                     interface to the backends (runtime)
    dflash_head.py   DFlash, DSpark: layers that read the target's states and predict a block; dflash_format.py as above
    medusa_heads.py  Medusa: K heads, each of which predicts one position further; medusa_*.py as above
    recognition.py   which kind of head a checkpoint holds; vocabulary.py: whether it fits the target's vocabulary

The torch modules here are used for training and inference. The drafting strategies are in `drafters`.
"""
