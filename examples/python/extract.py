"""Read one text per line, and write one JSON object per line that follows a schema. The keys and brackets that the
schema forces are drafted, and eight texts are decoded at a time. The default model is small and often wrong: name a
larger one with --target.

    echo "Ada Lovelace, born in London in 1815, wrote about computers." | python examples/python/extract.py
"""

import argparse
import json
import sys

from slipstream import LLM, SamplingParams, Structured

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "city": {"type": ["string", "null"], "maxLength": 40},
        "year": {"type": ["integer", "null"], "minimum": 0, "maximum": 2100},
    },
    "required": ["name", "city", "year"],
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="smollm2")
options = parser.parse_args()

llm = LLM(options.target, draft="suffix", max_batch=8)
lines = [line.strip() for line in sys.stdin if line.strip()]
asked = "Extract name, city and year as JSON: "
example = [
    {"role": "user", "content": asked + "In 1642 Blaise Pascal built an adding machine in Rouen."},
    {"role": "assistant", "content": '{"name": "Blaise Pascal", "city": "Rouen", "year": 1642}'},
]
prompts = [llm.chat_prompt([*example, {"role": "user", "content": asked + line}]) for line in lines]
params = SamplingParams(max_tokens=160, structured=Structured(json_schema=SCHEMA))
for completion in llm.generate(prompts, params):
    whole = completion.finish_reason == "stop"  # otherwise max_tokens has cut the object
    print(json.dumps(json.loads(completion.text)) if whole else json.dumps({"cut": completion.text}))
