"""The native CPU backend: our own kernels, compiled by Numba for the processor at hand.

`kernels` holds everything that is compiled. Around it: `weights` lays checkpoints out, `threads` owns the worker
threads, `cache` the paged KV cache, `executor` runs decoders, `eagle` and `medusa` run draft heads.
"""
