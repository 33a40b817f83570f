"""Run replicas of Slipstream's own engine behind one address with OpenAI's API:

    cd examples/ray && serve run slipstream_app:app target=/models/target draft=/models/draft replicas=2 cores=4

Every node needs `ray[serve]` and `slipstream[server]`. Without `target` and `draft` the embedded models run. Each
replica has its own queue, KV cache and counters; /metrics shows the counters of the replica that answers. Ray
distributes requests, and restarts a replica whose engine died.
"""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from slipstream import LLM, AsyncLLM
from slipstream.server.app import create_app
from slipstream.server.engine_process import describe_engine
from slipstream.server.service import Service


def app(arguments: dict[str, str]) -> Application:
    """Make the Ray application. arguments: target, draft (a checkpoint or a drafter's name), name (of the served
    model), batch (requests in one step), replicas, cores (of each replica)."""
    target = arguments.get("target", "embedded")
    draft = arguments.get("draft", "embedded")
    batch = int(arguments.get("batch", 16))

    def application() -> FastAPI:
        """Make the application, once in each replica."""
        llm = LLM(target, draft, max_batch=batch)
        service = Service(arguments.get("name", target), describe_engine(llm), llm.tokenizer, AsyncLLM(llm).streams)
        server = create_app(service)
        server.state.service = service
        return server

    @serve.deployment(
        name="slipstream",
        num_replicas=int(arguments.get("replicas", 2)),
        max_ongoing_requests=2 * batch,  # further requests wait at the proxy for the first free replica
        ray_actor_options={"num_cpus": float(arguments.get("cores", 1))},
        graceful_shutdown_timeout_s=60,
        health_check_period_s=5,
        health_check_timeout_s=10,
    )
    @serve.ingress(application)
    class Replica:
        def check_health(self) -> None:
            """Raise an error if the engine died: Ray then replaces this replica."""
            self.app.state.service.check_up()

    return Replica.bind()
