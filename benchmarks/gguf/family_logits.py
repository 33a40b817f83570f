"""Logits of tiny models of every family here and in llama.cpp, on GGUF files that llama.cpp's own converter wrote.

    python -m benchmarks.gguf.family_logits     # needs `make llama-server`; about five minutes
    python -m benchmarks.gguf.family_logits --record     # writes tests/checkpoints/gguf_families.json as well

A family is a tiny random checkpoint of the tests, with all parts switched on. The converter runs as it is, but writes
no tokenizer. llama.cpp computes in float32 on one thread, without flash attention. It also writes the quantised files,
whose perplexity is compared on texts that the model samples. `--record` stores metadata and shapes of each converted
file, and llama.cpp's logits of the same file with weights that depend on their names only (`seeded_weights`).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import logging
import math
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import read_tensor
from slipstream.checkpoints.gguf_header import FILE_TYPES, GgufHeader, read_header
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import load_weights
from slipstream.measure.provenance import commit, now
from tests import tiny_checkpoints, tiny_families
from tests.backends.native.models import chain
from tests.checkpoints import tiny_hybrids, tiny_wrapped
from tests.checkpoints.gguf_files import (
    RECORDED,
    RECORDED_TEXT,
    RECORDS,
    recorded_logits,
    write_recorded,
)

Logits = Callable[..., np.ndarray]
"""Token ids -> float64 [n, V], one row a token."""

CONTEXT = 256
"""llama.cpp chooses between LongRoPE's two tables by the size of its context, not by the text."""
TEXTS = 4
"""Texts of CONTEXT tokens whose perplexity is compared."""
KINDS, OF_EXPERTS = ("Q8_0", "Q4_0", "Q4_K_M"), "MXFP4_MOE"
"""Rows of 64 and 96 columns do not divide into blocks of 256: in Q4_K_M they are Q5_0, Q5_1 and Q8_0."""
MOST, MOST_PERPLEXITY = 1e-3, 5e-3
_TABLE = "llama.cpp reads GELU from a table of float16"
DIFFERENT = {"gemma": _TABLE, "gemma4-shared by two": _TABLE}
"""Family -> why its logits differ by more than MOST."""
LACKING = {
    "exaone4": "llama.cpp has its windows with 64 layers only, and heads only as wide as the model together",
    "deepseek-v2-lite": "llama.cpp runs it with 26 or 27 layers, and ranks groups of experts as DeepSeek V3 does",
    "deepseek-v2": "llama.cpp has no biases of latent attention, and takes mscale for mscale_all_dim",
    "ernie4.5": "llama.cpp has no biases of its MLP",
    "ernie4.5-moe": "the converter divides the width of the dense MLP by the heads of keys for that of shared experts",
    "llama4": "llama.cpp has no bias of the output of attention",
    "gemma4-shared": "llama.cpp shares the keys of the last two layers before; it needs one of each kind there",
    "arcee": "llama.cpp has no biases of the output of attention and of the MLP",
    "qwen3-moe": "llama.cpp has no dense layers between mixtures", "qwen2-moe": "as Qwen3 MoE",
    "olmoe": "llama.cpp has as many heads of keys as of queries",
    "glm": "neither llama.cpp nor our reader of files has a name for it",
    "nemotron_h": "the tiny checkpoint counts experts and uses none, which llama.cpp refuses",
    "lfm3": "llama.cpp does not have it", "olmo-hybrid": "llama.cpp does not have it",
}  # fmt: skip
"""Family -> what llama.cpp lacks for its tiny checkpoint."""
_SIGMOID = {"scoring_func": "sigmoid"}  # as published; transformers does not read it, the converter does
_MSCALE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
_KINDS = [tiny_families.SLIDING, tiny_families.FULL]
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 128}, "cohere2": {"rotary_pct": 1.0}, "hunyuan": {"max_position_embeddings": 32768},
    "deepseek-v3": _SIGMOID, "glm4-moe-lite": _SIGMOID, "minimax-m2": _SIGMOID,
    "exaone4 of 64 layers": {"num_hidden_layers": 64, "head_dim": 16, "layer_types": _KINDS * 32},
    "deepseek-v2-lite of 27 layers": {
        "num_hidden_layers": 27, "n_group": 1, "topk_group": 1, "topk_method": "greedy"
    },
    "deepseek-v2 without biases": {
        "attention_bias": False, "rope_parameters": _MSCALE,
    },
    "ernie4.5 without biases": {"use_bias": False}, "ernie4.5-moe of another width": {"intermediate_size": 64},
    "llama4 without biases": {"attention_bias": False}, "gemma4-shared by two": {"num_kv_shared_layers": 2},
    "arcee without biases": {"attention_bias": False, "mlp_bias": False},
    "qwen3-moe without dense layers": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen2-moe without dense layers": {"mlp_only_layers": []},
    "olmoe with keys of each head": {"num_key_value_heads": 4},
    "glm4 with sections": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [4, 2, 2]},
    },
}  # fmt: skip
"""Family, with what is changed if it is another model -> keys of config.json that differ from the tiny checkpoint's."""
LEFT_OUT = (
    "Checkpoints differ where the converter or llama.cpp leaves a part out: windows of Mistral, Qwen2, Phi-3 and "
    "StarCoder2, and of other layers than the published ones in Gemma 3 and Cohere 2; the scale of scores in Gemma 2 "
    "and 3 with other sizes than the published ones; chunks of 6 tokens in Llama 4, and what grows with the position "
    "in Llama 4 and Mistral 4; the bounds of gpt-oss's YaRN, which llama.cpp rounds. Our reader of files does as "
    "llama.cpp."
)
WRAPPED = {"muse-glimmer": "muse_glimmer", "mistral4": "mistral3 of Mistral 4"}
"""Families whose tiny checkpoints are multimodal models."""
_RECURRENT = ("lfm", "qwen3.5", "qwen3-next", "granite-hybrid", "nemotron-h", "falcon", "olmo-hybrid")  # in MODELS
FAMILIES = list(dict.fromkeys([
    *tiny_checkpoints.FAMILIES, *(name for name in tiny_families.FAMILIES if not name.startswith(_RECURRENT)),
    *CHANGES, *WRAPPED, *tiny_hybrids.MODELS,
]))  # fmt: skip


