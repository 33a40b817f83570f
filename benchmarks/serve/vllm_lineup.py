"""`python -m benchmarks.serve --vllm` compares our drafters inside vLLM with vLLM's own drafters, and acceptance in
vLLM with acceptance in Slipstream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.serve.figures import Arms, Row, arms_of, faster, speed
from benchmarks.serve.lineup import Group, edits, fixed, prompts
from benchmarks.serve.servers import CONTEXT, STREAMS, Pair, Served, slipstream_server, vllm, vllm_by_hand
from slipstream.measure.configs import DrafterChoice
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.estimates import Estimate, estimate_ratio
from slipstream.measure.traffic import Traffic, TrafficArm

TOKENS = 64
LOADS = (1, 8)
KINDS = ("edit", "code")
PLAIN, PLUG_IN, HAND = "vLLM", "vLLM, plug-in", "vLLM by hand"
NGRAM = {f"vLLM, n-gram, K={k}": k for k in (4, 8)}
"""vLLM's own n-gram lookup with two draft lengths. For each load, the plug-in is compared with the faster of the
two."""
ONE_BY_ONE = "vLLM, no async scheduling"
"""vLLM prepares a step while the previous step runs. It cannot do so with lookup drafters, because they need the newest
tokens."""
NOVEL = "novel text"
MODELS = ("model", "suffix")
"""Drafters whose acceptance is compared, each with its default fixed draft length."""
LOOKUPS = ("suffix", "ngram", "suffix,ngram")
AROUND = {"max_model_len": CONTEXT, "max_num_seqs": STREAMS, "dtype": "float32"}


def speculating(pair: Pair, drafter: str, draft_tokens: int, **more: Any) -> Served:
    """Return vLLM's server with this drafter and draft length."""
    draft = str(pair.draft) if drafter == "model" else None
    return vllm(DrafterChoice(drafter, draft_tokens, str(pair.target), draft), AROUND | more)


def speed_servers(folder: Path, pair: Pair) -> Mapping[str, Served]:
    ngram = {name: speculating(pair, "none", 0, speculative_config=lookup(k)) for name, k in NGRAM.items()}
    return {PLAIN: speculating(pair, "none", 0), PLUG_IN: speculating(pair, "suffix", 16), **ngram}


def cost_servers(folder: Path, pair: Pair) -> Mapping[str, Served]:
    return {
        PLAIN: speculating(pair, "none", 0),
        PLUG_IN: speculating(pair, "suffix", 16),
        ONE_BY_ONE: speculating(pair, "none", 0, async_scheduling=False),
        HAND: vllm_by_hand(pair),
    }


