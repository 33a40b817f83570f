"""Each format of calls: recognised by what a chat template writes, read however it arrives, and enforced."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream import LLM
from slipstream.errors import ParameterError
from slipstream.grammar.compiler import compile_form
from slipstream.grammar.vocabulary import Vocabulary
from slipstream.server.call_formats import FORMATS, Calls, ToolFormat
from slipstream.server.reply import Reply
from slipstream.server.reply_format import ReplyFormat
from slipstream.server.tools import ToolUse
from slipstream.tokens.folder_tokenizer import FolderTokenizer
from tests.server.hosting import hosted
from tests.server.talking import WritingTarget

PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer", "maximum": 9},
    "sure": {"type": "boolean"}, "more": {"type": "array", "items": {"type": "string"}},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
FUNCTIONS = {"weather": SCHEMA, "now": {}}
ARGUMENTS = {"city": 'In "Rome"\n & <b>', "days": 3, "sure": True, "more": ["a", "b: c"]}
JSON = json.dumps(ARGUMENTS)
LINES = "city\n{}\n days\n3\n sure\ntrue\n more\n{}\n"


def elements(before: str, after: str, end: str) -> str:
    values = {"city": ARGUMENTS["city"], "days": "3", "sure": "True", "more": '["a", "b: c"]'}
    return "".join(f"{before}{key}{after}{value}{end}\n" for key, value in values.items())


def dsml(section: str) -> str:
    pairs = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key == "city").lower()}">'
        f"{value if key == 'city' else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in ARGUMENTS.items()
    )
    calls = f'<｜DSML｜invoke name="weather">\n{pairs}</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>'
    return f"<｜DSML｜{section}>\n{calls}\n</｜DSML｜{section}>"


def both(call: str) -> str:
    """A call of each function, in a form with {name} and {arguments}."""
    return call.format(name="weather", arguments=JSON) + call.format(name="now", arguments="{}")


OBJECTS = f'{{"name": "weather", "arguments": {JSON}}}', '{"name": "now", "arguments": {}}'
PYTHON = r"""[weather(city='In "Rome"\n & <b>', days=3, sure=True, more=["a", "b: c"]), now()]"""
ACTIONS = ", ".join(text.replace("name", "tool_name", 1).replace("arguments", "parameters") for text in OBJECTS)
GLM = "<tool_call>weather\n{}</tool_call>\n<tool_call>now\n</tool_call>".format(
    elements("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
)
HUNYUAN = "<tool_calls>\n" + re.sub("(weather|now)", r"\1<tool_sep>", GLM) + "\n</tool_calls>"
QWEN = elements("<parameter=", ">\n", "\n</parameter>")
WRITTEN = {
    "hermes": f"<tool_call>\n{OBJECTS[0]}\n</tool_call>\n<tool_call>\n{OBJECTS[1]}\n</tool_call>",
    "qwen": f"<tool_call>\n<function=weather>\n{QWEN}</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed": f"<seed:tool_call>\n<function=weather>\n{elements('<parameter=', '>', '</parameter>')}</function>\n"
            "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "glm": GLM,
    "hunyuan": f"<tool_calls>[{', '.join(OBJECTS)}]</tool_calls>",
    "hunyuan-v3": HUNYUAN,
    "hunyuan-v3-opensource": re.sub("<(/?[a-z]+_[a-z]+)>", r"<\1:opensource>", HUNYUAN),
    "kimi": "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in (("weather:0", JSON), ("now:1", "{}"))) + "<|tool_calls_section_end|>",
    "cohere": "<|START_ACTION|>[\n    " + ACTIONS.replace("{", '{"tool_call_id": "0", ', 1) + "\n]<|END_ACTION|>",
    "command-r": f"Action:\n```json\n[\n    {ACTIONS}\n]```",
    "minimax": "<minimax:tool_call>\n<invoke name=\"weather\">\n"
               f"{elements('<parameter name=' + chr(34), chr(34) + '>', '</parameter>')}</invoke>\n"
               "<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜>" + both("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
                "{arguments}\n```<｜tool▁call▁end｜>\n") + "<｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>" + both("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
                     "<｜tool▁call▁end｜>") + "<｜tool▁calls▁end｜>",
    "deepseek-v3.2": dsml("function_calls"),
    "deepseek-v4": dsml("tool_calls"),
    "gemma": '<|tool_call>call:weather{city:<|"|>In "Rome"\n & <b><|"|>,days:3,more:["a", "b: c"],sure:true}'
             "<tool_call|><|tool_call>call:now{}<tool_call|>",
    "lfm2": f"<|tool_call_start|>{PYTHON}<|tool_call_end|>",
    "pythonic": PYTHON,
    "granite": f"<|tool_call|>[{', '.join(OBJECTS)}]",
    "nemotron": f"<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL>",
    "mistral": both("[TOOL_CALLS]{name}[ARGS]{arguments}"),
    "llama": f"{OBJECTS[0].replace('arguments', 'parameters')}; {OBJECTS[1].replace('arguments', 'parameters')}",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
               f"<|constrain|>json<|message|>{JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary"
               " json<|message|>{}<|call|>",
}  # fmt: skip


def named(name: str) -> ToolFormat:
    return next(form for form in FORMATS if form.name == name)


def read(name: str, text: str, cut: int = 0) -> Reply:
    reply = Reply(FUNCTIONS, named(name).read)
    for at in range(0, len(text), cut or len(text)):
        reply.add(text[at : at + (cut or len(text))], at + (cut or len(text)) >= len(text))
    return reply


def test_texts_around_an_answer_are_no_part_of_it() -> None:
    for name, text in (
        ("cohere", "<|START_RESPONSE|>It is 3 < 4.<|END_RESPONSE|>"),
        ("cohere", "\n<|START_TEXT|>It is 3 < 4.<|END_TEXT|>"),
        ("hunyuan", "助手：It is 3 < 4."),
    ):
        assert [read(name, text, cut).content for cut in (0, 1)] == ["It is 3 < 4."] * 2
    assert read("hunyuan", "As 助手：said").content == "As 助手：said"
    plain = ReplyFormat(named("cohere")).reply("", ToolUse())
    plain.add("<|START_RESPONSE|>No tools.<|END_RESPONSE|>", True)
    assert plain.content == "No tools."


def test_ids_have_the_form_that_templates_of_the_kind_ask_for() -> None:
    earlier = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for name, pattern in (
        ("kimi", r"functions\.weather:1 functions\.now:2"),
        ("mistral", r"\w{9} \w{9}"),
        ("hermes", "call_.*"),
    ):
        reply = ReplyFormat(named(name)).reply(earlier, ToolUse(tuple(TOOLS)))
        reply.add(WRITTEN[name], True)
        assert re.fullmatch(pattern, " ".join(call.id for call in reply.calls))


def test_each_format_has_a_text_here() -> None:
    assert set(WRITTEN) == {form.name for form in FORMATS}


@pytest.mark.parametrize("name", WRITTEN)
def test_several_calls_are_read_with_the_kinds_of_their_schema(name: str) -> None:
    before = "" if name in ("llama", "pythonic", "harmony") else "I look.\n"
    for cut in (0, 1, 7):
        reply = read(name, before + WRITTEN[name], cut)
        calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
        assert calls == [("weather", ARGUMENTS), ("now", {})]
        assert reply.content == before.strip()
        assert reply.reasoning == ("Hm." if name == "harmony" else "")


NAME, VALUES = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
ITEMS = "{% for k, v in c.function.arguments | items %}"
PYTHON_CALL = NAME + "(" + ITEMS + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
TEMPLATES = {
    "hermes": "<tool_call>\n{{ c.function | tojson }}\n</tool_call>",
    "hermes, joined": '<tool_call>\n{"name": "' + NAME + '", "arguments": {{ c.function.arguments }}}\n</tool_call>',
    "qwen": f"<tool_call>\n<function={NAME}>\n{ITEMS}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n</parameter>\n{{% endfor %}}"
            "</function>\n</tool_call>",
    "glm": f"\n<tool_call>{NAME}\n{ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}</arg_value>\n"
           "{% endfor %}</tool_call>",
    "llama": '{{ raise_exception("one call") if m.tool_calls | length > 1 }}{"name": "' + NAME + '", "parameters": '
             + VALUES + "}",
    "pythonic": f"{{{{ '[' if loop.first else ', ' }}}}{PYTHON_CALL}{{{{ ']' if loop.last }}}}",
    "lfm2": f"{{{{ '<|tool_call_start|>[' if loop.first }}}}{PYTHON_CALL}"
            "{{ ']<|tool_call_end|>' if loop.last else ',' }}",
    "mistral": f"[TOOL_CALLS]{NAME}[ARGS]{VALUES}",
    "deepseek": f"{{{{ '<｜tool▁calls▁begin｜>' if loop.first }}}}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n"
                "```json\n{{ c.function.arguments if c.function.arguments is string else raise_exception('no text') }}"
                "\n```<｜tool▁call▁end｜>{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    "gemma": f"<|tool_call>call:{NAME}{{{ITEMS}{{{{ k }}}}:{{% if v is string %}}<|\"|>{{{{ v }}}}<|\"|>{{% else %}}"
             "{{ v }}{% endif %}{{ ',' if not loop.last }}{% endfor %}}<tool_call|>",
    "hunyuan": f"{{{{ '<tool_calls>[' if loop.first else ', ' }}}}{{\"name\": \"{NAME}\", \"arguments\": {VALUES}}}"
               "{{ ']</tool_calls>' if loop.last }}",
    "hunyuan-v3": f"{{{{ '<tool_calls>' if loop.first }}}}\n<tool_call>{NAME}<tool_sep>\n{ITEMS}"
                  "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
                  "{{ '</tool_calls>' if loop.last }}",
    "kimi": "{{ '<|tool_calls_section_begin|>' if loop.first }}<|tool_call_begin|>{{ c.id }}"
            f"<|tool_call_argument_begin|>{VALUES}<|tool_call_end|>"
            "{{ '<|tool_calls_section_end|>' if loop.last }}",
    "cohere": "{{ '<|START_THINKING|><|END_THINKING|><|START_ACTION|>[' if loop.first }}\n    "
              f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{NAME}", "parameters": {VALUES}}}'
              "{{ ']<|END_ACTION|>' if loop.last else ',' }}",
    "command-r": "{{ '\\nAction:\\n```json\\n[\\n' if loop.first }}{\n" + f'"tool_name": "{NAME}",\n"parameters": '
                 "{{ c.function.arguments | tojson(indent=4) }}\n}{{ '\n]```' if loop.last else ',' }}",
    "harmony": f" to=functions.{NAME}<|channel|>commentary json<|message|>{VALUES}<|call|>",
    "unknown": f"<call of {NAME} with {VALUES}>",
    "unknown, joined": "{{ '<call with ' + c.function.arguments + '>' }}",
}  # fmt: skip


def folder_tokenizer(template: str | None, special: Any = ()) -> FolderTokenizer:
    """A tokenizer of bytes, with a chat template and special tokens."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<eos>", *special)])
    return FolderTokenizer(made, {"eos_token": "<eos>"}, template, lambda: None)


