"""Allowed values of the settings for loading models, shared by library and command line. Does not import torch."""

from slipstream.errors import ParameterError, did_you_mean

BACKENDS = ("native", "torch", "cuda")
"""Folders of `slipstream.backends`, in the order in which "auto" prefers them."""

TRANSFORMERS = "transformers"
"""The executor that runs a model by the code of transformers (`slipstream.targets.huggingface`)."""

EXECUTORS = ("auto", *BACKENDS, TRANSFORMERS)
DTYPES = ("float64", "float32", "bfloat16", "float16")
SAME, STRING = "same", "string"
DRAFT_TOKENIZERS = (SAME, STRING)
"""SAME: refuse a draft model with another tokenizer. STRING: use it (`drafters.string_match`)."""
HEAD_FORMATS = ("eagle3", "speculators", "specforge", "medusa")
"""Formats in which `slipstream convert` writes draft heads for other programs (`heads.head_convert`)."""
SMALL_HEAD = "int8"
"""Format of an EAGLE-3 or DFlash head in half the size, which only Slipstream reads."""
METRICS_PREFIXES = ("slipstream", "vllm")
RULES = ("greedy", "rejection", "block", "coupled")
"""Verification rules. The function of that name in `core.rules` decides."""

AUTO, OFF = "auto", "none"
"""AUTO: value of `executor`, of `generation_config`, and of a draft length that is chosen in each step."""

MOST_DRAFT_TOKENS = 256
"""Largest number of draft tokens of one sequence that a step verifies."""


MOST_THREADS = 256
"""Largest number of threads; equals `pool.MOST_THREADS`, for which the native kernels have counters."""


def check_threads(name: str, threads: int) -> int:
    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MOST_THREADS:
        return threads
    raise ParameterError(
        f"{name} is {threads!r}, but must be an integer from 1 to {MOST_THREADS}",
        fix="leave it out, or give the number of cores",
    )


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ParameterError(f"{name} is {value!r}, must be one of {', '.join(known)}", fix=did_you_mean(value, known))
    return value
