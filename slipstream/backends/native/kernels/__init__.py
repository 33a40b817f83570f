"""Everything that Numba compiles. Read in this order: `records` (the kernels' arguments), `formats` (of weights),
`vectors` and `tiles` (inner loops), `rows` and `products` (matrix products), `attention`, `pool` (threads), `matrices`
and `layer` (a layer), `decoder_pass`, `eagle_pass`, `medusa_pass`. `stored_products` is for modules of transformers.
"""
