"""Runs the application: a socket, uvicorn, and what signals do.

The first SIGTERM or SIGINT stops new requests; running requests may end within the grace time, then they end with an
error. The second signal stops at once.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from slipstream.errors import EngineError, ParameterError
from slipstream.host.turns import short_turns
from slipstream.server.service import Service

REPORTED = 10
"""Seconds between two lines about the work."""
SENT = 1.0
"""Seconds after the grace time in which the errors of ended requests are sent."""


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that nobody else has. Raises ParameterError if the address is in use or is none of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that asyncio sets TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)  # SO_REUSEADDR lets several bind, but one listen
    except OSError as fault:
        listener.close()
        raise ParameterError(
            f"the server cannot listen at {host}:{port} ({fault.strerror})",
            fix="choose another --port (0: any that is free) or --host, or end the program that has it",
        ) from fault
    return listener


class Server(uvicorn.Server):
    """uvicorn, with the signals as above.

    say         prints a line about the work, every `REPORTED` seconds while there is some.
    access_log  log each request, on standard output.
    """

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        grace: float,
        say: Callable[[str], None] = lambda line: None,
        access_log: bool = False,
    ):
        async def report() -> None:
            if line := service.metrics.describe_work(REPORTED):
                say(line)

        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=access_log,
                lifespan="off",
                ws="none",
                callback_notify=report,
                timeout_notify=REPORTED,
                timeout_graceful_shutdown=max(1, round(grace + SENT)),
            )
        )
        if access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self._service, self._grace = service, grace
        short_turns()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = self._service.draining = True
        loop = asyncio.get_event_loop()
        late = EngineError(f"the server stops, and the request did not end within {self._grace:g} seconds")
        loop.call_soon_threadsafe(loop.call_later, self._grace, self._service.streams.end_all, late)

    def end(self) -> None:
        """Stop as soon as answers that are under way were sent; may be called in any thread."""
        self._service.draining = self.should_exit = True
