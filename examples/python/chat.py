"""Chat with a model in the terminal, and see how many tokens each step of the target gained.

python examples/python/chat.py                               # SmolLM2
python examples/python/chat.py Qwen/Qwen3-8B Qwen/Qwen3-0.6B # a target and a draft model
"""

import argparse

from slipstream import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("target", nargs="?", default="smollm2")
parser.add_argument("draft", nargs="?", default="suffix", help="a draft model, a draft head, or a drafter's name")
options = parser.parse_args()

llm = LLM(options.target, options.draft)
params = SamplingParams(max_tokens=512, temperature=0.2, top_p=0.9)
messages: list[dict[str, str]] = []
while question := input("> "):
    messages.append({"role": "user", "content": question})
    for chunk in llm.stream(llm.chat_prompt(messages), params):
        print(chunk.text, end="", flush=True)
        if chunk.completion is not None:
            messages.append({"role": "assistant", "content": chunk.completion.text})
            print(f"\n[{chunk.completion.stats.mean_acceptance_length:.2f} tokens a step]")
