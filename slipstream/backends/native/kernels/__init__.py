"""Everything that Numba compiles. Read in this order: `records` (what kernels are told), `tiles` (inner loops), `rows`
and `products` (matrix products), `attention`, `pool` (threads), `matrices` and `layer` (a layer), `decoder`, `eagle`,
`medusa`.
"""
