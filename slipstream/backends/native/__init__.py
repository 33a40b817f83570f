"""The native CPU backend: our own kernels, compiled by Numba for the processor that it runs on.

`kernels` holds everything that is compiled. `packed_weights` packs checkpoints for the kernels, `threads` owns the
worker threads, `paged` the KV cache and what every call of a kernel needs. `native_executor` runs decoders,
`native_heads` draft heads.
"""
