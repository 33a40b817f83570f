"""Draft heads for SmolLM2-135M-Instruct, trained on a GPU (`docs/training.md`)."""
