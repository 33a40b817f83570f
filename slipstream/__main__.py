"""`python -m slipstream` is the command `slipstream`."""

from slipstream.cli.main import main

main()
