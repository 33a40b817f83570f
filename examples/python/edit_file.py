"""Let a model edit a file. Most of the answer repeats the file, so the draft tokens are copied from the prompt.

python examples/python/edit_file.py account.py "Rename the class to BankAccount, and change nothing else."
"""

import argparse
import sys
from pathlib import Path

from slipstream import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path)
parser.add_argument("instruction")
parser.add_argument("--target", default="smollm2")
parser.add_argument("--max-tokens", type=int, default=512)
options = parser.parse_args()

llm = LLM(options.target, draft="suffix")
prompt = llm.chat_prompt(f"{options.instruction}\n\n{options.file.read_text()}")
for chunk in llm.stream(prompt, SamplingParams(max_tokens=options.max_tokens)):
    print(chunk.text, end="", flush=True)
    if chunk.completion is not None:
        stats = chunk.completion.stats
        print(f"\n{stats.tokens} tokens in {stats.steps} steps, {stats.tokens_per_second:.0f}/s", file=sys.stderr)
