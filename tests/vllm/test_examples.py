"""vLLM's own configuration classes take the settings of `examples/`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.measure.vllm_server import ENVIRONMENT, find_interpreter
from tests.examples.served import EXAMPLES, vllm_of

if not ENVIRONMENT.exists():
    pytest.skip("vLLM is not installed: run `make vllm`", allow_module_level=True)

SHAPES = {
    "target": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "draft": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "intermediate_size": 8192,
              "tie_word_embeddings": True},
}  # fmt: skip
"""What config.json says of Llama-3.1-70B and Llama-3.2-3B."""
BOTH = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
CODE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
found = EngineArgs(**json.load(sys.stdin), skip_tokenizer_init=True).create_engine_config()
spec, most = found.speculative_config, found.scheduler_config.max_num_seqs
schedule = build_dynamic_sd_schedule_lookup(
    spec.num_speculative_tokens_per_batch_size, most, spec.num_speculative_tokens
)
print(json.dumps({
    "method": spec.method, "lengths": spec.num_speculative_tokens,
    "layers": [each.hf_config.num_hidden_layers for each in (found.model_config, spec.draft_model_config)],
    "ranks": [each.tensor_parallel_size for each in (found.parallel_config, spec.draft_parallel_config)],
    "requests": most, "schedule": [schedule[batch] for batch in (1, 32, 33, 64, 65, most)],
}))
"""


def test_vllm_takes_the_settings_of_the_70b_model(tmp_path: Path) -> None:
    given: dict[str, Any] = json.loads((EXAMPLES / "vllm-70b.json").read_text(encoding="utf-8"))
    for name, shape in SHAPES.items():
        given[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**BOTH, **shape}))
    config = tmp_path / "vllm-70b.json"
    config.write_text(json.dumps(given))
    server = vllm_of(config)
    arguments = {"model": server.choice.target, **server.values}
    run = subprocess.run(
        [str(find_interpreter(None)), "-c", CODE],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "method": "draft_model", "lengths": 5, "layers": [80, 28], "ranks": [2, 2], "requests": 96,
        "schedule": [5, 5, 2, 2, 1, 1],
    }  # fmt: skip
