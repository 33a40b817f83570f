"""Serving speed over HTTP: `make bench-serve`."""
