"""The GGUF files that are compared. A file is made once, and then found again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.derived_models import deeper, wider
from benchmarks.gguf.gguf_writer import convert_to_gguf
from benchmarks.gguf.lineup import GENAI, IK, SLIPSTREAM, Side
from benchmarks.protocol import ROOT, THREADS, Worker
from slipstream import zoo
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import load_weights

IK_HOME = ROOT / ".venv-peer-ik"
"""Folder that `make ik-llamacpp` makes: bin/python, src (its Python package), build (its libraries)."""
GENAI_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""Python interpreter of the environment that `make peer-genai` makes."""
SIZES = {"510M": (4, 12), "1.1B": (6, 12)}
"""For each synthetic target, the factor on the embedded target's width, and the number of added layers."""


def ik_environment() -> dict[str, str]:
    return {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{IK_HOME / 'src'}",
        "IK_LLAMA_CPP_LIB_PATH": str(IK_HOME / "build" / "src" / "libllama.so"),
    }


def started(side: Side, model: str, files: Path, **drafts: Any) -> Worker:
    """Start the process of a contender, and load the model as "model". drafts: arguments of
    `slipstream_worker.load`."""
    more = ik_environment() if side.who == IK else {}
    python = IK_HOME / "bin/python" if side.who == IK else sys.executable
    module = f"benchmarks.gguf.{'slipstream' if side.who == SLIPSTREAM else 'rival'}_worker"
    worker = Worker(side.label, module, python, more)
    file = str(file_of(model, side.kind, files))
    draft_models = drafts if side.who == SLIPSTREAM else {}
    worker.call("load", name="model", file=file, threads=THREADS, quantize=side.quantize, **draft_models)
    return worker


def started_from_checkpoint(side: Side, model: str, files: Path) -> Worker:
    """Start the process of a contender that reads the checkpoint, and load it as "plain" and as "lookup"."""
    genai = side.who == GENAI
    module, python = ("genai_peer", GENAI_PYTHON) if genai else ("transformers_peer", sys.executable)
    worker = Worker(side.label, f"benchmarks.peers.{module}", python)
    for name in ("plain", "lookup"):
        options = (
            {"precision": side.kind, "float32": False, "lookup": name == "lookup"} if genai else {"dtype": side.kind}
        )
        worker.call("load", name=name, target=str(checkpoint(model, files)), **options)
    return worker


def file_of(model: str, kind: str, folder: Path) -> Path:
    """Return the model as a GGUF file in this format. llama.cpp writes Q4_K_M (`make gguf`)."""
    if kind == "Q4_1":
        return zoo.smollm2_file()
    file = folder / f"{model}-{kind}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        convert_to_gguf(checkpoint(model, folder), file, kind.lower())
    return file


def checkpoint(model: str, folder: Path) -> Path:
    """Return the folder of the model's weights in 16 bits. SmolLM2's weights are read from its 4-bit file, so its
    Q4_K_M file is rounded a second time."""
    path = folder / model
    if path.exists():
        return path
    if model == "smollm2":
        return _unpacked(path)
    times, layers = SIZES[model]
    wide = folder / f"{model}-wide"
    if not wide.exists():
        wider(wide, zoo.target_dir(), times)
    deeper(path, wide, layers)
    config = path / "config.json"  # prompts of 2,048 tokens; positions are rotary
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    return path


def _unpacked(folder: Path) -> Path:
    """Write SmolLM2's weights in 16 bits, without a tokenizer, because prompts are token ids."""
    config = DecoderConfig.load(zoo.smollm2_file())
    weights = load_weights(zoo.smollm2_file(), config)
    folder.mkdir(parents=True)
    tensors = {f"model.{name}": weights[name].to(torch.float16) for name in weights}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rope = config.rope_parameters["rope_theta"]
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
                "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
                "num_hidden_layers": config.layers, "head_dim": config.head_dim,
                "intermediate_size": config.intermediate_size, "max_position_embeddings": config.context,
                "rms_norm_eps": config.norm_eps, "rope_theta": rope, "tie_word_embeddings": True,
                "eos_token_id": list(config.eos_ids),
            }
        )
    )  # fmt: skip
    return folder
