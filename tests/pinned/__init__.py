"""Recorded behaviour of Slipstream: `cases` defines the requests, the JSON files hold the results, and `record` writes
them again. `tests/test_pinned_behaviour.py` repeats the requests and compares."""
