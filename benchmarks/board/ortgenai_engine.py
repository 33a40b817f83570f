"""ONNX Runtime GenAI as an engine of the board: plain, with a draft model, with n-grams, in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime_genai as og

from benchmarks.protocol import ROOT, fingerprint, serve, versions

EXPORTS = ROOT / ".venv-ortgenai" / "exports"
DRAFT_TOKENS = 4
NAMES = {"top_k", "top_p", "temperature", "repetition_penalty"}
made: dict[str, Any] = {}


def export(checkpoint: str) -> Path:
    """Convert a checkpoint by the package's model builder, once for each content of its weights."""
    folder = EXPORTS / fingerprint(checkpoint)
    if not (folder / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", str(folder)]
        done = subprocess.run([*command, "-p", "fp32", "-e", "cpu"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the model builder could not export:\n{done.stderr[-2000:]}")
    return folder


def paired(target: Path, draft: Path) -> Path:
    """A folder whose configuration names both models, which must lie inside of it."""
    folder = EXPORTS / f"{target.name}-{draft.name}"
    folder.mkdir(exist_ok=True)
    config, other = (json.loads((each / "genai_config.json").read_text()) for each in (target, draft))
    config["model"]["draft"] = other["model"]["decoder"]
    for role, home in (("decoder", target), ("draft", draft)):
        config["model"][role] = config["model"][role] | {"filename": f"{role}/model.onnx"}
        if not (folder / role).exists():
            (folder / role).symlink_to(home, target_is_directory=True)
    (folder / "genai_config.json").write_text(json.dumps(config))
    for file in target.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    if streams > 1 or prefix_cache:
        raise NotImplementedError("a Generator takes one text at a time, and keeps no prefix cache")
    folder = paired(export(target), export(draft)) if method == "draft model" else export(target)
    config = og.Config(str(folder))
    made.update(method=method, model=og.Model(config))
    return {}


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed."""
    if unknown := set(sampling) - NAMES:
        raise NotImplementedError(f"no search option {', '.join(unknown)}")
    texts, drafted = [], 0
    for seed in seeds:
        params = og.GeneratorParams(made["model"])
        options = {"do_sample": bool(sampling), "top_k": 0, "random_seed": seed % 2**31} | sampling
        params.set_search_options(max_length=len(ids) + tokens, min_length=len(ids) + tokens * (not schema), **options)
        if schema is not None:
            params.set_guidance("json_schema", json.dumps(schema))
        if made["method"] != "plain":
            ngram = {"ngram_size": 3} if made["method"] == "ngram" else {}
            params.set_speculative_options(max_draft_tokens=DRAFT_TOKENS, **ngram)
        generator = og.Generator(made["model"], params)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        texts.append([int(token) for token in generator.get_sequence(0)[len(ids) :]])
        if made["method"] != "plain":
            drafted += generator.get_speculative_stats()["draft_tokens_proposed"]
    return {"texts": texts} | ({"drafted": drafted} if made["method"] != "plain" else {})


if __name__ == "__main__":
    serve(
        {"info": lambda: {"versions": versions("onnxruntime-genai", "onnxruntime")}, "load": load, "generate": generate}
    )
