"""`slipstream serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.cli import render
from slipstream.cli.engines import EngineOptions, make_vllm_server, refuse_ignored
from slipstream.cli.loading import (
    check_arguments,
    describe_target,
    load_tokenizer_of,
    pause_collection,
    quieten,
    suggest_model,
)
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import ModelOptions
from slipstream.core.params import check_number
from slipstream.core.strict import JsonObject
from slipstream.drafters.draft_plan import DraftPlan
from slipstream.errors import ParameterError, ServedError
from slipstream.measure.vllm_server import BESIDE_SPECULATION, LOADING, find_interpreter
from slipstream.settings import METRICS_PREFIXES, TRANSFORMERS, one_of

if TYPE_CHECKING:
    from slipstream.checkpoints.checkpoint import Checkpoint
    from slipstream.targets.described import Described

LISTENING = ("host", "port", "api_key", "served_model_name", "max_batch", "grace_seconds")
"""Options of our server that vLLM's server has, too."""
_LIMITS = "Limits"
KEY = "SLIPSTREAM_API_KEY"


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, whom it answers, and its limits."""

    PANEL: ClassVar[str] = "Server"
    host: str = option("127.0.0.1", "Address on which the server listens.")
    port: int = option(8000, "Port on which the server listens; 0: any free port.", min=0, max=65535)
    api_key: list[str] | None = option(None, f"API key that requests must send; repeatable. Default: ${KEY}.")
    allowed_origins: list[str] | None = option(
        None, "Origin of web pages that may send requests (CORS), as http://localhost:3000; repeatable. '*': any."
    )
    served_model_name: str | None = option(None, "Name of the model in requests and answers.", shown="--target")
    tool_format: str = option("auto", "Format of the model's tool calls: hermes, qwen, ..., none (docs/server.md).")
    reasoning: str = option("auto", "Markers around the model's reasoning, as in '<think> </think>'; or none.")
    metrics_prefix: str = option(
        METRICS_PREFIXES[0], "Prefix of the names in /metrics: slipstream, or vllm for dashboards of vLLM."
    )
    access_log: bool = option(False, "Log each request on standard output.")
    max_batch: int = option(16, "Maximum number of requests in one step.", panel=_LIMITS, min=1)
    max_waiting: int = option(256, "Maximum number of waiting requests; more are refused (429).", panel=_LIMITS, min=0)
    max_body: int = option(8 << 20, "Maximum size of a request, in bytes.", panel=_LIMITS, min=1)
    max_per_key: int = option(0, "Maximum number of requests of one API key; 0: no limit.", panel=_LIMITS, min=0)
    engine_timeout: float = option(
        300.0, "Seconds without a step, while requests run, after which the engine is stopped.", panel=_LIMITS
    )
    first_token_seconds: float = option(120.0, "Seconds that a request may wait for its first token.", panel=_LIMITS)
    total_seconds: float = option(1800.0, "Seconds that a request may take.", panel=_LIMITS)
    grace_seconds: float = option(30.0, "Seconds that running requests have to finish after SIGTERM.", panel=_LIMITS)

    def __post_init__(self) -> None:
        for name in ("engine_timeout", "first_token_seconds", "total_seconds"):
            check_number(name, getattr(self, name), 0.0, 1e9, open_low=True)
        check_number("grace_seconds", self.grace_seconds, 0.0, 1e9)
        one_of("metrics_prefix", self.metrics_prefix, METRICS_PREFIXES)
        if not all(re.fullmatch("[!-~]+", key) for key in self.keys):
            raise ParameterError(
                "an API key is empty, or contains a space, a line break or a character outside ASCII",
                why="clients send the key in an HTTP header, which cannot contain these",
                fix="give another key, or leave --api-key out",
            )
        for origin in self.allowed_origins or ():
            if origin not in ("*", "null") and (origin.partition("://")[2] == "" or origin.count("/") != 2):
                raise ParameterError(
                    f"{origin!r} is not an origin of web pages", fix="write http://localhost:3000, or '*'"
                )
        if self.max_per_key and not self.keys:
            raise ParameterError("--max-per-key was given, but requests need no API key", fix="add --api-key")

    @property
    def keys(self) -> tuple[str, ...]:
        """API keys; a request must have one of them. Empty: requests need no key."""
        return tuple(self.api_key or ([os.environ[KEY]] if KEY in os.environ else ()))


@expand_groups
def serve(models: ModelOptions, server: ServerOptions, engine_options: EngineOptions) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    One process runs the model, another answers requests. The first Ctrl-C or SIGTERM lets running requests finish, the
    second stops at once. docs/server.md describes the fields of requests, the metrics and the limits.

    With --engine vllm, vLLM's server runs the models instead, and can use Slipstream's lookup drafters.
    """
    if engine_options.vllm:
        return serve_vllm(models, server, engine_options)
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ParameterError(f"{', '.join(missing)} is not installed", fix="pip install 'slipstream[server]'")
    quieten()
    from slipstream.server.serving import open_listener

    with open_listener(server.host, server.port) as listening:  # opened before the model is loaded
        with pause_collection():
            from slipstream.server.app import create_app
            from slipstream.server.engine_process import RemoteEngine
            from slipstream.server.reply_format import ReplyFormat
            from slipstream.server.service import Limits, Service
            from slipstream.server.serving import Server

        text = load_tokenizer_of(models)
        replies = ReplyFormat.of(text, server.tool_format, server.reasoning)
        engine = RemoteEngine(partial(check_model, models, server.max_batch), server.engine_timeout)
        try:
            limits = Limits(
                body=server.max_body,
                waiting=server.max_waiting,
                per_key=server.max_per_key,
                first_token_seconds=server.first_token_seconds,
                total_seconds=server.total_seconds,
            )
            name = server.served_model_name or models.target
            service = Service(
                name, engine.facts, text, engine.streams, limits, server.keys, replies, server.metrics_prefix
            )
            address = f"http://{server.host}:{listening.getsockname()[1]}"
            render.line(f"serving {name} ({models.method} drafter) at {address}/v1, with a page at {address}/")
            suggest_model(models)
            if engine.facts.sampling:
                from slipstream.checkpoints.generation_defaults import describe_sampling

                render.line(describe_sampling(engine.facts.sampling))
            app = create_app(service, server.allowed_origins or ())
            running = Server(app, service, server.grace_seconds, render.line, server.access_log)
            engine.on_end = running.end
            if engine.over:
                running.end()
            running.run(sockets=[listening])
            if engine.over and engine.streams.dead is not None:
                raise engine.streams.dead
        finally:
            engine.stop()


