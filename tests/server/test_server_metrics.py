"""/metrics counts what the answers say."""

from __future__ import annotations

from slipstream import LLM
from tests.server.hosting import Host, eventually, hosted

PATH = "/v1/completions"


def shown(host: Host) -> dict[str, float]:
    lines = host.http.get("/metrics").text.splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.replace('model_name="embedded"', "").replace("{}", ""): float(value) for name, value in values}


def test_metrics_add_up_to_the_statistics_of_the_answers(pair: LLM) -> None:
    with hosted(pair) as host:
        body = {"prompt": "def add(a, b):\n" * 4, "temperature": 0, "max_tokens": 20, "statistics": True}
        answers = [host.post(PATH, **body, n=n).json() for n in (1, 2)]
        stats = [choice["statistics"] for answer in answers for choice in answer["choices"]]
        eventually(lambda: shown(host)["slipstream:num_requests_running"] == 0)
        found = shown(host)
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
        assert {name: found[f"slipstream:{name}"] for name in total} == total
        per_position = [value for name, value in found.items() if "accepted_tokens_per_pos_total" in name]
        assert sum(per_position) == total["spec_decode_num_accepted_tokens_total"]
        host.post(PATH, prompt="a", guided_regex="(((")
        ended = {name: value for name, value in shown(host).items() if "request_success_total" in name}
        assert sorted(ended.values()) == [1, 3]
        assert {"length" in name or "error" in name for name in ended} == {True}


def test_a_prompt_that_is_scored_is_no_output(pair: LLM) -> None:
    with hosted(pair) as host:
        for most in (0, 3):
            body = {"prompt": "def add(a, b):\n" * 4, "max_tokens": most, "echo": True, "logprobs": 1}
            usage = host.post(PATH, **body).json()["usage"]
            assert usage["completion_tokens"] == most
        found = shown(host)
        assert found["slipstream:generation_tokens_total"] == found["slipstream:iteration_tokens_total_sum"] == 3
        assert found["slipstream:prompt_tokens_total"] == 2 * usage["prompt_tokens"]
