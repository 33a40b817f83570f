"""The native CPU backend: our own kernels, compiled by Numba for the processor that it runs on.

`kernels` holds everything that is compiled. `packed_weights` packs checkpoints for the kernels, `threads` owns the
worker threads, `cache` the memory of the KV cache, `paged` what every call of a kernel needs. `native_executor` runs
decoders; `native_eagle` and `native_medusa` run draft heads.
"""
