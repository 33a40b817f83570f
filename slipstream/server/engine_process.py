"""The engine's process, which owns the weights. A pipe connects it to the process that answers HTTP.

    to the engine      ("submit", key, RequestSpec), ("abort", key)
    from the engine    EngineFacts or the error of loading, once; then one Report per step

Only the engine's process imports torch and reads weights; the HTTP process tokenises, and reads and writes texts.

The engine's process ends when its pipe is closed, so it never outlives the HTTP process. It ignores SIGINT and SIGTERM,
which terminals and service managers send to all processes: the HTTP process decides when it ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

from slipstream.core.strict import JsonMapping
from slipstream.engine.messages import EngineStats, Report, Streams
from slipstream.errors import EngineError, LoadError, SlipstreamError
from slipstream.host.turns import short_turns
from slipstream.server.service import EngineFacts

if TYPE_CHECKING:
    from slipstream.drafters.draft_plan import DraftArgument
    from slipstream.llm import LLM
    from slipstream.targets.describe import Model
    from slipstream.targets.described import Described

log = logging.getLogger("slipstream")

LOOK_EVERY = 0.5
"""Seconds between two checks of an engine that sends no reports."""
ENDED = "restart the server; systemd (Restart=on-failure), Docker (--restart) and Kubernetes can do this automatically"
"""The fix in error messages after the engine's process has ended."""


Arguments: TypeAlias = "tuple[Model | Described, DraftArgument, JsonMapping]"
"""Arguments of `LLM`: (target, draft, further arguments)."""


class RemoteEngine:
    """Starts a process with an engine, and holds the streams of its requests.

    model     returns the arguments of `LLM`. It is called in the new process, so it must be picklable.
    timeout   the process is killed if it sends no report for this many seconds while requests run or wait.

    Raises the errors of `model` and of loading.
    """

    def __init__(self, model: Callable[[], Arguments], timeout: float = 300.0):
        self._timeout = timeout
        self._stopped = False
        self.over = False
        """Whether the process has died."""
        self.on_end: Callable[[], None] = lambda: None
        """Called in a thread when the process has died."""
        self.streams = Streams(partial(self._send, "submit"), partial(self._send, "abort"))
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks
        self._pipe, child_end = context.Pipe()
        self.process = context.Process(
            target=run_engine, args=(child_end, model), name="slipstream-engine", daemon=True
        )
        self.process.start()
        child_end.close()  # so that the pipe closes when the process ends
        self.facts = self._wait_until_loaded()
        threading.Thread(target=self._hand_out_reports, name="slipstream-reports", daemon=True).start()

    def _wait_until_loaded(self) -> EngineFacts:
        try:
            message = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise LoadError(
                f"the engine's process ended while it loaded the model (exit code {self.process.exitcode})",
                why="it may have been killed because memory ran out",
                fix="read the system's log, or give a smaller model",
            ) from None
        except BaseException:
            self.process.kill()
            raise
        if isinstance(message, Exception):
            self.process.join()
            raise message
        assert isinstance(message, EngineFacts)
        return message

    def stop(self) -> None:
        self._stopped = True
        self.process.kill()
        self.process.join()
        self._pipe.close()  # closed last: until the process has ended, a thread may wait for the pipe

    def _send(self, *command: object) -> None:
        try:
            self._pipe.send(command)
        except OSError as fault:
            raise EngineError("the engine's process has ended", fix=ENDED) from fault

    def _hand_out_reports(self) -> None:
        """Pass reports to the streams until the process ends, then an error with its reason. Kill the process if its
        engine has stopped or does not answer."""
        what = "the engine's process has ended"
        looks = 0  # counted in looks: this process may have been suspended, too
        try:
            while True:
                if not self._pipe.poll(LOOK_EVERY):
                    looks = looks + 1 if self.streams else 0
                    if looks * LOOK_EVERY >= self._timeout:
                        what = f"the engine did not answer for {self._timeout:g} seconds, so it was stopped"
                        self.process.kill()
                    continue
                report, looks = self._pipe.recv(), 0
                self.streams.deliver(report)
                if report.dead is not None:
                    self.process.kill()
        except (EOFError, OSError):
            self.process.join()
        if not self._stopped:
            fault = EngineError(f"{what} (exit code {self.process.exitcode})", fix=ENDED)
            self.streams.deliver(Report([], EngineStats(), fault))
            self.over = True
            self.on_end()


def run_engine(pipe: Connection, model: Callable[[], Arguments]) -> None:
    """Load the model, then run the commands of the pipe: the main function of the engine's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    short_turns()
    try:
        target, draft, options = model()
        from slipstream.engine.engine_thread import EngineThread
        from slipstream.llm import LLM

        llm = LLM(target, draft, **options)
    except Exception as fault:
        known = isinstance(fault, SlipstreamError)
        pipe.send(fault if known else LoadError(f"the model could not be loaded ({type(fault).__name__}: {fault})"))
        return
    try:
        pipe.send(describe_engine(llm))
    except OSError:
        os._exit(0)  # the HTTP process ended during loading
    engine = EngineThread(llm.engine(), llm.prepare, pipe.send)
    calls: dict[str, Callable[..., None]] = {"submit": engine.submit, "abort": engine.abort}
    while True:
        try:
            name, *arguments = pipe.recv()
            calls[name](*arguments)
        except EngineError:
            log.info("a request came after the engine had stopped, which was reported before")
        except (EOFError, OSError):
            os._exit(0)  # the HTTP process has ended or closed the pipe: nothing is left to save


def describe_engine(llm: LLM) -> EngineFacts:
    """Collect the facts about an `LLM` for a process without weights."""
    from slipstream.engine.engine_thread import kv_blocks

    runtime = llm.target.capabilities.runtime
    return EngineFacts(
        llm.target.vocab_size,
        llm.target.context,
        llm.max_batch,
        llm.drafter.name,
        llm.rule.name,
        llm.most_draft_tokens,
        "" if runtime is None else runtime.backend,
        "" if runtime is None else runtime.weights,
        llm.target.capabilities.encoder,
        llm.defaults.sampling,
        kv_blocks(llm.target, llm.max_batch),
    )
