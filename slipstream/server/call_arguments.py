"""Reads the arguments of tool calls in formats other than JSON objects, and makes grammars of such arguments."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass

from slipstream.core.strict import JsonMapping
from slipstream.core.structured import Structured
from slipstream.errors import ParameterError
from slipstream.grammar.compiler import check_structured
from slipstream.grammar.json_schemas import DEFINITIONS, KINDS, find_kinds, follow, is_kind
from slipstream.server.reply import MOST_NAME, NoCall, Reading, Reply, decode_json
from slipstream.server.tools import SPACING

TEXT = {"string"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ALSO = {"boolean": ' | "True" | "False"', "string": r""" | /'([^'\\\x00-\x1f]|\\['"\\nrt])*'/"""}
"""JSON type -> alternatives in a grammar for values of this type in Python's notation."""
_ANNOTATIONS = {"title", "description", "default", "examples", "format", "type"}


def json_symbol(schema: Mapping[str, object]) -> str:
    """Write values that meet a schema as a symbol of a grammar."""
    return f"%json {json.dumps({**schema, **SPACING})}"


@dataclass(frozen=True)
class Pairs:
    """Says how arguments are written one by one: `before`, the key, a start mark, the value, an end mark.

    text, other  (start marks, end mark) of a value that is plain text, and of a JSON value. If both are equal, the
                 schema decides which kind a value is. If text[1] is empty, all values are JSON.
    lines        each value is written on a line of its own.
    separator    stands between two arguments; if it is "", there may be white space.
    sorts        arguments are sorted by key, as the chat template writes them.
    """

    before: str
    text: tuple[tuple[str, ...], str]
    other: tuple[tuple[str, ...], str]
    lines: bool = False
    separator: str = ""
    sorts: bool = False

    def read(self, reply: Reply, name: str) -> Reading:
        """Report a call, and its arguments as JSON while they are read. Raises NoCall if the text is not a call."""
        reply.start(name)
        separator = "{"
        while (yield from reply.pass_over(self.before)):
            key, after = yield from reply.text(*self.text[0], *self.other[0], most=MOST_NAME)
            if self.lines and (char := (yield from reply.next())) != "\n":
                reply.unread(char)
            kinds = find_kinds(reply.functions[name], key := key.strip())
            if self.text != self.other:
                kinds = TEXT if after in self.text[0] else kinds
            end = self.text[1] if kinds == TEXT else self.other[1]
            ends = (f"\n{end}", end) if self.lines else (end,)
            reply.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if kinds == TEXT:
                reply.write('"')
                yield from reply.text(*ends, on_part=lambda t: reply.write(json.dumps(t, ensure_ascii=False)[1:-1]))
                reply.write('"')
            else:
                reply.write(_write_typed((yield from reply.text(*ends))[0], kinds))
        reply.write("}" if separator != "{" else "{}")
        return ""

    def rules(self, name: str, schema: JsonMapping, symbol: Callable[[str], str]) -> list[str]:
        """Return the grammar of arguments that meet a schema: rules, the first of which is `name`."""
        check_structured(Structured(json_schema=schema))
        line, parts, rules = "\n" if self.lines else "", list[tuple[str, str]](), list[str]()
        _only(schema.keys() - _ANNOTATIONS, {"properties", "required", "additionalProperties", *DEFINITIONS, "$schema"})
        more = schema.get("additionalProperties", True)
        properties = schema.get("properties", {None: more} if more is not False else {})
        _only(schema.get("required", ()), properties, "requires")
        if self.separator:
            _only((key for key in properties if key is not None and not key.isidentifier()), (), "names")
        for key, value in sorted(properties.items()) if self.sorts else properties.items():
            kinds, value = find_kinds(schema, key), follow(value, schema)
            value, rule = value if isinstance(value, Mapping) else {}, f"{name}_{len(parts)}"
            is_text = self.text[1] != "" and (kinds == TEXT or (key is None and kinds == set(KINDS)))
            after, end = self.text if is_text else self.other
            written = "/[A-Za-z_][A-Za-z0-9_]{0,63}/" if key is None else json.dumps(key)
            begin = f"{symbol(self.before)} {written} ({' | '.join(symbol(each + line) for each in after)})"
            if is_text:
                rules += [f"{rule}: {begin} {rule}v", _text_rule(f"{rule}v", value, line + end, symbol)]
            else:
                also = "" if value.keys() - _ANNOTATIONS or self.sorts else _ALSO.get("".join(kinds), "")
                shared = {each: schema[each] for each in DEFINITIONS if each in schema}
                rules.append(f"{rule}: {begin} ({json_symbol({**value, **shared})}{also}) {symbol(line + end)}")
            parts.append((rule, "" if key in schema.get("required", ()) else "*" if key is None else "?"))
        separator = f"{json.dumps(self.separator) if self.separator else ''} SPACE?"
        return [f"{name}: {_sequence(parts, separator)}", *rules]


def _sequence(parts: Seq[tuple[str, str]], separator: str) -> str:
    """Write the grammar of parts in this order. Each is (rule, count: "" for once, "?" for optional, "*" for any)."""
    tails, heads = [f"({separator} {rule}){often}" for rule, often in parts], list[str]()
    for i, (rule, often) in enumerate(parts):
        heads.append(" ".join([rule, *tails[i + (often != "*") :]]))
        if not often:
            return f"SPACE? ({' | '.join(heads)})"
    return f"(SPACE? ({' | '.join(heads)}))?" if heads else "SPACE?"


def _text_rule(name: str, schema: JsonMapping, end: str, symbol: Callable[[str], str]) -> str:
    """Write the grammar rule of a text that meets a schema, followed by `end`."""
    _only(schema.keys() - _ANNOTATIONS, {"enum", "const", "pattern", "minLength", "maxLength"})
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return f"{name}: ({' | '.join(json.dumps(each) for each in values)}) {symbol(end)}"
    form = f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
    if pattern := schema.get("pattern", "").replace("/", "\\/"):
        first, last = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if pattern.endswith("$") else "(?s:.*)")
        form += f" & /{first}({pattern.removeprefix('^').removesuffix('$')}){last}/"
    head, *special = re.split(r"(\(\S.*? \| <\[\d+\]>\))", symbol(end), maxsplit=1)
    if not special:
        return f"{name}[suffix={json.dumps(end)}]: {name.upper()}\n{name.upper()}: {form}"
    # A special token ends the text, so the text may not hold the same end spelled with other tokens.
    written = re.escape(end).replace("\n", "n").replace("/", "\\/")
    return f"{name}: {name.upper()} {''.join(special)}\n{name.upper()}: ({form} & ~/(?s:.*{written}.*)/) {head}"