def chat_template(call: str) -> str:
    """One that writes calls like this."""
    final = "<|channel|>final<|message|>" if "<|channel|>" in call else ""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'assistant' and not m.tool_calls %}" + final + "{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_recognised_by_the_call_that_the_template_writes(name: str) -> None:
    found = ReplyFormat.of(folder_tokenizer(chat_template(TEMPLATES[name])))
    assert (found.calls.name if found.calls else "unknown") == name.split(",")[0]
    assert found.joins_arguments == (name == "deepseek" or "joined" in name)


@pytest.mark.parametrize(
    ("name", "words"),
    [("hermes", "<tool_call>{...}"), ("qwen", "<tool_call><function=N><parameter=K>"), ("glm", "<tool_call><arg_key>"),
     ("granite", "<|tool_call|>[...]"), ("hunyuan", "<tool_calls>[...]"),
     ("hunyuan-v3", "<tool_calls><tool_call>N<tool_sep>"), ("kimi", "<|im_system|>tool_declare<|im_middle|>"),
     ("cohere", "Action: <|START_ACTION|> tool_name"),
     ("command-r", 'Action: tool_name'), ("harmony", "{{ '<|channel|>final<|message|>' }}")],
)  # fmt: skip
def test_a_template_that_only_says_how_to_call_is_recognised_by_its_words(name: str, words: str) -> None:
    said = f"{{% if tools %}}Write {words}{{% endif %}}" if name != "harmony" else ""
    content = f"{words}{{{{ m.content }}}}" if name == "harmony" else "{{ m.content }}"
    found = ReplyFormat.of(folder_tokenizer(f"{said}{{% for m in messages %}}{content}{{% endfor %}}")).calls
    assert found is not None
    assert found.name == name


MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"], "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    "deepseek-v3.2": ["｜DSML｜"], "gemma": ["<|tool_call>", '<|"|>', "<tool_call|>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"], "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
    "cohere": ["<|START_ACTION|>", "<|END_ACTION|>"], "hunyuan-v3": ["<tool_calls>", "<tool_call>", "<tool_sep>"],
    "harmony": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "special"), [*((name, ()) for name in WRITTEN), *((name, tuple(marks)) for name, marks in MARKS.items())]
)
def test_a_strict_call_meets_its_schema_in_the_form_of_the_model(name: str, special: tuple[str, ...]) -> None:
    """What is right already stays as the model writes it."""
    tokenizer = folder_tokenizer(chat_template(""), special)
    tools = [{"type": "function", "function": each["function"] | {"strict": True}} for each in TOOLS]
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    wrong = WRITTEN[name].replace("3", "40", 1) if "v3" not in name else WRITTEN[name].replace(">3<", ">40<")
    for text in (WRITTEN[name], wrong):
        target = WritingTarget(tokenizer.encode(text), len(tokenizer), eos)
        with hosted(LLM(target, tokenizer=tokenizer), replies=ReplyFormat.of(tokenizer, name)) as host:
            body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 600, "temperature": 0}
            body |= {"tools": tools, "parallel_tool_calls": text != wrong}
            answer = host.post("/v1/chat/completions", **body).json()["choices"][0]
            calls = [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                     for call in answer["message"]["tool_calls"]]  # fmt: skip
            assert answer["finish_reason"] == "tool_calls", answer
            for called, arguments in calls:
                jsonschema.validate(arguments, FUNCTIONS[called])
            if text != wrong:
                assert calls == [("weather", ARGUMENTS), ("now", {})]


