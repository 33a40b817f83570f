"""Simulated servers with a known speed-up: an engine that decodes step by step in simulated time, and its page at
/metrics.

The time of a step is a formula, so the speed-up over a server without speculative decoding is known exactly.
"""

from dataclasses import dataclass, field

import numpy as np

from slipstream.measure.counters import Counters, read_counters

SAMPLES = 21
OUTPUT = 150
"""Mean output tokens of a request."""


@dataclass(frozen=True)
class Served:
    """A server and its load.

    requests   number of concurrent requests in each engine.
    share      share of steps that draft.  alpha: probability that the next draft token is accepted.
    longest    draft length; with `ragged`, drafts have 1 to `longest` tokens.
    row, draft  cost of a row and of a draft token, in steps of one row; the first `knee` rows cost nothing.
    overhead   factor on the time of every step of the server with speculation, for example because asynchronous
               scheduling is off.
    varies     how much the share of steps that draft changes during the observation, 0 to 1.  surge: how much the load
               changes with it.
    noise      relative noise of the time of a step.  restart: sample at which the server has just been restarted.
    """

    kind: str = "vllm"
    requests: int = 1
    share: float = 1.0
    alpha: float = 0.8
    longest: int = 4
    ragged: bool = False
    row: float = 0.01
    draft: float = 0.0
    knee: int = 0
    overhead: float = 1.0
    varies: float = 0.0
    surge: float = 0.0
    noise: float = 0.02
    engines: int = 1
    restart: int | None = None
    seconds: float = 40.0

    def step(self, rows: int) -> float:
        """Return the seconds of a pass over `rows` rows."""
        return 0.02 * (1 + self.row * max(0, rows - self.knee))


@dataclass
class Engine:
    """Counters of an engine. SGLang and llama-server show only the counters of `ended` requests."""

    served: Served
    rng: np.random.Generator
    live: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    ended: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    at: list[float] = field(default_factory=lambda: [0.0] * 16)
    steps: float = 0.0
    plain: float = 0.0
    """Seconds that the decoded tokens would have taken without speculation, with one token per request in each step."""
    now: float = 0.0
    active: int = 1

    def __post_init__(self) -> None:
        self.left = self.rng.geometric(1 / OUTPUT, self.served.requests)
        self.each = [dict.fromkeys(NAMES, 0.0) for _ in self.left]

    def run(self, until: float) -> None:
        while self.now < until:
            self.one_step()

    def one_step(self) -> None:
        s = self.served
        wave = float(np.sin(2 * np.pi * self.now / s.seconds * 1.7))
        n = self.active = max(1, round(s.requests * (1 + s.surge * wave) / (1 + s.surge)))
        drafts = np.where(self.rng.random(n) < s.share * (1 + s.varies * wave), s.longest, 0)
        if s.ragged:
            drafts = np.minimum(drafts, self.rng.integers(1, s.longest + 1, n))
        rows = n + int(drafts.sum())
        spent = s.overhead * (s.step(rows) + 0.02 * s.draft * drafts.max())
        spent *= float(np.exp(s.noise * self.rng.standard_normal() - s.noise**2 / 2))
        self.now += spent
        self.steps += 1
        for i, drafted in enumerate(drafts):
            accepted = min(int(self.rng.geometric(1 - s.alpha)) - 1 if s.alpha else 0, int(drafted))
            accepted = min(accepted, int(self.left[i]) - 1)
            for depth in range(accepted):
                self.at[depth] += 1
            self.add(i, drafts=drafted > 0, draft_tokens=drafted, accepted=accepted, output=1 + accepted, seconds=spent)
            self.plain += (1 + accepted) / n * s.step(n)
            self.left[i] -= 1 + accepted
            if self.left[i] <= 0:
                self.add(i, requests=1)
                self.ended = {name: n + self.each[i][name] for name, n in self.ended.items()}
                self.each[i] = dict.fromkeys(NAMES, 0.0)
                self.left[i] = self.rng.geometric(1 / OUTPUT)
                self.add(i, output=1, first=1)  # the first token of the next request

    def add(self, i: int, **more: float) -> None:
        for name, n in more.items():
            self.live[name] += n
            self.each[i][name] += n


