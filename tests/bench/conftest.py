"""Results that were measured once."""

from tests.bench.small_results import (
    bench_result as bench_result,
    contenders as contenders,
    grid_result as grid_result,
    prompt_set as prompt_set,
    tiny_llm as tiny_llm,
    trace_result as trace_result,
)
