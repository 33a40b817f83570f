"""The draft heads for SmolLM2-135M-Instruct in `benchmarks/heads`, trained on a GPU."""
