"""`slipstream serve` as processes: how they start, stop and die."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from slipstream.server.serving import open_listener
from tests.server.hosting import alive, eventually, server
from tests.tiny_checkpoints import Tiny, clone

LONG = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
class TestProcesses:
    def test_a_killed_engine_ends_its_requests_and_the_server(self) -> None:
        with server() as (process, http, engine):
            with http.stream("POST", "/v1/completions", json=LONG) as answered:
                lines = answered.iter_lines()
                next(lines)
                os.kill(engine, signal.SIGKILL)
                rest = [line for line in lines if line]
            assert "engine_unavailable" in rest[-2]
            assert rest[-1] == "data: [DONE]"
            assert process.wait(60) == 2
            assert "the engine's process has ended (exit code -9)" in " ".join(process.stderr.read().split())

    def test_an_engine_that_does_not_answer_is_ended_and_the_server_with_it(self) -> None:
        with server("--engine-timeout", "2") as (process, http, engine):
            os.kill(engine, signal.SIGSTOP)
            hung = http.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 4})
            assert hung.status_code == 503
            assert "did not answer for 2 seconds" in hung.json()["error"]["message"]
            assert process.wait(60) == 2
            assert not alive(engine)

    def test_the_process_that_answers_has_no_torch_and_its_engine_ends_with_it(self) -> None:
        with server() as (process, http, engine):
            said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True}
            assert http.post("/v1/chat/completions", json=said).status_code == 200
            mapped = [b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes() for pid in (process.pid, engine)]
            assert mapped == [False, True]
            process.kill()
            eventually(lambda: not alive(engine))

    def test_sigterm_lets_running_requests_end_within_the_grace_time(self) -> None:
        with server("--grace-seconds", "60") as (process, http, engine):
            with http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 300}) as answered:
                lines = answered.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert '"finish_reason":"length"' in rest[-2]
            assert rest[-1] == "data: [DONE]"
            assert process.wait(30) == 0
            assert not alive(engine)

    def test_after_the_grace_time_and_at_a_second_sigterm_it_stops(self) -> None:
        for more in ((), (signal.SIGTERM,)):
            grace = "0" if not more else "1000"
            with server("--grace-seconds", grace) as (process, http, engine):
                with http.stream("POST", "/v1/completions", json=LONG | {"n": 20}) as answered:
                    lines = answered.iter_lines()
                    next(lines)
                    process.send_signal(signal.SIGTERM)
                    if more:
                        eventually(lambda: _refuses(http))
                        process.send_signal(signal.SIGTERM)
                    assert process.wait(30) == 0
                assert not alive(engine)


def _refuses(http: httpx.Client) -> bool:
    try:
        return httpx.get(f"{http.base_url}/ready").status_code == 503
    except httpx.TransportError:
        return True


def test_an_error_of_loading_is_that_of_the_other_commands(tiny: Tiny, tmp_path: Path) -> None:
    (clone(tiny.target, tmp_path / "broken") / "model.safetensors").unlink()
    command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", "-m", str(tmp_path / "broken")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_small_pieces_of_a_stream_are_sent_at_once() -> None:
    """asyncio turns Nagle's algorithm off for sockets that say that they are TCP; else each first token would wait for
    an acknowledgement, 40 ms on Linux."""

    async def option() -> int:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken = writer.get_extra_info("socket")
            port.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with open_listener("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(accepted, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await port

    assert asyncio.run(option())
