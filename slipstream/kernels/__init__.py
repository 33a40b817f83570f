"""Kernels of our own, for what is too small for a runtime's operators: compiled by Numba, when first called, for the
processor at hand."""