NAMES = ("drafts", "draft_tokens", "accepted", "output", "requests", "first", "seconds")
VLLM = {"drafts": "spec_decode_num_drafts_total", "draft_tokens": "spec_decode_num_draft_tokens_total",
        "accepted": "spec_decode_num_accepted_tokens_total"}  # fmt: skip


def page(engines: list[Engine], model: str = "m", speculates: bool = True) -> str:
    """Return the /metrics page of these engines, in the format of their kind of server."""
    served, lines = engines[0].served, []

    def line(name: str, value: float, **labels: str) -> None:
        told = ",".join(f'{key}="{each}"' for key, each in labels.items())
        lines.append(f"{served.kind}:{name}{{{told}}} {value}" if told else f"{served.kind}:{name} {value}")

    for number, engine in enumerate(engines):
        if served.kind == "vllm":
            who = {"model_name": model, "engine": str(number)}
            line("num_requests_running", engine.active, **who)
            line("generation_tokens_total", engine.live["output"], **who)
            line("request_success_total", engine.live["requests"], **who)
            line("time_to_first_token_seconds_count", engine.live["first"], **who)
            line("inter_token_latency_seconds_sum", engine.live["seconds"], **who)
            line("iteration_tokens_total_count", engine.steps, **who)
            for name, told in VLLM.items() if speculates else ():
                line(told, engine.live[name], **who)
            for depth, n in enumerate(engine.at[: served.longest] if speculates else ()):
                line("spec_decode_num_accepted_tokens_per_pos_total", n, position=str(depth), **who)
        elif served.kind == "sglang":
            who = {"model_name": model, "dp_rank": str(number)}
            line("num_running_reqs", engine.active, **who)
            line("generation_tokens_total", engine.ended["output"], **who)
            line("num_requests_total", engine.ended["requests"], **who)
            line("spec_accept_length", 2.0 if speculates else 0.0, **who)
            if speculates and engine.ended["drafts"]:
                line("spec_verify_calls_total", engine.ended["drafts"], **who)
        else:
            line("requests_processing", engine.active)
            line("tokens_predicted_total", engine.ended["output"])
            for name, told in VLLM.items():
                line(told, engine.ended[name] if speculates else 0)
            for depth, n in enumerate(engine.at[: served.longest] if speculates else ()):
                line("spec_decode_num_accepted_tokens_per_pos_total", n, position=str(depth))
    return "\n".join([*lines, ""])


def watched(served: Served, seed: int = 0, speculates: bool = True) -> tuple[list[Counters], float]:
    """Observe a server. Returns (the counters on its page at each sample, the true speed-up of decoding in this
    time)."""
    rng = np.random.default_rng(seed)
    samples, begun, spent, plain, warm = [], [(0.0, 0.0)] * served.engines, 0.0, 0.0, served.seconds / 4
    engines = [Engine(served, rng) for _ in begun]
    for i in range(SAMPLES):
        since = i * served.seconds / (SAMPLES - 1)
        if i == served.restart:
            engines, begun, warm = [Engine(served, rng) for _ in begun], [(0.0, 0.0)] * served.engines, 0.1 - since
        for engine in engines:
            engine.run(warm + since)
        if i:
            spent += sum(engine.now - former for engine, (former, _) in zip(engines, begun, strict=True))
            plain += sum(engine.plain - former for engine, (_, former) in zip(engines, begun, strict=True))
        begun = [(engine.now, engine.plain) for engine in engines]
        seen = read_counters(page(engines, speculates=speculates))
        assert seen is not None
        samples.append(seen)
    return samples, plain / spent
