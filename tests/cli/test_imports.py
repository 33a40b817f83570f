"""Each command imports what it uses: importing torch takes longer than everything else that a short text needs."""

import json
import subprocess
import sys
from pathlib import Path

from tests.server.talking import talking_tokenizer

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2", "numba", "matplotlib", "fastapi", "uvicorn",
         "prometheus_client")  # fmt: skip


def imported(*lines: str) -> tuple[list[int], list[set[str]]]:
    """Exit codes of commands that run one after another in a new process, and which of HEAVY each leaves imported."""
    code = f"""
import json, shlex, sys
from slipstream.cli.main import main
codes, modules = [], []
for line in {lines!r}:
    try:
        main(shlex.split(line))
    except SystemExit as left:
        codes.append(left.code)
    modules.append([name for name in {HEAVY!r} if name in sys.modules])
print("\\n" + json.dumps([codes, modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    codes, modules = json.loads(done.stdout.splitlines()[-1])
    return codes, list(map(set, modules))


def test_help_and_lists_import_nothing_heavy():
    lines = ["--version", "--help", "generate --help", "bench --help", "train --help", "simulate --help", "drafters",
             "serve --help"]  # fmt: skip
    assert imported(*lines) == ([0] * len(lines), [set()] * len(lines))


def test_mistakes_in_the_options_are_reported_before_anything_heavy_is_imported():
    lines = [
        "generate", "generate x --tpo-k 2", "generate x --top-p 2", "generate x --dtype int4",
        "generate x --rule exact",
        "generate x --executor openvino", "generate x --quantize int3", "generate x --kv-dtype int8",
        "generate x --threads 0", "generate x --drafter sufix", "generate x --draft-quantize int3",
        "generate x --draft-tokens -1", "generate x -o wrong", "chat --temperature -1", "verify --drafter sufix",
        "bench nowhere.jsonl", "bench --temperature cold", "bench --batch 1,x", "bench --context x",
        "bench --draft-tokens x",
        "tune nowhere.jsonl", "report nowhere", "serve --port 70000", "serve --max-batch 0", "serve --drafter sufix",
    ]  # fmt: skip
    assert imported(*lines) == ([2] * len(lines), [set()] * len(lines))


def test_generating_imports_neither_transformers_nor_what_plots_need():
    """Nor does a chat template."""
    codes, (text, chat) = imported("generate 'def f(' --max-tokens 2", "generate --chat 'def f(' --max-tokens 2")
    assert codes == [0, 0]
    assert text == {"torch", "numpy", "tokenizers", "numba"}
    assert chat == text | {"jinja2"}


def test_the_process_that_answers_http_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Its application answers completions, and chats with tools and forms, over an engine that says one token."""
    talking_tokenizer(tmp_path)
    code = f"""
import asyncio, json, sys, httpx
from slipstream.cli.serve import serve
from slipstream.core.stats import SpecStats
from slipstream.core.stats import TokenLogprob
from slipstream.engine.messages import EngineStats, Report, Streams, Update
from slipstream.tokens.text import load_tokenizer
from slipstream.server import engine_process, serving
from slipstream.server.app import create_app
from slipstream.server.service import EngineFacts, Service

def submit(key, ask):
    said = Update(key, ask.ids[:1], [False], [None], [TokenLogprob(1, -1.0)], "stop", stats=SpecStats())
    streams.deliver(Report([said], EngineStats()))

streams = Streams(submit, lambda key: None)
facts = EngineFacts(4096, 512, 4, "ngram", "rejection", 4)
app = create_app(Service("m", facts, load_tokenizer({str(tmp_path)!r}), streams))
user = [{{"role": "user", "content": "hi"}}]
call = {{"id": "a", "type": "function", "function": {{"name": "now", "arguments": "{{}}"}}}}
tools = [{{"type": "function", "function": {{"name": "now"}}}}]
asked = [
    ("/v1/completions", {{"prompt": "a b", "logprobs": 1, "structured_outputs": {{"regex": "a+"}}, "stop": "x"}}),
    ("/v1/chat/completions", {{"messages": user, "tools": tools, "chat_template_kwargs": {{"enable_thinking": True}}}}),
    ("/v1/chat/completions", {{"messages": [*user, {{"role": "assistant", "content": "", "tool_calls": [call]}},
                               {{"role": "tool", "tool_call_id": "a", "content": "9"}}], "tools": tools}}),
    ("/v1/messages", {{"messages": user, "max_tokens": 4}}),
    ("/tokenize", {{"messages": user, "return_token_strs": True}}),
]

async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
        for path, body in asked:
            answered = await http.post(path, json=body)
            assert answered.status_code == 200, (path, answered.text)
        assert (await http.get("/metrics")).status_code == 200

asyncio.run(main())
print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_garbage_is_not_collected_while_loading_and_what_the_first_load_imported_never() -> None:
    code = """
import contextlib, gc
from slipstream.cli.loading import pause_collection
with contextlib.suppress(ValueError), pause_collection():
    assert not gc.isenabled()
    first = [[] for _ in range(1000)]
    raise ValueError
assert gc.isenabled()
count = gc.get_freeze_count()
assert count >= 1000
with pause_collection():
    second = [[] for _ in range(1000)]
assert gc.get_freeze_count() <= count
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=Path(__file__).parents[2])
