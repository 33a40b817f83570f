"""The engines of the comparison, one file for each. An engine runs as a long-lived process that answers JSON lines (see
`benchmarks.protocol`)."""
