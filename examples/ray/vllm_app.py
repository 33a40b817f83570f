"""Run replicas of vLLM with Slipstream's drafters behind one address with OpenAI's API:

    cd examples/ray && serve run vllm_app:app

The environment of every replica needs `ray[serve]`, pyarrow, pandas, fsspec, vLLM 0.29 to 0.33 (`ray[llm]` 2.60 pins
0.29), and `pip install --no-deps git+URL`, with the address of this repository.
A request with `"vllm_xargs": {"prediction": "text"}` has a predicted output.
"""

from __future__ import annotations

from ray.serve.llm import LLMConfig, build_openai_app

config = LLMConfig(
    model_loading_config={"model_id": "llama-3.1-8b", "model_source": "meta-llama/Llama-3.1-8B-Instruct"},
    accelerator_type="H100",
    engine_kwargs={
        "max_model_len": 8192,
        "speculative_config": {
            "method": "custom_class",
            "model": "slipstream.integrations.vllm.Proposer",
            "num_speculative_tokens": 16,
        },
        "additional_config": {"slipstream": {"drafter": "suffix"}},
    },
    deployment_config={
        "autoscaling_config": {"min_replicas": 2, "max_replicas": 8, "target_ongoing_requests": 32},
        "graceful_shutdown_timeout_s": 60,
    },
)
app = build_openai_app({"llm_configs": [config]})
