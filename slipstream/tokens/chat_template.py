"""Chat templates: the Jinja text of a checkpoint that turns a conversation into a prompt.

A template is untrusted code, so it runs in Jinja's sandbox, with the same additions as in transformers:
`raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, loop controls and the `generation` block.
"""

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render(template: str, messages: Seq[Mapping[str, str]], add_generation_prompt: bool, **names: object) -> str:
    """Render a conversation as text.

    messages  messages with at least "role" and "content", whose values are plain strings.
    names     other variables that the template can read: the special tokens, `tools`.

    Raises jinja2's TemplateError for a template that is wrong or does something that the sandbox forbids, and if the
    template refuses the conversation.
    """
    known = {"messages": list(messages), "tools": None, "documents": None}
    return str(_compile(template).render(known | {"add_generation_prompt": add_generation_prompt} | names))


def choose_template(templates: str | Mapping[str, str] | None, tools: bool) -> str:
    """Return the template that transformers would choose for a conversation with or without tools; "" if none."""
    if isinstance(templates, Mapping):
        return (templates.get("tool_use") if tools else None) or templates.get("default", "")
    return templates or ""


@lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set itself. Raises jinja2's TemplateError."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _PublicNamespace,
    }
    return environment.from_string(template)


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}: renders its content in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The `dict` of a template. It lacks the attributes of Python's class, by which a template could leave the
    sandbox."""

    def __call__(self, *given: object, **named: object) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _PublicNamespace(Namespace):
    """The `namespace` of a template. It refuses attributes that begin with an underscore."""

    def __init__(*given: object, **named: object) -> None:  # no `self` here: an attribute may have this name
        namespace, *values = given
        for name in dict(*values, **named):
            _check_public(name)
        Namespace.__init__(namespace, *values, **named)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the chat template sets the attribute {name!r} of a namespace: rename it, without _")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