def load_packages(build: Path) -> None:
    """Make llama.cpp's converter and its C interface importable. The package llama_cpp has an __init__ that imports
    more than is installed here; only its module of C functions is needed."""
    source = build / "src"
    os.environ["LLAMA_CPP_LIB_PATH"] = str(build / "build" / "bin")
    sys.path += [str(source / "vendor" / "llama.cpp"), str(source / "vendor" / "llama.cpp" / "gguf-py")]
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(source / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    sys.modules["llama_cpp"] = importlib.import_module("llama_cpp.llama_cpp")
    worker = importlib.import_module("benchmarks.gguf.rival_worker")
    worker.api.llama_log_set(worker.QUIET, ctypes.c_void_p(0))
    worker.api.llama_backend_init()


def convert(checkpoint: Path, file: Path) -> None:
    """Run llama.cpp's converter, in float32 and without a tokenizer."""
    conversion, gguf = importlib.import_module("conversion"), importlib.import_module("gguf")
    parameters = conversion.ModelBase.load_hparams(checkpoint, False)
    kind = conversion.get_model_class(conversion.get_model_architecture(parameters, conversion.ModelType.TEXT))
    with torch.inference_mode():
        model = kind(checkpoint, gguf.LlamaFileType.ALL_F32, file)
        model = getattr(model, "impl", model)  # Mistral 3 and 4 share a class in front of theirs

        def set_vocab() -> None:
            model.gguf_writer.add_tokenizer_model("none")
            model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])

        model.set_vocab = set_vocab
        model.write()