def _only(names: Iterable[str], known: Collection[str], has: str = "has") -> None:
    """Raise ParameterError if a name (keyword or key of a schema) is not `known`: the grammar cannot enforce it."""
    for name in names:
        if name not in known:
            raise ParameterError(
                f"a strict function's schema {has} {name}, which this model's format of calls cannot enforce",
                fix="leave it out of the schema, or request the call with tool_choice",
            )


def _write_typed(text: str, kinds: Collection[str]) -> str:
    """Return the value of `text` as JSON if it has one of these JSON types; otherwise `text` as a JSON string."""
    plain = text.strip()
    try:
        value = decode_json(_WORDS.get(plain, plain))
    except NoCall:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value if is_kind(value, kinds) else text, ensure_ascii=False)


def python_arguments(text: str) -> str:
    """Return the arguments of a Python call, (a=1, b='c'), as JSON. Raises NoCall."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would warn of backslashes, as in paths
            call = ast.parse(source := f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NoCall
        return json.dumps({str(each.arg): _python(ast.get_source_segment(source, each.value) or "")
                           for each in call.keywords}, ensure_ascii=False, allow_nan=False)  # fmt: skip
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as fault:
        raise NoCall from fault


def _python(text: str) -> object:
    """Return the value of a literal in JSON or in Python."""
    try:
        return decode_json(text)
    except NoCall:
        return ast.literal_eval(text)


_GEMMA_KEY = re.compile(r'"(?:\\.|[^"\\])*"|([^\W\d][\w.$-]*)(?=\s*:)')


def gemma_arguments(text: str, quote: str) -> str:
    """Return the arguments of Gemma's calls, {a:1,b:<|"|>c<|"|>}, as JSON. Raises NoCall."""
    parts = text.split(quote)
    parts[::2] = [_GEMMA_KEY.sub(lambda key: json.dumps(key[1]) if key[1] else key[0], part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    value = decode_json("".join(parts))
    if not isinstance(value, dict):
        raise NoCall
    return json.dumps(value, ensure_ascii=False)
