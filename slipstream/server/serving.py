"""Runs the application: opens the socket, runs uvicorn, and handles signals.

After the first SIGTERM or SIGINT, new requests are refused. Requests that still run when the grace time is over end
with an error. The second signal stops the server at once.
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
"""Seconds between two lines about throughput and queue (`ServerMetrics.describe_work`)."""
SENT = 1.0
"""Seconds after the grace time for sending the errors of requests that were ended."""


def open_listener(host: str, port: int) -> socket.socket:
    """Open a socket that listens. Raises ParameterError if the address is in use, or not on this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY by it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)  # with SO_REUSEADDR several sockets can bind, but only one can listen
    except OSError as fault:
        listener.close()
        raise ParameterError(
            f"the server cannot listen at {host}:{port} ({fault.strerror})",
            fix="give another --port (0: any free port) or --host, or end the program that uses the port",
        ) from fault
    return listener


class Server(uvicorn.Server):
    """uvicorn's server, with the signal handling described in this module.

    say         prints a line about throughput and queue, every `REPORTED` seconds while there are requests.
    access_log  True to log each request on standard output.
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
        late = EngineError(f"the server is stopping, and the request did not finish within {self._grace:g} seconds")
        loop.call_soon_threadsafe(loop.call_later, self._grace, self._service.streams.end_all, late)

    def end(self) -> None:
        """Stop once the current answers have been sent. May be called in any thread."""
        self._service.draining = self.should_exit = True
