"""Bad input on the command line: one message (what failed, both values, why, the fix), code 2, nothing on standard
output and no traceback."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slipstream import zoo
from slipstream.measure.results import Result, write
from tests.tiny_checkpoints import CONTEXT, clone

BUDGET = "--data x.txt --budget-tokens 9"
PLAN = "simulate --hardware h100 -m 70B -md 8B"
HEAD = zoo.head_dir("eagle3", zoo.target_dir())

FILES = {
    "prompts.jsonl": "".join(
        f'{{"prompt": "for name in names{i}:", "category": "{c}"}}\n' for i, c in enumerate("aab")
    ),
    "old_result.json": json.dumps({"format": "slipstream-lab", "format_version": 0}),
    "unknown_key.json": '{"draftr": "ngram"}',
    "unknown_drafter.json": '{"drafter": "ngrm"}',
    "list.json": '["ngram"]',
    "cut.json": "{",
    "deep.json": "[" * 100_000,
    "deep.jsonl": "[" * 100_000,
    "number.json": "[" + "9" * 5_000 + "]",
    "half.json": '{"target": "\\ud800"}',
    "map.json": '{"device_map": {"model": "cpu"}}',
}
"""Files in the folder that a command runs in, besides `result.json` and `forecast.json`."""

TABLE: list[tuple[str, str]] = [
    # command line, with {pair} for the options of a tiny pair; what the message must contain
    ("generat x", "Did you mean 'generate'"),
    # generate: options
    ("generate x --executor torch -md ngrm", "no drafter, folder or model 'ngrm'. Fix: write 'ngram' if you mean it"),
    ("generate x --temprature 1", "--temperature"),
    ("generate x -n many", "--max-new-tokens"),
    ("generate x --rule rejction", "did you mean 'rejection'"),
    ("generate x --device meta", "device is 'meta', on which tensors have shapes but no values"),
    ("generate x --draft-tokens 300", "at most 256 draft tokens can be verified in one step"),
    ("generate x --draft-tokenizer strin", "did you mean 'string'"),
    ("generate x --drafter ngram --draft-tokenizer string", "loads no draft model"),
    ("generate x --drafter none -o max_ngram=3", "were given without a drafter"),
    ("generate x --drafter n-gram", "did you mean 'ngram'"),
    ("generate x --executor nativ", "did you mean 'native'"),
    ("generate x --dtype float33", "did you mean 'float32'"),
    ("generate x --device-map auto --executor native", "device_map='auto' was given with executor='native'"),
    ("serve --device-map auto --executor torch", "device_map='auto' was given with executor='torch'"),
    ("verify --device-map auto -m nowhere.gguf", "device_map='auto' was given with a GGUF file"),
    ("generate x --device-map auto --device cpu", "give one of them"),
    ("""generate x --device-map '{{"model": "cpu"}}'""", "which is not a device of PyTorch"),
    ("generate x --quantize int3", "int8"),
    ("generate x {pair} --executor auto --quantize int4", "layers.0.self_attn.q_proj.weight has rows of 48 numbers"),
    ("generate x {pair} --drafter dflash -o shape=tree", "Fix: leave it out: there are no parameters"),
    ("generate x --threads 0", "threads is 0, but must be an integer from 1 to 256"),
    ("generate x {pair} --drafter suffix -o across=maybe", "across is 'maybe', but must be True or False"),
    ("generate x -o max_ngram", "NAME=VALUE"),
    ("generate x -m mine --drafter model", "needs a draft model"),
    (
        "generate x -m /nonexistent --kv-dtype float61",
        "must be one of float32, float16, q8_0. Fix: did you mean 'float16'?",
    ),
    ("generate x {pair} --kv-dtype float16", "kv_dtype='float16' was given, but the torch executor"),
    ("generate x {pair} --kv-dtype q8_0", "Fix: leave kv_dtype out"),
    ("generate x {pair} --executor native --dtype float64", "executor='native'"),
    *(
        (
            f"serve -m /nonexistent --api-key '{key}'",
            "an API key is empty, or contains a space, a line break or a character outside",
        )
        for key in ("", "key\n", "a key", "clé")
    ),
    ("serve -m /nonexistent", "'/nonexistent' is not a folder and not a hub id"),
    ("train draft -m /nonexistent --data x.txt --budget-tokens 9", "'/nonexistent' is not a folder and not a hub id"),
    # generate: parameters, refused before anything is loaded
    ("generate x -m /nonexistent --temperature=nan", "temperature is nan, but must be a finite number in [0, 100]"),
    ("generate x --rule greedy --temperature 0.8 -m mine", "rule 'greedy' was used with a distribution"),
    ("bench prompts.jsonl --rule greedy --temperature 0,0.8 -m mine", "rule 'greedy' was used with a distribution"),
    ("trace x --rule greedy --temperature 0.8 -m mine", "rule 'greedy' was used with a distribution"),
    ("verify prompts.jsonl -m mine --rule greedy --check distribution", "rule 'greedy' was used with a distribution"),
    ("generate x -m /nonexistent --regex '(a'", "structured.regex cannot be compiled: at '(a': unclosed group."),
    ("generate x --executor native --kv-dtype float16 --logprobs 99999", "logprobs is 99999"),
    # generate: forms
    ("generate x {pair} --regex a --choice b", "sets regex and choice"),
    ("generate x {pair} --after '</think>'", "sets no form"),
    ("""generate x {pair} --json-schema '{{"type": }}'""", "not JSON: Expecting value: line 1 column 10"),
    ("generate x {pair} --json-schema missing.json", "--json-schema missing.json cannot be read"),
    ("generate x {pair} --grammar missing.lark", "--grammar missing.lark cannot be read"),
    ("""generate x {pair} --json-schema '{{"items": {{"type": "strin"}}}}'""", "Invalid type: strin, at #/items"),
    # generate: prompts and files
    ("generate", "no prompt was given"),
    ("generate x --file y", "both a prompt and --file were given"),
    ("generate --file /nonexistent/prompt", "/nonexistent/prompt"),
    ("generate '' {pair}", "the prompt is empty"),
    ("generate - {pair}", "at least one token"),
    (f"generate {'x' * 400} {{pair}}", f"the prompt has 400 tokens, but the target's context holds {CONTEXT}"),
    (f"generate {'x' * 400} {{pair}}", f"Fix: shorten it to {CONTEXT - 1} tokens"),
    ("generate x --config unknown_key.json", "did you mean 'drafter'"),
    ("generate x --config unknown_drafter.json", "did you mean 'ngram'"),
    ("generate x --config list.json", "is not a JSON object"),
    ("generate x --config cut.json", "is not JSON"),
    ("generate x --config deep.json", "is not JSON"),
    ("generate x --config number.json", "is not JSON"),
    ("generate x --config half.json", "the target is not UTF-8 text"),
    ("generate x --config nowhere.json", "cannot be read"),
    ("generate x --config map.json", "device_map in --config map.json is a JSON object"),
    # convert
    ("convert embedded --to eagle", "--to is 'eagle', must be one of eagle3, speculators, specforge, medusa"),
    ("convert embedded --to gguf", "convert_hf_to_gguf.py"),
    ("convert embedded --to eagle3 --out .", "folder '.' exists already"),
    (f"convert {zoo.target_dir()} --to eagle3", "contains no EAGLE head"),
    (f"convert {zoo.target_dir()} --to medusa", "contains tensors that Medusa heads do not have"),
    (f"convert {HEAD} --to medusa", "contains an EAGLE-3 head"),
    (f"convert {HEAD} --to speculators", "add --target"),
    # info, drafters, lists of simulate
    (f"info embedded {HEAD}", "is a draft head (eagle3), not a draft model"),
    ("generate x -m missing.gguf --drafter suffix", "there is no file"),
    ("info /nonexistent/model", "give the folder, or a hub id"),
    ("info 'not a hub id!'", "give the folder, or a hub id"),
    ("info prompts.jsonl", "give the folder, or a hub id"),
    ("drafters sufix", "suffix"),
    ("simulate --pairs --hardware b200", "did you mean 'h200'"),
    ("simulate --pairs --alpha 2", "alpha is 2"),
    ("simulate --pairs --advice", "--pairs and --advice were given"),
    ("simulate --pairs --json", "--pairs and --json were given"),
    # bench
    ("bench nowhere.jsonl {pair}", "there is no prompt file 'nowhere.jsonl'"),
    ("bench deep.jsonl {pair}", "deep.jsonl, line 1, is not JSON"),
    ("bench prompts.jsonl {pair} --drafter ngram --drafter ngram", "names the same drafter twice"),
    (
        "bench prompts.jsonl {pair} --drafter ngram --drafter model -o max_ngram=3",
        "write options after the name of their drafter",
    ),
    ("bench prompts.jsonl {pair} --drafter none", "no drafter was given"),
    ("bench prompts.jsonl {pair} --temperature hot", "--temperature is 'hot'"),
    ("bench prompts.jsonl {pair} --batch 0", "batch is 0"),
    ("bench prompts.jsonl {pair} --out /nonexistent/r.json", "the folder /nonexistent does not exist"),
    ("bench prompts.jsonl {pair} --template chta", "did you mean 'chat'"),
    # bench with axes
    ("bench code {pair} --draft-tokens 8:2", "--draft-tokens is '8:2'"),
    # trace
    ("trace {pair} --drafter ngram --drafter model", "2 drafters were given, only one can be traced"),
    ("trace {pair} --drafter none", "0 drafters were given"),
    ("trace {pair} --out /nonexistent/t.json", "does not exist"),
    # tune
    ("tune prompts.jsonl {pair} --drafter none", "no drafter was given"),
    ("tune prompts.jsonl {pair} --drafter ngram --drafter sufix", "did you mean 'suffix'"),
    ("tune prompts.jsonl {pair} --write /nonexistent/c.json", "the folder /nonexistent does not exist"),
    ("tune prompts.jsonl {pair} --write /nonexistent/c.json", "or give another --write"),
    ("tune prompts.jsonl {pair} -k 0", "draft_tokens of model is 0"),
    ("tune prompts.jsonl {pair} --confirm 0", "Invalid value for '--confirm'"),
    # verify
    ("verify prompts.jsonl {pair} --check gredy", "did you mean 'greedy'"),
    ("verify prompts.jsonl {pair} --drafter none", "no drafter was given"),
    ("verify prompts.jsonl {pair} --out /nonexistent/r.json", "the folder /nonexistent does not exist"),
    ("verify prompts.jsonl {pair} --level 2", "level is 2.0"),
    # report
    ("report nowhere.json", "cannot be read"),
    ("report deep.json", "is not JSON"),
    ("report number.json", "is not JSON"),
    ("report old_result.json", "has the format version 0, but this version of Slipstream reads only 2"),
    ("report forecast.json", "there is no report for results of the kind 'forecast'"),
    ("report result.json --out nowhere/x.html", "does not exist"),
    # simulate
    ("simulate --alpha 1.2", "alpha is 1.2"),
    ("simulate --alpha nan", "alpha is nan"),
    ("simulate -k 0", "draft_tokens is 0"),
    ("simulate --hardware h10", "did you mean 'h100'"),
    ("simulate --hardware h100", "without --target and --draft"),
    ("simulate --hardware h100 -m Llama-3.1-70 -md 8B", "did you mean 'Llama-3.1-70B'"),
    ("simulate --hardware h100 -m 0B -md 8B", "parameters of 0B"),
    ("simulate --hardware rtx4090 -m 5000B -md 8B", "do not fit into 64"),
    (f"{PLAN} --gpus 0", "devices is 0"),
    (f"{PLAN} --bits 0", "bits is 0"),
    (f"{PLAN} --latency-ms 0", "latency_ms is 0"),
    (f"{PLAN} --users 0", "users is 0"),
    ("simulate --hardware h100 -m Qwen2.5-72 -md 8B", "did you mean 'Qwen2.5-72B'"),
    ("simulate --bandwidth 100", "lacks --tflops, --memory"),
    ("simulate --rates .5,.6", "rates cannot rise"),
    ("simulate --rates .5,x", "--rates is '.5,x'"),
    ("simulate --rates ,", "--rates is ','"),
    ("simulate --rates nan", "rate at position 1 is nan"),
    ("simulate --rates .5,.3 -k 5", "2 rates were given"),
    ("simulate --alpha .5 --rates .5", "--alpha and --rates both give the acceptance rate"),
    ("simulate --batch 0", "batch is 0, but must be an integer >= 1"),
    ("simulate --batch 1,8", "2 batch sizes were given"),
    ("simulate --c -1", "c is -1"),
    ("simulate --row-cost -1", "row_cost is -1"),
    ("simulate -m smolm2 -md 1B", "did you mean 'smollm2'?"),
    ("simulate -m embedded", "only one of --target and --draft was given"),
    ("simulate -m embedded -md embedded --c 0.1", "or --c as well"),
    # train
    ("train medusa --budget-tokens 9", "no training data was given"),
    ("train medusa --data x.txt --budget-tokens 9", "'x.txt' does not exist"),
    ("train medusa --data deep.jsonl --budget-tokens 9", "deep.jsonl, line 1 is not JSON"),
    ("train medusa --data x.txt", "exactly one budget"),
    (f"train medusa {BUDGET} --heads 0", "heads is 0"),
    (f"train eagle3 {BUDGET} --optimiser moun", "did you mean 'muon'"),
    (f"train draft {BUDGET} --decai 1", "--decai"),
    (f"train draft {BUDGET} --hidden-size 20", "hidden_size=20 is not a multiple of twice heads=4"),
    ("train medsua", "medusa"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with FILES."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name, kind in (("result.json", "bench"), ("forecast.json", "forecast")):
        write(Result(kind, {}, {}, {}), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "says"), TABLE, ids=lambda text: text[:60])
def test_bad_input_is_refused_in_one_message_with_code_2(refused, pair, folder, line, says):
    before = {*folder.iterdir()}
    said = refused(*shlex.split(line.format(pair=shlex.join(map(str, pair)))))
    assert said.startswith("error: ") or "{pair}" in line, "what will run is said once models are loaded"
    assert says in said
    assert "Fix: " in said or not line.startswith(("generate x -m /nonexistent --", "convert"))
    assert {path.name for path in {*folder.iterdir()} - before} <= {"runs"}, "`train` tries its output folder first"


def test_a_broken_checkpoint_is_named(refused, tiny, tmp_path):
    """`tests/checkpoints/test_checkpoint.py` has all that is refused."""
    broken = clone(tiny.target, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    unreadable = re.escape(f"{broken}/model.safetensors is truncated, corrupt, or not a safetensors file")
    command = ["generate", "for", "-n", "4", "--executor", "torch"]
    for models in (["-m", broken], ["-m", tiny.target, "-md", broken]):
        assert re.match(f"error: .*{unreadable}.*Fix:", refused(*command, *models))
    (broken / "model.safetensors").write_bytes(weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    assert re.match("error: .*tokenizer.*Fix:", refused(*command, "-m", broken))
