"""The native CPU backend: our own kernels, compiled by Numba for this processor.

`kernels` holds everything that is compiled. `packed_weights` packs checkpoints for the kernels, `threads` owns the
worker threads, and `paged` the KV cache and the arguments of every kernel call. `native_executor` runs decoders,
`native_heads` draft heads.
"""