def lookup(draft_tokens: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


def speed_arms(places: Mapping[str, Endpoint]) -> list[TrafficArm]:
    """Return arms with edits and code for each server, and with edits with a prediction."""
    arms: list[TrafficArm] = []
    for streams in LOADS:
        load = load_of(streams)
        for kind in KINDS:
            base: TrafficArm | None = None
            for name in (PLAIN, PLUG_IN, *NGRAM):
                arms.append(TrafficArm(f"{name}: {kind}", places[name], load, prompts(kind, TOKENS), base))
                base = base or arms[-1]
    small = Traffic(concurrency=1, requests=6, warm_up=6)
    base = TrafficArm("edit", places[PLUG_IN], small, edits(False))
    return [*arms, base, TrafficArm("edit, prediction", places[PLUG_IN], small, edits(True), base)]


def cost_arms(places: Mapping[str, Endpoint]) -> list[TrafficArm]:
    """Return arms that measure the cost of our launcher, and of the plug-in for text that cannot be drafted, which is
    sampled at a high temperature."""
    arms: list[TrafficArm] = []
    for streams in LOADS:
        asked = prompts("varied", TOKENS, temperature=1.5, seed=7)
        base: TrafficArm | None = None
        for name in (PLAIN, PLUG_IN, ONE_BY_ONE):
            arms.append(TrafficArm(f"{name}: {NOVEL}", places[name], load_of(streams), asked, base))
            base = base or arms[-1]
    base = TrafficArm(f"{HAND}: code", places[HAND], load_of(8), prompts("code", TOKENS))
    return [*arms, base, TrafficArm(f"{PLAIN}: code", places[PLAIN], load_of(8), prompts("code", TOKENS), base)]


def load_of(streams: int) -> Traffic:
    return Traffic(concurrency=streams, requests=max(6, 2 * streams), warm_up=streams)


def acceptance_servers(folder: Path, pair: Pair) -> Mapping[str, Served]:
    servers = {}
    for name in MODELS:
        draft = pair.draft if name == "model" else None
        servers[f"Slipstream, {name}"] = slipstream_server(
            pair, "--drafter", name, "--draft-tokens", fixed(name), draft=draft
        )
        whole = {} if name == "model" else {"additional_config": {"slipstream": {"drafter": name, "lengths": "full"}}}
        servers[f"vLLM, {name}"] = speculating(pair, name, int(fixed(name)), **whole)
    return servers


def acceptance_arms(places: Mapping[str, Endpoint]) -> list[TrafficArm]:
    load = Traffic(concurrency=1, requests=16, warm_up=1)
    return [
        TrafficArm(name, place, load, prompts("code,edit", TOKENS, distinct=False)) for name, place in places.items()
    ]


GROUPS = {
    "speed": Group(speed_servers, speed_arms),
    "cost": Group(cost_servers, cost_arms),
    "acceptance": Group(acceptance_servers, acceptance_arms),
}


def rows(runs: Mapping[str, Mapping[str, Any]], host: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return all figures. runs: results by group. host: results of `row_drafts_host.measure` by drafter."""
    speeds, costs, lengths = (arms_of(runs.get(group)) for group in GROUPS)
    rows = []
    for streams in LOADS:
        for kind in KINDS:
            row = Row(f"plug-in against vLLM's n-gram, {kind}, {counted(streams)}", "speed", 0.97)
            rows.append(_row(row, lambda s=streams, k=kind: _against_ngram(speeds, k, s)))  # type: ignore[misc]
        mean_row = Row(f"plug-in against vLLM's n-gram, mean of edits and code, {counted(streams)}", "speed", 1.15)
        rows.append(_row(mean_row, lambda s=streams: _mean_against_ngram(speeds, s)))  # type: ignore[misc]
        row = Row(f"plug-in against vLLM plain, text that cannot be drafted, {counted(streams)}", "cost", 0.97)
        rows.append(_row(row, lambda s=streams: _two(costs, f"{PLUG_IN}: {NOVEL}", f"{PLAIN}: {NOVEL}", s)))  # type: ignore[misc]
        row = Row(f"the same, against vLLM without async scheduling, {counted(streams)}", "cost", 0.97)
        rows.append(_row(row, lambda s=streams: _two(costs, f"{PLUG_IN}: {NOVEL}", f"{ONE_BY_ONE}: {NOVEL}", s)))  # type: ignore[misc]
        row = Row(
            f"predicted over measured speed-up, or the reverse, code, {counted(streams)}", "speed", 1.15, at_most=True
        )
        rows.append(_row(row, lambda s=streams: _predicted(speeds, s)))  # type: ignore[misc]
        row = Row(f"plug-in against vLLM plain, code, {counted(streams)}", "speed", 1.0)
        rows.append(_row(row, lambda s=streams: _two(speeds, f"{PLUG_IN}: code", f"{PLAIN}: code", s)))  # type: ignore[misc]
    rows.append(_row(Row("an edit with a prediction against without, 1 stream", "speed", 1.5),
                     lambda: _two(speeds, "edit, prediction", "edit", 1)))  # fmt: skip
    rows.append(_row(Row("our launcher against vLLM by hand, code, 8 streams", "cost", 0.97),
                     lambda: _two(costs, f"{PLAIN}: code", f"{HAND}: code", 8)))  # fmt: skip
    for name in MODELS:
        row = Row(f"mean acceptance length in vLLM against here, {name}", "acceptance", 0.95)
        rows.append(_row(row, lambda n=name: _lengths(lengths, n)))  # type: ignore[misc]
    for name, spent in host.items():
        row = Row(
            f"host time of a row over 100 microseconds, 64 rows of 2,000 tokens, {name}", "speed", 1.0, at_most=True
        )
        share, detail = spent["median"] / 100, f"slowest step {spent['slowest']:.0f}, first {spent['first']:.0f}"
        rows.append(row.taken(Estimate(share, share, share, ""), f"{detail} microseconds a row"))
    return rows


def counted(streams: int) -> str:
    return f"{streams} stream{'s' * (streams > 1)}"


def _row(row: Row, compute: Callable[[], tuple[Estimate, str]]) -> Row:
    try:
        return row.taken(*compute())
    except KeyError:
        row.reason = "not in this run"
        return row


def _two(arms: Arms, top: str, bottom: str, streams: int) -> tuple[Estimate, str]:
    detail = f"{speed(arms, (top, streams))} against {speed(arms, (bottom, streams))} tokens/s"
    return faster(arms, (top, streams), (bottom, streams)), detail


def _best_ngram(arms: Arms, kind: str, streams: int) -> str:
    each = {name: arms[f"{name}: {kind}", streams]["tokens_per_second"]["value"] for name in NGRAM}
    return max(each, key=lambda name: float(each[name]))


def _against_ngram(arms: Arms, kind: str, streams: int) -> tuple[Estimate, str]:
    best = _best_ngram(arms, kind, streams)
    estimate, detail = _two(arms, f"{PLUG_IN}: {kind}", f"{best}: {kind}", streams)
    return estimate, f"{detail}; {best.removeprefix('vLLM, n-gram, ')}"


def _mean_against_ngram(arms: Arms, streams: int) -> tuple[Estimate, str]:
    """Return the geometric mean over edits and code, for each pass."""
    import math

    from benchmarks.serve.figures import seconds_per_token

    sides = []
    for server in (lambda kind: _best_ngram(arms, kind, streams), lambda kind: PLUG_IN):
        times = [seconds_per_token(arms[f"{server(kind)}: {kind}", streams]) for kind in KINDS]
        sides.append([math.prod(one) ** (1 / len(one)) for one in zip(*times, strict=False)])
    many = min(map(len, sides))
    return estimate_ratio(sides[0][:many], sides[1][:many]), ""


def _predicted(arms: Arms, streams: int) -> tuple[Estimate, str]:
    """Predict the speed-up of decoding from the acceptance of the plug-in and the times of plain steps. A step takes a
    fixed time and a time for each row; both are fitted to the two loads of plain decoding."""
    few, many = (arms[f"{PLAIN}: code", load]["next"]["mean"] for load in LOADS)
    each_row = max(0.0, (many - few) / (LOADS[1] - LOADS[0]))
    drafting, plain = arms[f"{PLUG_IN}: code", streams], arms[f"{PLAIN}: code", streams]
    counters = drafting["counters"]
    steps = counters["output_tokens"] - counters["accepted_tokens"]
    rows = streams * (1 + counters["draft_tokens"] / steps)
    step, without = (few + (n - LOADS[0]) * each_row for n in (rows, streams))
    predicted = counters["tokens_per_step"] * without / step
    measured = plain["next"]["mean"] / drafting["next"]["mean"]
    off = max(predicted / measured, measured / predicted)
    return Estimate(off, off, off), f"predicted {predicted:.2f}x, measured {measured:.2f}x"


def _lengths(arms: Arms, name: str) -> tuple[Estimate, str]:
    there, here = (arms[f"{who}, {name}", 1]["mean_acceptance_length"] for who in ("vLLM", "Slipstream"))
    share = there / here
    return Estimate(share, share, share, ""), f"{there:.2f} against {here:.2f} tokens a step"
