"""Side-by-side runs of Slipstream against other systems: `python -m benchmarks`, or `make bench`."""
