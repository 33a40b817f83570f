"""Records calls of vLLM's real runner for tests/integrations/test_vllm.py. Run it with vLLM's Python in the repository:

PYTHONPATH=. .venv-vllm/bin/python -m tests.vllm.record tests/integrations/data/vllm_calls.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

from slipstream.integrations.vllm import Proposer

MOST, TOKENS = 8, 40
calls: list[list[dict[str, Any]]] = []


class Recorder(Proposer):
    """Records the arguments of each call, and its drafts."""

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config)
        self._known: dict[str, int] = {}

    def propose(self, sampled: Any, lengths: Any, tokens: Any, slot_mappings: Any = None) -> Any:
        drafts = super().propose(sampled, lengths, tokens, slot_mappings)
        batch, scheduled, rows = self._runner.input_batch, self._scheduled, []
        for i, gained in enumerate(sampled):
            key, length = batch.req_ids[i], int(lengths[i])
            params = self._runner.requests[key].sampling_params
            rows.append(
                {
                    "id": key, "new": tokens[i, self._known.get(key, 0) : length].tolist(),
                    "prompt": int(batch.num_prompt_tokens[i]), "gained": len(gained),
                    "rows": scheduled.num_scheduled_tokens[key], "max_tokens": params.max_tokens,
                    "drafted": scheduled.scheduled_spec_decode_tokens.get(key, []),
                    "extra_args": params.extra_args, "draft": drafts[i],
                }
            )  # fmt: skip
            self._known[key] = length
        calls.append(rows)
        return drafts


def main() -> None:
    from vllm import LLM, SamplingParams, __version__

    from slipstream import zoo

    prompts = [entry["prompt"] for kind in ("edit", "code") for entry in zoo.prompts(kind)[:3]]
    llm = LLM(
        str(zoo.target_dir()), max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256, dtype="float32",
        speculative_config={
            "method": "custom_class", "model": "tests.vllm.record.Recorder", "num_speculative_tokens": MOST
        },
        additional_config={"slipstream": {"lengths": "full"}},
    )  # fmt: skip
    import tests.vllm.record as recorded  # vLLM imported the class from there

    plain = {"temperature": 0.0, "max_tokens": TOKENS}
    params = [SamplingParams(**plain, extra_args={"prediction": [1, 2, 3]} if i == 1 else None)
              for i in range(len(prompts))]  # fmt: skip
    recorded.calls.clear()
    llm.generate(prompts, params)
    recording = {"vllm": __version__, "most": MOST, "calls": recorded.calls}
    Path(sys.argv[1]).write_text(json.dumps(recording, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
