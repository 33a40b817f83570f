"""The table of figures: each figure with its bar and the measurements from which it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict, astuple, dataclass
from typing import Any

from benchmarks.markdown import beside, bound
from benchmarks.serve.lineup import EDITS, FIXED, LOADS, PEER_LOADS, off_of
from slipstream.measure.estimates import Estimate, estimate_mean, estimate_ratio

Arms = Mapping[tuple[str, int], dict[str, Any]]
"""Arms of a result by (name, number of streams)."""


@dataclass
class Row:
    """A figure. value, low, high, note: as in `Estimate`; a value of None is not measured, see `reason`. group: the
    group of servers whose run it is from."""

    figure: str
    group: str
    reach: float
    at_most: bool = False
    share: bool = False
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    detail: str = ""
    reason: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "reached" if (self.value <= self.reach if self.at_most else self.value >= self.reach) else "missed"

    @property
    def must(self) -> str:
        edge = bound(100 * self.reach, 1, " %") if self.share else bound(self.reach, unit="x")
        return f"{'at most' if self.at_most else 'at least'} {edge}"

    def show(self, value: float) -> str:
        """Format a value, never rounded to the other side of the bar."""
        return beside(100 * value, 100 * self.reach, 1, " %") if self.share else beside(value, self.reach, unit="x")

    def taken(self, estimate: Estimate, detail: str = "") -> Row:
        self.value, self.low, self.high, self.note, self.detail = *astuple(estimate), detail
        return self

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict, "must": self.must}


def arms_of(result: Mapping[str, Any] | None) -> Arms:
    return {} if result is None else {(arm["name"], arm["concurrency"]): arm for arm in result["data"]["arms"]}


def faster(arms: Arms, top: tuple[str, int], bottom: tuple[str, int]) -> Estimate:
    """Estimate the ratio of tokens per second of arm `top` over arm `bottom`, by pairs of passes. Raises KeyError if an
    arm was not measured."""
    above, below = (seconds_per_token(arms[key]) for key in (bottom, top))
    many = min(len(above), len(below))
    return estimate_ratio(above[:many], below[:many])


def seconds_per_token(arm: Mapping[str, Any]) -> list[float]:
    cells = arm["cells"]
    return [seconds / tokens for seconds, tokens in zip(cells["seconds"], cells["tokens"], strict=True)]


def speed(arms: Arms, key: tuple[str, int]) -> str:
    return f"{arms[key]['tokens_per_second']['value']:.0f}"


def rows(runs: Mapping[str, Mapping[str, Any]], probes: Mapping[str, Any], skipped: Mapping[str, str]) -> list[Row]:
    """Return all figures. runs: results by group. probes: numbers by name, see `__main__`. skipped: reasons by
    server."""
    streams, adaptive, peers = (arms_of(runs.get(name)) for name in ("streams", "adaptive", "peers"))
    rows = [_streams(streams), _best_drafter(streams)]
    for many in LOADS:
        for draft, name in (("good", "auto"), ("bad", "auto, bad draft")):
            text = f"chosen lengths, {draft} draft, against off, {counted(many)}"
            rows.append(_against(adaptive, text, name, off_of(name), many, 0.97, "adaptive"))
        rows.append(_best_fixed(adaptive, many))
    for what, text in zip(EDITS, ("an edit of 190 to 220 tokens", "a text of 480 tokens"), strict=True):
        row = Row(f"{text}, with `prediction` against without", "streams", 1.5)
        rows.append(_pair(row, streams, (f"{what}, prediction", 1), (what, 1)))
    rows += _probed(probes)
    for many in PEER_LOADS:
        text, reach = f"against vLLM, {counted(many)}", 1.0 if many == 64 else 1.2
        rows.append(_against(peers, text, "Slipstream", "vLLM", many, reach, "peers", skipped))
    text = "against llama-cpp-python's server, 1 stream"
    rows.append(_against(peers, text, "Slipstream", "llama-cpp-python", 1, 1.0, "peers", skipped))
    return rows


def counted(streams: int) -> str:
    return f"{streams} stream" + "s" * (streams > 1)


def _pair(row: Row, arms: Arms, top: tuple[str, int], bottom: tuple[str, int]) -> Row:
    missing = [key for key in (top, bottom) if key not in arms]
    if missing:
        row.reason = row.reason or "not in this run"
        return row
    return row.taken(faster(arms, top, bottom), f"{speed(arms, top)} against {speed(arms, bottom)} tokens/s")


def _against(
    arms: Arms, text: str, top: str, bottom: str, streams: int, reach: float, group: str,
    skipped: Mapping[str, str] | None = None,
) -> Row:  # fmt: skip
    row = Row(text, group, reach, reason=(skipped or {}).get(bottom, ""))
    return _pair(row, arms, (top, streams), (bottom, streams))


def _streams(arms: Arms) -> Row:
    return _pair(Row("16 streams against 1, plain", "streams", 3.0), arms, ("off", 16), ("off", 1))


def _best_drafter(arms: Arms) -> Row:
    row = Row("speculation on against off, 1 stream, best drafter", "streams", 1.6)
    rest = {"off", *(f"{what}{end}" for what in EDITS for end in ("", ", prediction"))}
    known = [name for name, streams in arms if streams == 1 and name not in rest]
    if not known:
        row.reason = "not in this run"
        return row
    each = {name: faster(arms, (name, 1), ("off", 1)) for name in known}
    best = max(each, key=lambda name: each[name].value)
    return row.taken(each[best], f"{best}; " + ", ".join(f"{name} {one.value:.2f}x" for name, one in each.items()))


def _best_fixed(arms: Arms, streams: int) -> Row:
    """Compare chosen lengths with the fastest fixed length or plain decoding, each relative to plain decoding of its
    own server. The fastest of several noisy measurements is a little too high, so this comparison is strict."""
    row = Row(f"chosen lengths against the best fixed one, {counted(streams)}", "adaptive", 0.97)
    plain = {"auto": off_of("auto")} | {f"K={k}": off_of("fixed") for k in FIXED}
    if not all((name, streams) in arms for name in (*plain, *plain.values())):
        row.reason = "not in this run"
        return row
    over = {name: _over(arms, (name, streams), (off, streams)) for name, off in plain.items()}
    chosen = over.pop("auto")
    over["off"] = [1.0] * len(chosen)
    best = min(over, key=lambda name: estimate_mean(over[name]).value)
    many = min(len(chosen), len(over[best]))
    return row.taken(estimate_ratio(over[best][:many], chosen[:many]), f"best: {best}")


def _over(arms: Arms, top: tuple[str, int], bottom: tuple[str, int]) -> list[float]:
    """Return the ratio of two arms' times per token, for each pass."""
    pairs = zip(seconds_per_token(arms[top]), seconds_per_token(arms[bottom]), strict=False)
    return [above / below for above, below in pairs]


