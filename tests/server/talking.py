"""Tokenizers with chat templates that support tools and reasoning, for models that were not trained for either. The
output of such a model is forced by structured output, or it comes from a `WritingTarget`."""

import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.tokens.text import load_tokenizer
from slipstream.zoo import target_dir
from tests.targets.toy import ToyTarget

TEMPLATE = """
{%- if tools %}<|user|>
Tools: {{ tools | tojson }} as <tool_call><|end|>
{% endif %}
{%- for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>
{{ '[' + message.tool_call_id + '] ' if message.role == 'tool' else '' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{ '<think>\\n' if enable_thinking else '' }}{% endif %}"""

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"city": "Rome", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
USER: list[Any] = [{"role": "user", "content": "How is the weather?"}]


def talking_tokenizer(folder: Path, template: str = TEMPLATE) -> Any:
    """Return the embedded tokenizer with another chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(target_dir() / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


class WritingTarget(ToyTarget):
    """A target that writes `text` (ids) and then `eos`. If structured output forbids the next token, it writes the most
    likely token of a toy target."""

    def __init__(self, text: Seq[int], vocab: int, eos: int):
        super().__init__(vocab, order=1, sharpness=1.0, eos_ids=(eos,))
        self.text = [*text, eos]

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        out = super().run(seqs, draft, taps)
        for b, seq in enumerate(seqs):
            depths = [0, *(draft.depths[i] for i in draft.nodes(b))]
            for row, depth in enumerate(depths, start=draft.splits[b] + b):
                out.logits[row, self.text[min(len(seq.output) + depth, len(self.text) - 1)]] += 40
        return out
