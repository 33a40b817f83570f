"""What Slipstream does today, written down: `cases` says what is asked, the JSON files hold the answers, and `record`
writes them anew. `tests/test_pinned_behaviour.py` asks again and compares."""
