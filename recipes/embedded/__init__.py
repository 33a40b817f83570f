"""The embedded target and draft model: data, tokenizer, training from scratch, export, prompts (`docs/training.md`)."""
