"""vLLM writes a draft model's KV cache into states of a hybrid: FILE TARGET [DRAFT [mended]] (run in `.venv-vllm`)."""

import sys

from vllm import LLM, SamplingParams
from vllm.v1.worker import gpu_model_runner as runner

target, *draft = sys.argv[1:]  # only for EagleProposer, vLLM looks up the KV cache group of the draft layers
drafts = {"method": "draft_model", "model": draft[0], "num_speculative_tokens": 4} if draft else None
if len(draft) > 1:
    runner.EagleProposer |= runner.DraftModelProposer
options = {"dtype": "bfloat16", "enforce_eager": True, "enable_prefix_caching": False, "speculative_config": drafts}
params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
if __name__ == "__main__":
    print(LLM(target, **options).generate([{"prompt_token_ids": [7, 8, 9] * 9}], params)[0].outputs[0].token_ids)
