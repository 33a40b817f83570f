"""Targets that transformers runs: Slipstream's loop against transformers' own."""
