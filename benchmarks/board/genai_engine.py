"""OpenVINO GenAI as an engine of the board: plain, with a draft model, EAGLE-3, with prompt lookup, in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from safetensors.numpy import load_file, save_file

from benchmarks.peers.genai_peer import EXPORTS, FLOAT32, LOOKUP_NGRAM, export, scheduler
from benchmarks.protocol import serve, versions

DRAFT_TOKENS = 4
EXACT = {**FLOAT32, "INFERENCE_NUM_THREADS": 1}
made: dict[str, Any] = {}


def complete_head(head: Path, target: Path) -> str:
    """Copy an EAGLE-3 head with the embeddings of its target, which the converter expects in the head's own file."""
    folder = EXPORTS / "eagle3-head"
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(head / "model.safetensors")
    weights["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(head / "config.json", folder)
    for file in target.glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def count_ten_layers(folder: Path) -> str:
    """The same model under a configuration that counts ten layers. From fewer, the pipeline chooses none for the head,
    and its Python interface cannot name them; from ten it chooses the layers 2, 5 and 7, which a model of eight has."""
    copy = EXPORTS / "eagle3-target"
    copy.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name != "config.json" and not (copy / file.name).exists():
            (copy / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10}))
    return str(copy)


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"prompt_lookup": True} if method == "prompt lookup" else {}
    folder, settings = str(export(target, "fp32")), scheduler()
    if method == "EAGLE-3":  # the converter's own class of such heads counts as remote code
        head = complete_head(Path(draft).with_name("eagle3"), Path(target))
        draft_folder, folder = export(head, "fp32", "--trust-remote-code"), count_ten_layers(Path(folder))
        options["draft_model"] = genai.draft_model(str(draft_folder), "CPU", **EXACT)
    if method == "draft model":
        options["draft_model"] = genai.draft_model(str(export(draft, "fp32")), "CPU", **EXACT)
    settings.enable_prefix_caching, settings.max_num_seqs = prefix_cache, streams
    made["method"], made["streams"] = method, streams
    made["it"] = genai.LLMPipeline(folder, "CPU", scheduler_config=settings, **options, **EXACT)
    return {}


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed. Texts of one call share a seed, so that several at once are texts of one request."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, schema is None, bool(sampling)
    for name, value in sampling.items():
        if not hasattr(config, name):
            raise NotImplementedError(f"GenerationConfig has no {name}")
        setattr(config, name, value)
    if schema is not None:
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(schema))
    if made["method"] != "plain":
        config.num_assistant_tokens = DRAFT_TOKENS
    if made["method"] == "prompt lookup":
        config.max_ngram_size = LOOKUP_NGRAM
    prompt = genai.TokenizedInputs(ov.Tensor(np.array([ids], np.int64)), ov.Tensor(np.ones((1, len(ids)), np.int64)))
    texts: list[list[int]] = []
    drafted, counts = 0, made["method"] in ("draft model", "EAGLE-3")
    while len(texts) < len(seeds):
        config.rng_seed = seeds[len(texts)]
        config.num_return_sequences = min(made["streams"], len(seeds) - len(texts)) if sampling else 1
        out = made["it"].generate(prompt, config)
        texts += [list(text) for text in out.tokens]
        drafted += out.extended_perf_metrics.get_num_draft_tokens() if counts else 0
    return {"texts": texts} | ({"drafted": drafted} if counts else {})


if __name__ == "__main__":
    packages = ("openvino-genai", "openvino")
    serve({"info": lambda: {"versions": versions(*packages)}, "load": load, "generate": generate})