def _probed(probes: Mapping[str, Any]) -> list[Row]:
    rows = []
    row = Row("first text, cold over warm, prefix of 768 tokens", "streams", 8.0)
    if "first" in probes:
        cold, warm = probes["first"]["cold"], probes["first"]["warm"]
        times = f"{1e3 * estimate_mean(cold).value:.1f} over {1e3 * estimate_mean(warm).value:.1f} ms"
        row.taken(estimate_ratio(cold, warm), times)
    rows.append(row)
    for name, text in (("auto", "chosen lengths"), ("off", "plain")):
        what = f"longest gap while a prompt of 768 tokens arrives, over the median gap, {text}"
        row = Row(what, "streams", 4.0, at_most=True)
        if f"gaps, {name}" in probes:
            longest, median = (probes[f"gaps, {name}"][part] for part in ("longest", "median"))
            times = f"{1e3 * estimate_mean(longest).value:.1f} over {1e3 * estimate_mean(median).value:.1f} ms"
            row.taken(estimate_ratio(longest, median), times)
        rows.append(row)
    for name, text in (("off", "plain"), ("model", "draft model"), ("suffix", "suffix tree")):
        row = Row(f"engine time outside forwards, 16 streams, {text}", "streams", 0.1, True, True)
        if name in probes.get("host", {}):
            each = probes["host"][name]
            outside = [1e-9 + one["whole"] - one["forwards"] for one in each]
            row.taken(estimate_ratio(outside, [one["whole"] for one in each]), _per_step(each))
        rows.append(row)
    for row in rows:
        row.reason = "" if row.value is not None else "not in this run"
    return rows


def _per_step(each: Seq[Mapping[str, Any]]) -> str:
    steps, whole = sum(one["steps"] for one in each), sum(one["whole"] for one in each)
    each_call = sum(one["tokens"] for one in each) / steps / 16
    return f"{1e3 * whole / steps:.2f} ms a call of {each_call:.1f} tokens a stream"