@contextmanager
def llama_cpp(file: Path) -> Iterator[Logits]:
    """Load a file in llama.cpp, with keys and values in float32."""
    from benchmarks.gguf import rival_worker as worker

    sizes = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), CONTEXT)
    model = worker.Model(str(file), 1, **sizes, flash_attn_type=0, type_k=0, type_v=0)

    def logits(ids: Seq[int], past: int = 0) -> np.ndarray:
        if not past:
            model.clear()
        return model.decode(list(ids), past, every=True).astype(np.float64)

    try:
        yield logits
    finally:
        worker.api.llama_batch_free(model.batch)
        worker.api.llama_free(model.context)
        worker.api.llama_model_free(model.model)


def slipstream(path: Path) -> Logits:
    """Load a file or a checkpoint in our kernels."""
    config = DecoderConfig.load(path)
    weights = load_weights(path, config)
    executor = NativeExecutor(weights.config, weights, LoadSettings(threads=1))

    def logits(ids: Seq[int]) -> np.ndarray:
        out = executor.forward(chain(0, 0, ids)).logits[:, : config.vocab_size].double().numpy()
        executor.release(0)
        return out

    return logits


def quantise(file: Path, kind: str) -> Path:
    from benchmarks.gguf.rival_worker import api

    out = file.with_name(f"{kind}.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = next(number for number, name in FILE_TYPES.items() if name == kind), 1
    if api.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot write {file} in {kind}")
    return out


def sample(logits: Logits, first: int, rng: np.random.Generator) -> list[int]:
    """Sample a text of CONTEXT tokens at temperature 1."""
    text = [first]
    while len(text) < CONTEXT:
        row = logits(text[-1:], len(text) - 1)[-1]
        text.append(int((row + rng.gumbel(size=len(row))).argmax()))
    return text


def loss(logits: Logits, texts: Seq[Seq[int]]) -> float:
    """Mean negative log-likelihood of the tokens of texts after their first."""
    losses = []
    for text in texts:
        given = torch.from_numpy(logits(text)[:-1])
        losses.append(torch.nn.functional.cross_entropy(given, torch.tensor(text[1:])).item())
    return sum(losses) / len(losses)


def make_checkpoint(family: str, folder: Path) -> Path:
    """Write the tiny checkpoint of a family, with a vocabulary, whose size the converter asks for."""
    folder.mkdir()
    if family in tiny_hybrids.MODELS:
        tiny_hybrids.make_checkpoint(folder, family)
    elif family in WRAPPED:
        tiny_wrapped.make(WRAPPED[family], folder)
    else:
        tiny_checkpoints.make_family(family.partition(" ")[0], folder, **CHANGES.get(family, {}))
    tokens = {str(i): i for i in range(DecoderConfig.load(folder).vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    return folder


def compare(family: str, checkpoint: Path, file: Path) -> dict[str, Any]:
    """Return the figures of a family: of its file, its checkpoint and its quantised files."""
    header, rng = read_header(file), np.random.default_rng(0)
    with llama_cpp(file) as theirs:
        wanted = theirs(RECORDED_TEXT)
        texts = [sample(theirs, first, rng) for first in range(3, 3 + TEXTS)]
    largest = float(abs(wanted).max())
    row: dict[str, Any] = {"family": family, "architecture": header.architecture, "largest": largest}
    for part, path in (("file", file), ("checkpoint", checkpoint)):
        row[part] = float(abs(slipstream(path)(RECORDED_TEXT) - wanted).max()) / largest
    row["perplexity"] = {}
    for kind in (*KINDS, OF_EXPERTS) if header.size("expert_count") else KINDS:
        stored = quantise(file, kind)
        with llama_cpp(stored) as theirs:
            row["perplexity"][kind] = math.expm1(loss(slipstream(stored), texts) - loss(theirs, texts))
    return row


def describe(header: GgufHeader) -> dict[str, Any]:
    """Metadata, and shapes of the tensors: a name with * is in all layers. values: of tensors that are no weights."""
    own = ("general.architecture", f"{header.architecture}.")
    shapes, layers = {tensor.name: list(tensor.shape) for tensor in header.tensors}, header.size("block_count")
    tensors: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        common = re.sub(r"^blk\.\d+\.", "blk.*.", name)
        same = all(shapes.get(common.replace("*", str(i))) == shape for i in range(layers))
        tensors[common if same else name] = shape
    values = {
        tensor.name: read_tensor(header, tensor).view("<f4").ravel().tolist()
        for tensor in header.tensors if tensor.name.startswith("rope_")
    }  # fmt: skip
    metadata = {key: value for key, value in header.metadata.items() if key.startswith(own)}
    return {"metadata": metadata, "tensors": tensors, "values": values}


def record(stored: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return llama.cpp's logits on a described file with seeded weights."""
    with llama_cpp(write_recorded(stored, file)) as theirs:
        logits = theirs(RECORDED_TEXT)
    rows = [[rounded(logit) for logit in row] for row in recorded_logits(logits)]
    return {"largest": rounded(abs(logits).max()), "logits": rows}


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def table(results: dict[str, Any]) -> str:
    kinds = (*KINDS, OF_EXPERTS)
    heads = ["family", "largest logit", "F32 file", "checkpoint", *(f"perplexity, {kind}" for kind in kinds)]
    body = [
        [
            row["family"], f"{row['largest']:.2f}", f"{row['file']:.1e}", f"{row['checkpoint']:.1e}",
            *(f"{100 * row['perplexity'][kind]:+.3f} %" if kind in row["perplexity"] else "" for kind in kinds),
        ]
        for row in results["rows"]
    ]  # fmt: skip
    notes = [f"- {family}: {reason}." for family, reason in (DIFFERENT | LACKING).items()]
    above = (
        "# Logits of tiny models of every family, against llama.cpp's\n\n"
        f"`python -m benchmarks.gguf.family_logits`, {results['date']}, commit {results['commit']}, llama.cpp of "
        f"llama-cpp-python {results['llama-cpp-python']}. Differences of logits from llama.cpp's on the F32 file, over "
        f"the largest logit: with the same file, and with the checkpoint it was converted from. Perplexity of {TEXTS} "
        f"texts of {CONTEXT} tokens over llama.cpp's on the same quantised file.\n\n"
    )
    return above + rows(heads, body) + f"\n\n{LEFT_OUT}\n\n" + "\n".join(notes) + "\n"


def main(words: Seq[str] | None = None) -> int:
    """Compare, and write family-logits.json and .md; 1 if a family differs that `DIFFERENT` does not name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.family_logits", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="others keep their figures")
    parser.add_argument("--record", action="store_true", help="write the file of the tests")
    parser.add_argument("--build", type=Path, default=ROOT / ".venv-llama-server")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(words)
    logging.disable(logging.WARNING)  # the converter names every tensor
    load_packages(options.build.resolve())
    out, kept = options.out / "family-logits.json", dict(RECORDED)
    figures = {row["family"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    for family in options.only:
        if family in LACKING and family not in kept:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, file = make_checkpoint(family, Path(folder) / "checkpoint"), Path(folder) / "model.gguf"
            convert(checkpoint, file)
            kept[family] = describe(read_header(file))
            if family not in LACKING:
                kept[family] |= record(kept[family], Path(folder) / "recorded.gguf")
                figures[family] = compare(family, checkpoint, file)
                print(f"{family}: {figures[family]}", file=sys.stderr)
    if options.record:
        lines = [f"{json.dumps(family)}: {json.dumps(kept[family])}" for family in FAMILIES if family in kept]
        RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    results = {
        "schema": 1, "date": now(), "commit": commit(), "different": DIFFERENT, "lacking": LACKING,
        "llama-cpp-python": json.loads((options.build / "version.json").read_text()),
        "rows": [figures[family] for family in FAMILIES if family in figures],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(text := table(results))
    print(text)
    return int(any(missed(row) for row in results["rows"]))


def missed(row: dict[str, Any]) -> bool:
    worst = max(abs(each) for each in row["perplexity"].values())
    return row["family"] not in DIFFERENT and (row["file"] > MOST or worst > MOST_PERPLEXITY)


if __name__ == "__main__":
    sys.exit(main())
