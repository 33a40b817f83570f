"""`/v1/responses`: OpenAI's Responses API, translated to a chat. Nothing is stored."""

from collections.abc import Iterator
from uuid import uuid4

from slipstream.core.strict import JsonObject
from slipstream.server.api_error import ApiError, drop_members
from slipstream.server.chat_requests import translate_request
from slipstream.server.fields import RESPONSES, pass_on, read_list, read_members, read_object, read_text
from slipstream.server.generation import Generation
from slipstream.server.reply import CALL, REASONING
from slipstream.server.response_writer import Block, BlocksWriter, Event, ResponseWriter
from slipstream.server.service import Service

NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}
TEXTS = ("input_text", "output_text", "text")
_PREFIX = {REASONING: "rs", CALL: "fc"}


def prepare_response(service: Service, given: JsonObject) -> ResponseWriter:
    return translate_request(service, given, RESPONSES, translate_to_chat, ResponsesWriter, NAMES)


def translate_to_chat(given: JsonObject) -> JsonObject:
    """Translate a request's fields to the fields of a chat. Raises ApiError 400."""
    body = pass_on(given, RESPONSES, max_output_tokens="max_tokens")
    messages = [] if "instructions" not in given else [{"role": "system", "content": given["instructions"]}]
    body["messages"] = messages + _read_messages(given["input"])
    reasoning = read_members(given, "reasoning", ("effort", "summary", "generate_summary"))
    if "effort" in drop_members(reasoning, "reasoning", "summary", "generate_summary"):
        body["hints"] = {"reasoning_effort": reasoning["effort"]}
    wanted = drop_members(read_members(given, "text", ("format", "verbosity")), "text", "verbosity").get("format")
    if wanted is not None:
        asked = read_object(wanted, "text.format")
        kind = asked.pop("type", None)
        schema = {"json_schema": asked} if kind == "json_schema" else {}
        body["response_format"] = {"type": kind, **schema}
        if kind == "text":
            del body["response_format"]
    if "tools" in given:
        body["tools"] = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(read_list(given["tools"], "tools"))]
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {k: v for k, v in choice.items() if k != "type"}}
    if choice is not None:
        body["tool_choice"] = choice
    return body


def _read_tool(tool: object, where: str) -> JsonObject:
    asked = read_object(tool, where)
    return {"type": asked.pop("type", None), "function": asked}


def _read_messages(given: object) -> list[JsonObject]:
    """Return the messages of an input. Neighbouring reasoning, texts and calls of the assistant form one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[JsonObject] = []

    def extend_assistant() -> JsonObject:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for i, item in enumerate(read_list(given, "input")):
        where = f"input[{i}]"
        asked = read_object(item, where)
        kind = asked.get("type", "message")
        if kind == "message":
            text = read_text(asked.get("content"), f"{where}.content", kinds=TEXTS)
            if asked.get("role") == "assistant":
                extend_assistant()["content"] += text
            else:
                messages.append({"role": asked.get("role"), "content": text})
        elif kind == "reasoning":
            text = read_text(asked.get("content", ""), f"{where}.content", kinds=("reasoning_text",))
            extend_assistant()["reasoning_content"] = text
        elif kind == "function_call":
            function = {name: asked.get(name) for name in ("name", "arguments")}
            extend_assistant().setdefault("tool_calls", []).append({"id": asked.get("call_id"), "function": function})
        elif kind == "function_call_output":
            output = read_text(asked.get("output"), f"{where}.output", kinds=TEXTS)
            messages.append({"role": "tool", "tool_call_id": asked.get("call_id"), "content": output})
        else:
            raise ApiError(400, f"{where}.type is {kind!r}, which is not supported", f"{where}.type")
    return messages


class ResponsesWriter(BlocksWriter):
    """Writes the answer of /v1/responses: a response with items, and events that are numbered."""

    def __init__(self, generation: Generation, given: JsonObject):
        super().__init__(generation)
        service = generation.service
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": service.now(),
            "model": service.name,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": given.get("reasoning", {}),
            "store": False,
            "temperature": generation.params.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": generation.params.top_p,
            "truncation": "disabled",
        }
        self._ids: list[str] = []
        self._count = 0

    def write_start(self) -> Iterator[Event]:
        for name in ("response.created", "response.in_progress"):
            yield self._make_event(name, response=self._write_response("in_progress"))

    def open_block(self, block: Block) -> Iterator[Event]:
        self._ids.append(f"{_PREFIX.get(block.kind, 'msg')}_{uuid4().hex}")
        item = self._write_item(block, "in_progress")
        if block.kind != CALL:
            item["content"] = []
        yield self._make_event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != CALL:
            yield self._make_block_event(block, "response.content_part.added", part=self._write_content(block, ""))

    def extend_block(self, block: Block, text: str) -> Iterator[Event]:
        yield self._make_block_event(block, f"response.{_NAMES[block.kind]}.delta", delta=text)

    def close_block(self, block: Block) -> Iterator[Event]:
        value = {"arguments" if block.kind == CALL else "text": block.text}
        yield self._make_block_event(block, f"response.{_NAMES[block.kind]}.done", **value)
        if block.kind != CALL:
            yield self._make_block_event(
                block, "response.content_part.done", part=self._write_content(block, block.text)
            )
        yield self._make_event(
            "response.output_item.done", output_index=block.index, item=self._write_item(block, "completed")
        )

    def write_end(self) -> Iterator[Event]:
        response = self.write_whole()
        yield self._make_event(f"response.{response['status']}", response=response)

    def write_error(self, fault: ApiError) -> Iterator[Event]:
        error = {"code": "server_error", "message": fault.message}
        yield self._make_event("error", code=fault.code, message=fault.message, param=fault.param)
        yield self._make_event("response.failed", response=self._write_response("failed") | {"error": error})

    def write_whole(self) -> JsonObject:
        cut = self.generation.choices[0].finish == "length"
        response = self._write_response("incomplete" if cut else "completed")
        usage = self.generation.usage
        reasoning = self.generation.choices[0].reply.reasoning
        reasoned = self.generation.service.tokenizer.encode(reasoning, add_special_tokens=False) if reasoning else []
        return response | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": len(reasoned)},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _write_response(self, status: str) -> JsonObject:
        items = [self._write_item(block, "completed") for block in self.blocks]
        state = {"status": status, "output": items, "error": None, "incomplete_details": None, "usage": None}
        return self._head | state

    def _write_item(self, block: Block, status: str) -> JsonObject:
        item: JsonObject = {"id": self._ids[block.index], "status": status}
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return item | {"type": "function_call"} | call
        item["content"] = [self._write_content(block, block.text)]
        if block.kind == REASONING:
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _write_content(self, block: Block, text: str) -> JsonObject:
        if block.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _make_block_event(self, block: Block, name: str, **data: object) -> Event:
        more: JsonObject = {"output_index": block.index, "item_id": self._ids[block.index]}
        if block.kind != CALL:
            more["content_index"] = 0
        if name.startswith("response.output_text"):
            more["logprobs"] = []
        return self._make_event(name, **more, **data)

    def _make_event(self, name: str, **data: object) -> Event:
        self._count += 1
        return name, {"sequence_number": self._count - 1} | data


_NAMES = {REASONING: "reasoning_text", "content": "output_text", CALL: "function_call_arguments"}
