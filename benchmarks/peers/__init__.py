"""One engine per file, each a long-lived process that answers JSON lines (see `benchmarks.protocol`)."""
