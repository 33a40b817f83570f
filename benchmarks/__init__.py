"""Comparisons of Slipstream with other systems: `python -m benchmarks`, or `make bench`."""
