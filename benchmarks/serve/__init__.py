"""Measures the speed of servers over HTTP: `make bench-serve`."""
