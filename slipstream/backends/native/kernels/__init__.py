"""Everything that Numba compiles. Read in this order: `records` (the kernels' arguments), `formats` (of weights),
`vectors`, `tiles` and `block_tiles` (inner loops), `products`, `attention`, `pool` (threads), `matrices` and `layer` (a
layer), `passes`. `recurrent` is for recurrent layers, with inner loops in `state_tiles`. `stored_products` multiplies
for models that transformers runs. `rounding` quantises weights.
"""
