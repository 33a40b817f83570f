"""Names of the settings with which models are loaded, for the library and the command line; torch is not imported."""

from __future__ import annotations

from slipstream.errors import ParameterError, did_you_mean

BACKENDS = ("native", "torch")
"""Folders of `slipstream.backends`, those that "auto" prefers first."""

EXECUTORS = ("auto", *BACKENDS)
DTYPES = ("float64", "float32", "bfloat16", "float16")
QUANTISATIONS = ("int8", "w8a16", "w8a8")
DRAFT_QUANTISATIONS = (*QUANTISATIONS, "none")
KV_DTYPES = ("float32", "float16")
RULES = {"greedy": True, "rejection": True, "block": True, "coupled": True, "typical": False}
"""Verification rules: name -> whether the rule is lossless. The function of that name in `core.rules` decides."""


def check_executor(name: str) -> None:
    """Raise ParameterError unless there is an executor of this name."""
    if name == "openvino":
        raise ParameterError(
            "executor='openvino' was asked for, and there is no OpenVINO executor any more",
            why="it was removed because the native executor is faster",
            fix="drop the option: executor='auto' runs the native executor on a CPU",
        )
    one_of("executor", name, EXECUTORS)


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ParameterError unless `value` is one of the `known` ones."""
    if value not in known:
        raise ParameterError(f"{name} is {value!r}, must be one of {', '.join(known)}", fix=did_you_mean(value, known))
