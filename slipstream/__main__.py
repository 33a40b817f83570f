"""The command `slipstream`, and `python -m slipstream`."""

import os


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback in the half second of its imports, too."""
    try:
        import signal

        usual = signal.getsignal(signal.SIGINT)
        if usual is signal.default_int_handler:  # otherwise SIGINT is ignored, as in a script's background
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # some imports would swallow an exception
        from slipstream.cli.main import main as command

        signal.signal(signal.SIGINT, usual)
    except KeyboardInterrupt:
        os._exit(130)
    command()


if __name__ == "__main__":
    main()
