"""Forward passes of the CPU backends, timed side by side (`python -m benchmarks.backend`)."""
