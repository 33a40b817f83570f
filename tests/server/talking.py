"""Tokenizers with chat templates that take tools and reasoning, for a model that was trained on neither: what it says
is forced by a form."""

import shutil
from pathlib import Path
from typing import Any

from slipstream.models.text import load_tokenizer
from slipstream.zoo import target_dir

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
    """The embedded tokenizer with another chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(target_dir() / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)
