"""Which contenders are timed on which passes, and which ratios must be reached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

ROWS = (1, 8, 16)
PAST = 128
"""Tokens in the KV cache before the rows that are timed."""
MOST_ROWS = 32
"""Largest number of rows that can be timed after `PAST` tokens."""
PROMPT = 512
"""Tokens of the timed prompt; its pass begins with an empty cache and computes the logits of the last token."""


@dataclass(frozen=True)
class Contender:
    """One backend with its settings.

    worker   "now" (this checkout), "before" (the checkout given by --before) or "llamacpp".
    options  arguments of the worker's `load`.
    """

    label: str
    worker: str
    options: dict[str, Any] = field(default_factory=dict)


CONTENDERS = {
    "before_openvino": Contender("before: OpenVINO, float32", "before", {"executor": "openvino"}),
    "before_openvino_int8": Contender(
        "before: OpenVINO, int8", "before", {"executor": "openvino", "quantize": "int8"}),
    "before_native": Contender("before: native, float32", "before", {"executor": "native"}),
    "native": Contender("native, float32", "now", {"executor": "native"}),
    "native_w8a16": Contender("native, w8a16", "now", {"executor": "native", "quantize": "w8a16"}),
    "native_w8a8": Contender("native, w8a8", "now", {"executor": "native", "quantize": "w8a8"}),
    "native_bfloat16": Contender("native, bfloat16", "now", {"executor": "native", "dtype": "bfloat16"}),
    "native_one_thread": Contender("native, float32, threads=1", "now", {"executor": "native", "threads": 1}),
    "llamacpp_q8_0": Contender("llama.cpp, Q8_0", "llamacpp", {"kind": "Q8_0"}),
    "llamacpp_f16": Contender("llama.cpp, F16", "llamacpp", {"kind": "F16"}),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Contenders that are loaded together and timed in interleaved rounds.

    model   name in `models.MODELS`.
    passes  contender -> the passes to time: a number of rows after `PAST` tokens, or `PROMPT`.
    busy    number of processes that compute without pause at the same time.
    weight  share of the time, relative to the other groups.
    """

    label: str
    model: str
    passes: dict[str, tuple[int, ...]]
    busy: int = 0
    weight: float = 1.0


LLAMA_CONTENDERS = (
    "before_openvino", "before_openvino_int8", "before_native", "native", "native_w8a16", "native_w8a8",
    "native_bfloat16", "llamacpp_q8_0", "llamacpp_f16",
)  # fmt: skip
GPT2_CONTENDERS = ("before_openvino", "before_openvino_int8", "native", "native_w8a16", "native_w8a8")

GROUPS = {
    "14M": Group("14M", "14M", dict.fromkeys(LLAMA_CONTENDERS, ROWS)),
    "110M": Group("110M", "110M", dict.fromkeys(LLAMA_CONTENDERS, ROWS), weight=1.5),
    "1B": Group(
        "1.1B", "1B",
        dict.fromkeys(("before_openvino_int8", "native_w8a16", "native_w8a8"), ROWS)
        | dict.fromkeys(("native", "native_bfloat16"), (*ROWS, PROMPT)),
        weight=3,
    ),
    "gpt2": Group("GPT-2, stored in bfloat16", "gpt2", dict.fromkeys(GPT2_CONTENDERS, (1, 8))),
    "gpt2-float32": Group(
        "GPT-2, stored in float32", "gpt2-float32", dict.fromkeys(("before_openvino", "native"), (1, 8)), weight=0.5),
    "busy": Group(
        "14M with two busy processes", "14M", dict.fromkeys(("native", "native_one_thread"), (1, 8)), busy=2,
        weight=0.5),
}  # fmt: skip

REFERENCES = ("before_openvino", "native", "before_openvino_int8", "before_native")
"""Reference for times and logits in the tables: the first of these that was measured."""


@dataclass(frozen=True)
class Figure:
    """A ratio that must not exceed `reach`: seconds of `top` over seconds of `bottom`, for one pass of one group."""

    group: str
    top: str
    bottom: str
    rows: int
    reach: float


@dataclass(frozen=True)
class FirstUse:
    """Seconds of the first use that must not be exceeded; cached: with the compiled kernels on disk."""

    cached: bool
    reach: float


def _figures(group: str, top: str, bottom: str, reach: dict[int, float]) -> list[Figure]:
    return [Figure(group, top, bottom, rows, most) for rows, most in reach.items()]


FIGURES: list[Figure] = [
    *(figure for group in ("14M", "110M", "1B") for figure in (
        *_figures(group, "native_w8a16", "before_openvino_int8", {1: 0.8, 8: 0.9, 16: 1.0}),
        *_figures(group, "native_w8a8", "before_openvino_int8", {1: 0.75, 8: 0.75, 16: 0.8}),
    )),
    *_figures("110M", "native_w8a16", "llamacpp_q8_0", {1: 0.95, 8: 0.4}),
    *_figures("110M", "native_w8a8", "llamacpp_q8_0", {1: 0.95, 8: 0.4}),
    *_figures("1B", "native_bfloat16", "native", {8: 0.85, 16: 0.65, PROMPT: 0.6}),
    *_figures("gpt2", "native", "before_openvino", {1: 0.8, 8: 0.8}),
    *_figures("gpt2-float32", "native", "before_openvino", {1: 0.8, 8: 0.8}),
    *_figures("gpt2", "native_w8a16", "before_openvino_int8", {1: 0.8, 8: 0.8}),
    *_figures("gpt2", "native_w8a8", "before_openvino_int8", {1: 0.8, 8: 0.8}),
    *_figures("busy", "native", "native_one_thread", {1: 1.2, 8: 1.2}),
]  # fmt: skip

FIRST_USES = [FirstUse(cached=False, reach=25.0), FirstUse(cached=True, reach=0.5)]


def pass_label(rows: int) -> str:
    if rows == PROMPT:
        return f"prompt of {PROMPT} tokens"
    return "1 row" if rows == 1 else f"{rows} rows"


def figure_label(figure: Figure) -> str:
    top, bottom = CONTENDERS[figure.top].label, CONTENDERS[figure.bottom].label
    return f"{GROUPS[figure.group].label}, {pass_label(figure.rows)}: {top} / {bottom}"


def first_use_label(figure: FirstUse) -> str:
    where = "compiled kernels on disk" if figure.cached else "empty cache"
    return f"first use of the native backend, float32 target and int8 draft, {where}"


def chosen(groups: Iterable[str], contenders: Iterable[str], rows: Iterable[int], prompt: bool) -> dict[str, Group]:
    """The named groups, with only these contenders and passes."""
    names, wanted = set(contenders), {*rows, *([PROMPT] if prompt else [])}
    extra = tuple(sorted(wanted - {*ROWS, PROMPT}))  # numbers of rows that no group has apply to all groups
    selection = {}
    for key in groups:
        passes = {
            name: (*(rows for rows in passes if rows in wanted), *extra)
            for name, passes in GROUPS[key].passes.items()
            if name in names
        }
        if any(passes.values()):
            selection[key] = replace(GROUPS[key], passes={name: each for name, each in passes.items() if each})
    return selection
