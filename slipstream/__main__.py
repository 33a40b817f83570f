"""The command `slipstream`, and `python -m slipstream`."""

import os
import signal


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback in the half second of its imports, too."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else it is ignored, as in a script's background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from slipstream.cli.main import main as command

    signal.signal(signal.SIGINT, usual)
    command()


if __name__ == "__main__":
    main()
