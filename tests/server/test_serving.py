"""The listening socket."""

from __future__ import annotations

import asyncio
import socket

from slipstream.server.serving import bound


def test_small_pieces_of_a_stream_are_sent_at_once() -> None:
    """asyncio turns Nagle's algorithm off for sockets that say that they are TCP; else each first token would wait for
    an acknowledgement, 40 ms on Linux."""

    async def option() -> int:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken = writer.get_extra_info("socket")
            port.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bound("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(accepted, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await port

    assert asyncio.run(option())
