"""`ToolUse`: the tools of a request, and which calls its answer may or must make."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.core.strict import JsonObject
from slipstream.core.structured import Structured
from slipstream.errors import RequestError
from slipstream.grammar.json_schemas import rebuild
from slipstream.server.api_error import ApiError, has_no_effect
from slipstream.server.fields import read_flag, read_members, read_object

MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """tools     the tools that may be called, as a chat template reads them.
    choice    "auto", "required" or "named" (`tools` has one tool, and the answer must call it).
    parallel  True if the answer may have several calls.
    strict    names of the functions whose arguments must meet their schemas even if `choice` is "auto".
    """

    tools: tuple[JsonObject, ...] = ()
    choice: str = "auto"
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def functions(self) -> JsonObject:
        """Function -> JSON schema of its arguments."""
        return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}

    @property
    def structured(self) -> Structured | None:
        """Structured output of an answer that must call: the arguments of the named function, or an array of calls;
        None if no call is required. Raises ApiError 400."""
        if self.choice == "auto":
            return None
        if self.choice == "named":
            (schema,) = self.schemas.values()
            schema = SPACING | schema
        else:
            schema = calls_schema(self.schemas, "arguments", self.parallel)
        try:
            return Structured(json_schema=schema)
        except RequestError as fault:
            raise ApiError(400, f"tools: {fault}", "tools") from fault

    @property
    def schemas(self) -> JsonObject:
        """Function -> schema that its arguments must meet; any object for a function that is not strict, if `choice` is
        "auto". Each schema allows only objects, whatever its own "type" says."""
        functions = [tool["function"] for tool in self.tools]
        checked = {each["name"] for each in functions} if self.choice != "auto" else self.strict
        parameters = {
            each["name"]: each.get("parameters", _NO_PARAMETERS) for each in functions if each["name"] in checked
        }
        return {each["name"]: parameters.get(each["name"], {}) | _OBJECT for each in functions}


def call_schema(
    schemas: Mapping[str, object], arguments: str, name_key: str = "name", id_key: str = ""
) -> tuple[JsonObject, JsonObject]:
    """Return the schema of one call, {name_key: NAME, arguments: {...}}, and its definitions, for `$defs` at the root.
    schemas: as in `ToolUse`; arguments: key of the arguments; id_key: key of an id that may come first, or ""."""
    shared = {str(i): _move_references(schema, i) for i, schema in enumerate(schemas.values())}
    call_id = {id_key: {"type": "string", "maxLength": 64}} if id_key else {}
    calls = [
        {
            "type": "object",
            "properties": {**call_id, name_key: {"const": name}, arguments: {"$ref": f"#/$defs/{i}"}},
            "required": [name_key, arguments],
            "additionalProperties": False,
        }
        for i, name in enumerate(schemas)
    ]
    return {"anyOf": calls}, shared


def calls_schema(schemas: Mapping[str, object], arguments: str, parallel: bool) -> JsonObject:
    """Return the schema of an array of calls, with exactly one call unless `parallel`."""
    call, shared = call_schema(schemas, arguments)
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": call, "minItems": 1, **most, "$defs": shared, **SPACING}


SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""White space as `json.dumps` writes it. If any white space were allowed, small models might write it endlessly."""

_OBJECT = {"type": "object"}
_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


def _move_references(schema: object, to: int) -> object:
    """Return the schema with its references changed so that they hold at `#/$defs/{to}` of another schema. A part with
    an `$id` is left unchanged: its references are relative to the `$id`."""

    def move(part: JsonObject) -> JsonObject | None:
        if "$id" in part:
            return None
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
            return part | {"$ref": f"#/$defs/{to}{reference[1:]}"}
        return part

    return rebuild(schema, move)


def read_tool_use(given: Mapping[str, object]) -> ToolUse:
    """Read the tools of a chat's request. `tool_choice` "none" leaves out all tools; tools that are no functions are
    left out, too. Raises ApiError 400."""
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools must be a list of at most {MOST_TOOLS} functions", "tools")
    checked, strict = {}, set()
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            has_no_effect(f"a tool of the type {kind[:40]!r}")  # the server would have to run such a tool itself
            continue
        function = _read_function(tool, f"tools[{i}]")
        if function["name"] in checked:
            raise ApiError(400, f"tools has two functions {function['name']!r}", f"tools[{i}].function.name")
        checked[function["name"]] = {"type": "function", "function": function}
        if tool["function"].get("strict"):
            strict.add(function["name"])
    parallel = "parallel_tool_calls" not in given or read_flag(given, "parallel_tool_calls")
    choice = given.get("tool_choice", "auto")
    if choice == "none":
        return ToolUse(parallel=parallel)
    if choice in ("auto", "required"):
        if choice == "required" and not checked:
            raise ApiError(400, "tool_choice is 'required', but there are no tools", "tool_choice")
        return ToolUse(tuple(checked.values()), choice, parallel, frozenset(strict))
    name = _read_named(choice)
    if name not in checked:
        raise ApiError(400, f"tool_choice requests {name!r}, which is not among the tools", "tool_choice")
    return ToolUse((checked[name],), "named", parallel)


def _read_named(choice: object) -> object:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise ApiError(400, f"tool_choice is {choice!r}, must be none, auto, required or a function", "tool_choice")
    return read_members(read_object(choice, "tool_choice", ("type", "function")), "function", ("name",)).get("name")


def _read_function(tool: object, where: str) -> JsonObject:
    """Read the declaration of a function, without `strict`, which chat templates do not read."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ApiError(400, f"{where}.type must be 'function': other tools are not supported", f"{where}.type")
    asked = read_object(tool, where, ("type", "function"))
    function = read_members(asked, "function", ("name", "description", "parameters", "strict"))
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            400,
            f"{where}.function.name is {name!r}, must be 1 to 64 of A-Z a-z 0-9 _ . -",
            f"{where}.function.name",
        )
    if not isinstance(function.get("description", ""), str):
        raise ApiError(400, f"{where}.function.description must be text", f"{where}.function.description")
    if not isinstance(function.get("parameters", {}), dict):
        raise ApiError(400, f"{where}.function.parameters must be a JSON schema", f"{where}.function.parameters")
    kind = function.get("parameters", {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        where = f"{where}.function.parameters"
        raise ApiError(400, f"{where}.type is {kind!r}, but must be object, because calls have named arguments", where)
    read_flag(function, "strict")
    return {key: function[key] for key in ("name", "description", "parameters") if key in function}
