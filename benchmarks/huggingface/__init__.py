"""Compares Slipstream with transformers' own generation, on targets that transformers runs."""
