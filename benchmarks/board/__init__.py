"""The lossless board: does an engine say the same when it speculates? `python -m benchmarks.board --help`."""
