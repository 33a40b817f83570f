"""Chat templates render as in transformers, and in a sandbox."""

import re

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.tokens.chat_template import render
from tests.tokens.tokenizer_kinds import TALK

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind", it\'s é.'}, {"role": "user", "content": "  Hello\n"},
    {"role": "assistant", "content": "Hi 🎈", "name": "bot"}, {"role": "user", "content": ""},
]  # fmt: skip
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "special tokens": TALK,
    "generation prompt": "{% if add_generation_prompt %}go{% endif %}{{ messages | length }}",
    "blocks are trimmed": "  {% if true %}\n  a\n  {%- endif %}\n\n  {# note #}\n b\n",
    "namespace": "{% set ns = namespace(n=0, self=1) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "namespace of a mapping": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=True) }}"
    "{{ 'é' | tojson(ensure_ascii=True) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.index == 4 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}"
    "{% generation %}{% set x = 2 %}{{ m['content'] }}{% endgeneration %}"
    "{% endfor %}{{ x }}",
    "no tools": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ undefined_name is defined }}",
    "undefined names are empty": "[{{ unheard_of }}]",
    "dict": "{{ dict(a=1)['a'] }}{{ dict.fromkeys(['x', 'y'], 1) }}",
    "time": "{{ strftime_now('%%') }}",
    "methods of text": "{{ messages[1].content.strip() }}{{ messages[0]['content'].split(' ')[1] }}",
    "macros": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "markup is not escaped": "{{ messages[0].content }}{{ messages[0].content | e }}",
}


def theirs(template: str, opening: bool) -> str:
    rendered, _ = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=opening, **NAMES)
    return rendered[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opening", [False, True])
def test_a_template_renders_as_in_transformers(name, opening):
    assert render(TEMPLATES[name], MESSAGES, opening, **NAMES) == theirs(TEMPLATES[name], opening)


def test_the_time_is_that_of_now():
    shown = render("{{ strftime_now('%Y-%m-%d') }}", MESSAGES, False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", shown)


REFUSED = {
    "raise_exception": "{{ raise_exception('no such role') }}", "syntax": "{% if %}",
    "attributes of classes": "{{ ''.__class__.__mro__ }}",
    "methods of the namespace": "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    "hidden attributes of the namespace": "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "hidden attributes that are set": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "hidden attributes of a mapping": "{% set ns = namespace({'__class__': 1}) %}{{ ns }}",
    "the class of mappings": "{{ dict.__subclasses__() }}", "changes to what is given": "{{ messages.append(1) }}",
    "functions of Python": "{{ strftime_now.__globals__.os }}", "missing attributes": "{{ unheard_of.attribute }}",
}  # fmt: skip


HARDENED = {name for name in REFUSED if name.startswith("hidden attributes")} | {"the class of mappings"}
"""What newer transformers alone refuse in this way: 5.17 has the namespace and the mappings of Jinja."""


def refusal_of_theirs(template: str) -> type[TemplateError] | None:
    """The class of transformers' error; None if it renders the template."""
    try:
        theirs(template, False)
    except TemplateError as found:
        return type(found)
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_refuses_is_refused_with_the_same_class_of_error(name):
    """With an older transformers, what newer ones refuse is refused here, too."""
    with pytest.raises(TemplateError) as ours:
        render(REFUSED[name], MESSAGES, False, **NAMES)
    hardened = refusal_of_theirs(REFUSED["hidden attributes of the namespace"]) is not None
    if hardened or name not in HARDENED:
        assert type(ours.value) is refusal_of_theirs(REFUSED[name])


def test_the_error_of_a_template_is_shown():
    with pytest.raises(TemplateError, match=r"^no such role$"):
        render(REFUSED["raise_exception"], MESSAGES, False)