def test_a_template_that_joins_arguments_as_text_gets_text(tmp_path: Any) -> None:
    tokenizer = folder_tokenizer(chat_template(TEMPLATES["hermes, joined"]))
    with hosted(LLM(WritingTarget([0], len(tokenizer), 256), tokenizer=tokenizer)) as host:
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = host.post("/tokenize", messages=talk, tools=TOOLS)
        assert '"arguments": {"city": "Rome"}' in tokenizer.decode(answer.json()["tokens"])


MEMBERS: list[Any] = [
    {"type": "string"}, {"type": "string", "enum": ["a", "b </x>", "'q'"]}, {"type": "string", "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"}, {"type": "string", "pattern": "b", "maxLength": 5},
    {"type": "integer", "minimum": -3, "maximum": 20}, {"type": "boolean"}, {"type": ["string", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 9}]}, {"$ref": "#/$defs/E"}, {"const": "z"},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}, {"enum": [1, "1", None]}, True,
    {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_every_text_of_a_strict_grammar_is_read_as_calls_that_meet_their_schemas(name: str) -> None:
    """Walks at random through the grammar, rather where something ends."""
    draw, vocabulary, read_calls = random.Random(name), Vocabulary.of_bytes(), 0
    for _ in range(5):
        members = {
            key: draw.choice(MEMBERS) for key in draw.sample(["city", "a", "b_c", "Zed", "\u00e9"], draw.randint(0, 4))
        }
        schema = {"type": "object", "properties": members, "$defs": {"E": {"type": "string", "enum": ["one", "two"]}}}
        schema["required"] = [key for key in members if draw.random() < 0.5]
        schemas = {"f": schema, "g": {"type": "object", "additionalProperties": {"type": "string"}}}
        calls = Calls(schemas, draw.random() < 0.5, {}, None)
        (matcher, _), text = compile_form(vocabulary, named(name).strict(calls)), b""
        while len(text) < 500 and not (matcher.is_accepting() and draw.random() < 0.5):
            allowed = np.flatnonzero(vocabulary.row(matcher.compute_bitmask()))
            if not len(allowed):
                break
            plain = [token for token in allowed if vocabulary.written[token].isascii()] or list(allowed)
            ends = [token for token in plain if vocabulary.written[token] in b"<'\"}],)"]
            token = int(draw.choice(ends if ends and draw.random() < 0.5 else plain))
            matcher.consume_token(token)
            text += vocabulary.written[token]
        if not matcher.is_accepting():
            continue
        reply = Reply(schemas, named(name).read)
        reply.add(text.decode(), True)
        assert not reply.content.strip()
        for call in reply.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        read_calls += len(reply.calls)
    assert read_calls


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "has anyOf"), ({"properties": {}, "required": ["a"]}, "requires a"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "not"), ({"properties": 5}, "properties"),
    ],
)  # fmt: skip
def test_a_keyword_that_the_form_cannot_enforce_is_refused_by_name(schema: Any, what: str) -> None:
    with pytest.raises(ParameterError, match=what):
        named("qwen").strict(Calls({"f": schema}, True, {}, None))


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}]
)
def test_a_form_holds_in_the_final_channel(form: Any) -> None:
    tokenizer = folder_tokenizer(chat_template(TEMPLATES["harmony"]), MARKS["harmony"])
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    text = head + (f"[{', '.join(OBJECTS)}]" if "tools" in form else '{"a": 1}')
    target = WritingTarget(tokenizer.encode(text), len(tokenizer), tokenizer.convert_tokens_to_ids("<eos>"))
    with hosted(LLM(target, tokenizer=tokenizer)) as host:
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 400, "temperature": 0}
        message = host.post("/v1/chat/completions", **body, **form).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert message["content"] == (None if "tools" in form else '{"a": 1}')
    assert len(message.get("tool_calls", ())) == (2 if "tools" in form else 0)