def check_model(models: ModelOptions, max_batch: int) -> tuple[Checkpoint | Described, DraftPlan, JsonObject]:
    """Run the checks that need no weights, and return (target, draft, arguments) for `LLM`. This function imports
    torch, so it runs in the engine's process."""
    quieten()
    named, draft, arguments = check_arguments(models)
    target = describe_target(models, named)
    draft = draft.ready(target, models.of_draft())
    arguments |= {"kv_tokens": kv_tokens(models, target, draft, max_batch), "max_batch": max_batch}
    return target, draft, arguments


def kv_tokens(models: ModelOptions, target: Described, draft: DraftPlan, max_batch: int) -> int | None:
    """Choose the size of the KV cache in tokens: the user's, else `max_batch` full contexts, or as many tokens as fit;
    and print the memory of models and cache. For a model that transformers runs: the user's number, or None for a cache
    that grows. `LLM` refuses a cache that does not fit."""
    from slipstream.targets.described import plan

    if models.device_map is not None:
        return models.kv_tokens
    wanted = target.usual_kv_tokens(max_batch)
    if target.runner == TRANSFORMERS or wanted is None:
        return models.kv_tokens
    needed = plan(target, wanted, *draft.loads, weights=True, sequences=max_batch)
    if models.kv_tokens is None and needed.most_tokens >= target.config.context:
        needed = replace(needed, kv_tokens=min(wanted, needed.most_tokens))
    render.err().print(render.facts_table(render.memory(needed)))
    return needed.kv_tokens


def serve_vllm(models: ModelOptions, server: ServerOptions, engine: EngineOptions) -> None:
    """Run vLLM's server until a signal or until it ends; its output goes to standard error. Raises ServedError if it
    does not start, or ends by itself."""
    from slipstream.server.serving import open_listener

    refuse_ignored(server, type(server), LISTENING)
    if len(server.keys) > 1:
        raise ParameterError("several API keys were given", why="vLLM's server accepts one", fix="give one --api-key")
    more: JsonObject = {"served_model_name": server.served_model_name or models.target}
    if server.max_batch != type(server).max_batch:
        more["max_num_seqs"] = server.max_batch
    launched = make_vllm_server(models, engine, more)
    speculates = "speculative_config" in launched.values
    python = find_interpreter(engine.vllm_python)
    check_memory(models)
    with open_listener(server.host, server.port) as probe:
        port = probe.getsockname()[1]
    if speculates:
        render.line(BESIDE_SPECULATION)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with launched.process(python, "vLLM", server.host, port, lambda line: print(line, file=sys.stderr),
                      "".join(server.keys)) as process:  # fmt: skip
        process.at_end(ended.set)
        place = process.ready(LOADING, ended)
        if place:
            how = json.dumps(launched.values["speculative_config"]) if speculates else "plain decoding"
            render.line(f"vLLM serves {more['served_model_name']} at {place}: {how}")
            ended.wait()
        if process.process.poll() is not None:
            raise ServedError(f"vLLM's server ended by itself, with code {process.process.returncode}",
                              why=f"it printed:\n{process.tail()}")  # fmt: skip
        process.stop(server.grace_seconds)


def check_memory(models: ModelOptions) -> None:
    """Raise LoadError if vLLM on a CPU has not enough memory for a local checkpoint. Other cases are not checked."""
    import torch

    from slipstream.targets.describe import describe
    from slipstream.targets.described import check_memory

    target = Checkpoint.open(models.target)
    if torch.cuda.is_available() or not target.is_local:
        return
    settings = LoadSettings(executor="torch", dtype=models.dtype, device="cpu")
    draft = DraftPlan.of(models.draft_model if models.draft_is_read else None)
    check_memory(describe(target, settings), 0, *draft.ready(None, settings.of_draft()).loads)
