"""Recorded behaviour of Slipstream: `cases` defines requests, the JSON files have their results, and `record` writes
these files. `tests/test_pinned_behaviour.py` repeats the requests and compares the results."""
