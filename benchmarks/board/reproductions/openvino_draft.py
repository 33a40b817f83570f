"""OpenVINO GenAI samples tokens that the target hardly ever draws. Arguments: folders of optimum-cli's exports of the
target and of the draft model (run in `.venv-peers`)."""

import sys, numpy as np, openvino as ov, openvino_genai as genai  # noqa: E401, I001
from collections import Counter

ids = np.arange(300, 340)[None]
inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
for name, draft in (("plain", {}), ("draft model", {"draft_model": genai.draft_model(sys.argv[2], "CPU")})):
    pipe = genai.LLMPipeline(sys.argv[1], "CPU", scheduler_config=genai.SchedulerConfig(), **draft)
    config = genai.GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.4, ignore_eos=True)
    config.num_assistant_tokens = 4 if draft else 0
    seeds = np.random.default_rng(5).integers(2**31, size=300).tolist()
    texts = [setattr(config, "rng_seed", seed) or pipe.generate(inputs, config).tokens[0] for seed in seeds]
    print(name, "second token:", Counter(text[1] for text in texts).most_common(6))
