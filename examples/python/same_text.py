"""Decode prompts plainly and with speculation, in turns, and compare the texts and the times.

    python examples/python/same_text.py prompts.txt                              # SmolLM2, one prompt per line
    python examples/python/same_text.py prompts.txt Qwen/Qwen3-8B Qwen/Qwen3-0.6B

`slipstream bench` does the same with confidence intervals, and `slipstream verify` also tests sampled texts.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from slipstream import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", type=Path)
parser.add_argument("target", nargs="?", default="smollm2")
parser.add_argument("draft", nargs="?", default="suffix", help="a draft model, a draft head, or a drafter's name")
parser.add_argument("--max-tokens", type=int, default=64)
options = parser.parse_args()

fast = LLM(options.target, options.draft)
plain = LLM(fast.target, draft_tokens=0, tokenizer=fast.tokenizer)  # the same weights in memory
params = SamplingParams(max_tokens=options.max_tokens)
same, ratios = True, []
fast.generate("warm up", params)
for prompt in options.prompts.read_text().splitlines():
    seconds, texts = {}, {}
    for name, llm in (("plain", plain), ("fast", fast)):
        began = perf_counter()
        texts[name] = llm.generate(prompt, params)[0].token_ids
        seconds[name] = perf_counter() - began
    same &= texts["plain"] == texts["fast"]
    ratios.append(seconds["plain"] / seconds["fast"])
print(f"the same texts: {same}; median speed-up: {median(ratios):.2f}x")
sys.exit(0 if same else 1)
