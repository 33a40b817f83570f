"""/metrics counts what the answers say."""

from prometheus_client.parser import text_string_to_metric_families

from slipstream import LLM
from slipstream.core.stats import SpecStats
from slipstream.engine.messages import EngineStats, Report, Update
from slipstream.server.server_metrics import NOT_OF_VLLM, ServerMetrics
from tests.server.hosting import Host, eventually, hosted

PATH = "/v1/completions"


def shown(host: Host) -> dict[str, float]:
    lines = host.http.get("/metrics").text.splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.replace('{engine="0",model_name="embedded"}', ""): float(value) for name, value in values}


def test_metrics_add_up_to_the_statistics_of_the_answers(pair: LLM) -> None:
    with hosted(pair) as host:
        body = {"prompt": "def add(a, b):\n" * 4, "temperature": 0, "max_tokens": 20, "statistics": True}
        answers = [host.post(PATH, **body, n=n).json() for n in (1, 2)]
        stats = [choice["statistics"] for answer in answers for choice in answer["choices"]]
        eventually(lambda: shown(host)["slipstream:num_requests_running"] == 0)
        values = shown(host)
        total = {
            "generation_tokens_total": sum(each["tokens"] for each in stats),
            "spec_decode_num_draft_tokens_total": sum(each["proposed"] for each in stats),
            "spec_decode_num_accepted_tokens_total": sum(each["accepted"] for each in stats),
            "spec_decode_num_drafts_total": sum(each["steps"] - each["undrafted"] for each in stats),
            "prompt_tokens_total": 3 * answers[0]["usage"]["prompt_tokens"],
            "time_to_first_token_seconds_count": 3,
            "e2e_request_latency_seconds_count": 3,
            "request_prefill_time_seconds_count": 3,
            "inter_token_latency_seconds_count": sum(each["tokens"] for each in stats) - 3,
            "request_params_n_sum": 3,
            "prefix_cache_hits_total": sum(
                n * answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                for n, answer in zip((1, 2), answers, strict=True)
            ),
        }
        assert {name: values[f"slipstream:{name}"] for name in total} == total
        per_position = [value for name, value in values.items() if "accepted_tokens_per_pos_total" in name]
        assert sum(per_position) == total["spec_decode_num_accepted_tokens_total"]
        host.post(PATH, prompt="a", structured_outputs={"regex": "((("})
        ended = {name: value for name, value in shown(host).items() if "request_success_total" in name}
        assert sorted(ended.values()) == [1, 3]
        assert {"length" in name or "error" in name for name in ended} == {True}


def test_a_line_about_the_work_names_throughput_acceptance_and_queue() -> None:
    metrics = ServerMetrics("model", "vllm")
    assert metrics.describe_work(10) == ""
    metrics.take_report(Report([Update(1, ids=[5] * 30)], EngineStats(running=2, waiting=1)))
    assert metrics.describe_work(10) == "3 tokens/s, 2 running, 1 waiting"
    stats = SpecStats()
    stats.count([1, 2, 3, 4], 1, 2)
    metrics.count_choice("stop", 3, 30, stats)
    metrics.take_report(Report([], EngineStats()))
    metrics.take_report(Report([Update(2, ids=[5] * 5)], EngineStats()))
    assert metrics.describe_work(10) == "0 tokens/s, acceptance rate 25%, 0 running, 0 waiting"
    assert metrics.describe_work(10) == "", "no line without work"


def test_a_prompt_that_is_scored_is_no_output(pair: LLM) -> None:
    with hosted(pair) as host:
        for most in (0, 3):
            body = {"prompt": "def add(a, b):\n" * 4, "max_tokens": most, "echo": True, "logprobs": 1}
            usage = host.post(PATH, **body).json()["usage"]
            assert usage["completion_tokens"] == most
        values = shown(host)
        assert values["slipstream:generation_tokens_total"] == values["slipstream:iteration_tokens_total_sum"] == 3
        assert values["slipstream:prompt_tokens_total"] == 2 * usage["prompt_tokens"]


_ALL = ("model_name", "engine")
_KINDS = {
    "counter": "generation_tokens num_preemptions prefix_cache_hits prefix_cache_queries prompt_tokens "
    "spec_decode_num_accepted_tokens spec_decode_num_draft_tokens spec_decode_num_drafts",
    "gauge": "kv_cache_usage_perc num_requests_running num_requests_waiting",
    "histogram": "e2e_request_latency_seconds inter_token_latency_seconds request_decode_time_seconds "
    "request_generation_tokens request_inference_time_seconds request_params_max_tokens request_params_n "
    "request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds "
    "request_time_per_output_token_seconds time_to_first_token_seconds",
}
OF_VLLM = {name: (kind, _ALL) for kind, names in _KINDS.items() for name in names.split()} | {
    "cache_config_info": ("gauge", ("block_size", "num_gpu_blocks", "engine")),  # and every other field of CacheConfig
    "request_success": ("counter", (*_ALL, "finished_reason")),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", (*_ALL, "position")),
}
"""Metric -> (type, labels), from v1/metrics/loggers.py and v1/spec_decode/metrics.py of vLLM 0.32."""


def test_what_has_the_prefix_of_vllm_has_its_names_types_labels_and_our_numbers(pair: LLM) -> None:
    with hosted(pair, metrics_prefix="vllm") as host:
        host.post(PATH, prompt="def add(a, b):\n" * 4, temperature=0, max_tokens=20)
        eventually(lambda: shown(host)["vllm:num_requests_running"] == 0)
        families = list(text_string_to_metric_families(host.http.get("/metrics").text))
        memory = pair.target.capabilities.memory
    exported = {each.name: (each.type, each.samples) for each in families if not each.name.endswith("_created")}
    assert {name for name in exported if not name.startswith("vllm:")} == {f"slipstream:{name}" for name in NOT_OF_VLLM}
    prefixed = {name.removeprefix("vllm:"): each for name, each in exported.items() if name.startswith("vllm:")}
    assert {name: kind for name, (kind, _) in prefixed.items()} == {name: kind for name, (kind, _) in OF_VLLM.items()}
    for name, (_, samples) in prefixed.items():
        for sample in samples:
            assert set(sample.labels) - {"le"} == set(OF_VLLM[name][1]), sample
            assert sample.labels["engine"] == "0"
            assert sample.labels.get("model_name", "embedded") == "embedded"
    assert {s.labels["position"] for s in prefixed["spec_decode_num_accepted_tokens_per_pos"][1]} == set("0123")
    [cache] = prefixed["cache_config_info"][1]
    assert (cache.labels["block_size"], cache.value) == (str(memory.block), 1)
    assert int(cache.labels["num_gpu_blocks"]) == pair.max_batch * pair.target.context // memory.block
    with hosted(pair) as host:
        host.post(PATH, prompt="def add(a, b):\n" * 4, temperature=0, max_tokens=20)
        eventually(lambda: shown(host)["slipstream:num_requests_running"] == 0)
        unprefixed = {each.name: each for each in text_string_to_metric_families(host.http.get("/metrics").text)}
    for name in ("generation_tokens", "prompt_tokens", *(each for each in OF_VLLM if each.startswith("spec_decode"))):
        values = [s.value for s in unprefixed[f"slipstream:{name}"].samples if not s.name.endswith("_created")]
        assert values == [s.value for s in prefixed[name][1] if not s.name.endswith("_created")], name
