"""Logits of tiny models of every family here and in llama.cpp, on GGUF files that llama.cpp's own converter wrote.

    python -m benchmarks.gguf.family_logits     # needs `make llama-server`; about five minutes
    python -m benchmarks.gguf.family_logits --record     # writes tests/checkpoints/gguf_families.json as well

A family is a tiny random checkpoint of the tests, with all parts switched on. `family_worker` runs llama.cpp and its
converter. Logits of the F32 file and of the checkpoint are also compared with transformers in float64. llama.cpp also
writes the quantised files, whose perplexity is compared on texts that the model samples; their exact distributions are
llama.cpp's on the same weights in float32. `--record` stores metadata and shapes of each converted file, and
llama.cpp's logits of the same file with weights that depend on their names only (`seeded_weights`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.accuracy import divergences
from benchmarks.gguf.family_worker import CONTEXT, environment
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT, ContenderError, Worker
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import read_tensor
from slipstream.checkpoints.gguf_header import FILE_TYPES, GgufHeader, read_header
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import load_weights
from slipstream.measure.provenance import commit, now, public
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
from tests.targets.reference import Reference

TEXTS = 8
"""Number of texts whose perplexity is compared. They have CONTEXT tokens if the model has as many positions."""
KINDS, OF_EXPERTS = ("Q8_0", "Q4_0", "Q4_K_M"), "MXFP4_MOE"
"""Rows of 64 and 96 columns do not divide into blocks of 256: in Q4_K_M they are Q5_0, Q5_1 and Q8_0."""
SAME = 1e-4
"""Bound of the difference of our logits of file and checkpoint, over the largest, if both are the same model."""
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


class LlamaCpp:
    """llama.cpp in a process of its own (`family_worker`)."""

    def __init__(self, build: Path):
        self.worker = Worker("llama.cpp", "benchmarks.gguf.family_worker", environment=environment(build))

    def logits(self, file: Path, texts: Seq[Seq[int]]) -> Tensor:
        """Return the logits after each token of texts of equal lengths, float64 [texts, n, V]."""
        out = file.with_name("logits.npy")
        self.worker.call("logits", file=str(file), texts=texts, out=str(out))
        return torch.from_numpy(np.load(out)).double()

    def quantise(self, file: Path, kind: str) -> Path:
        """Write a file in another format: "F32", "Q8_0", ..."""
        out, number = file.with_name(f"{kind}.gguf"), next(key for key, name in FILE_TYPES.items() if name == kind)
        self.worker.call("quantise", file=str(file), file_type=number, out=str(out))
        return out


def slipstream(path: Path, texts: Seq[Seq[int]]) -> Tensor:
    """Run a file or a checkpoint on our kernels. Returns logits as `LlamaCpp.logits` does."""
    config = DecoderConfig.load(path)
    weights = load_weights(path, config)
    executor, rows = NativeExecutor(weights.config, weights, LoadSettings(threads=1)), []
    for ids in texts:
        rows.append(executor.forward(chain(0, 0, ids)).logits[:, : config.vocab_size].double().clone())
        executor.release(0)
    return torch.stack(rows)


def losses(logits: Tensor, texts: Seq[Seq[int]]) -> Tensor:
    """Return the negative log-likelihood of each token of texts after their first."""
    wanted = torch.tensor([text[1:] for text in texts])
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="none")


def compare_perplexity(ours: Tensor, theirs: Tensor, exact: Tensor, texts: Seq[Seq[int]]) -> dict[str, Any]:
    """Compare logits of texts. exact: those of the same weights in float32. Returns the ratio of our perplexity to
    llama.cpp's less 1, half of its 95 % interval, and the mean KL divergence of both from the exact distributions."""
    apart = losses(ours, texts) - losses(theirs, texts)
    kl = {
        who: rounded(float(divergences(exact, each)[0].mean())) for who, each in (("ours", ours), ("llama.cpp", theirs))
    }
    wide = 1.96 * float(apart.std()) / math.sqrt(len(apart))
    return {"ratio": rounded(math.expm1(float(apart.mean()))), "interval": rounded(wide), "kl": kl}


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


def compare(engine: LlamaCpp, family: str, checkpoint: Path, file: Path) -> dict[str, Any]:
    """Return the figures of a family: of its file, its checkpoint and its quantised files."""
    header = read_header(file)
    wanted = engine.logits(file, [RECORDED_TEXT])[0]
    kind = AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM
    exact = Reference(checkpoint, torch.float64, kind)([RECORDED_TEXT])[0]
    of_file, of_checkpoint = (slipstream(path, [RECORDED_TEXT])[0] for path in (file, checkpoint))
    largest = float(wanted.abs().max())
    apart = lambda a, b: rounded(float((a - b).abs().max()) / largest)  # noqa: E731
    row: dict[str, Any] = {
        "family": family, "architecture": header.architecture, "largest": largest, "file": apart(of_file, wanted),
        "checkpoint": apart(of_checkpoint, wanted), "ours to float64": apart(of_checkpoint, exact), "perplexity": {},
    }  # fmt: skip
    if apart(of_file, of_checkpoint) < SAME:
        row["llama.cpp to float64"] = apart(wanted, exact)
    firsts = [(3 + i) % wanted.shape[-1] for i in range(TEXTS)]
    length = min(CONTEXT, header.size("context_length"))  # llama.cpp aborts at a learned position that is not there
    texts = engine.worker.call("sample", file=str(file), firsts=firsts, length=length)["texts"]
    for kind in (*KINDS, OF_EXPERTS) if header.size("expert_count") else KINDS:
        stored = engine.quantise(file, kind)
        each = slipstream(stored, texts), engine.logits(stored, texts)
        exact = engine.logits(engine.quantise(stored, "F32"), texts)
        row["perplexity"][kind] = compare_perplexity(*each, exact, texts)
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


def record(engine: LlamaCpp, stored: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return llama.cpp's logits on a described file with seeded weights."""
    file = write_recorded(stored, folder / "recorded.gguf")
    logits = engine.logits(file, [RECORDED_TEXT])[0].numpy()
    rows = [[rounded(logit) for logit in row] for row in recorded_logits(logits)]
    return {"largest": rounded(abs(logits).max()), "logits": rows}


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def table(results: dict[str, Any]) -> str:
    complete = [row for row in results["rows"] if "stops" not in row]
    columns = {
        "file": "file, from llama.cpp", "checkpoint": "checkpoint, from llama.cpp",
        "ours to float64": "checkpoint, from float64", "llama.cpp to float64": "llama.cpp, from float64",
    }  # fmt: skip
    logits = [
        [row["family"], f"{row['largest']:.2f}", *(f"{row[key]:.1e}" if key in row else "" for key in columns)]
        for row in complete
    ]
    kinds = (*KINDS, OF_EXPERTS)
    cells = [[row["family"], *(cell(row["perplexity"].get(kind)) for kind in kinds)] for row in complete]
    beyond = [f"- {row['family']}: {miss}." for row in results["rows"] for miss in misses(row)]
    notes = [f"- {family}: {reason}." for family, reason in (DIFFERENT | LACKING).items()]
    parts = [
        "# Logits of tiny models of every family, against llama.cpp's",
        f"`python -m benchmarks.gguf.family_logits`, {results['date']}, commit {results['commit']}, llama.cpp of "
        f"llama-cpp-python {results['llama-cpp-python']}.",
        "Largest difference of logits over the largest logit, all weights in float32. llama.cpp runs the file, float64 "
        "is transformers on the checkpoint that the file was converted from. Where the file is another model than the "
        "checkpoint (below), llama.cpp has no distance from float64.",
        rows(["family", "largest logit", *columns.values()], logits),
        f"Quantised files, {TEXTS} texts of at most {CONTEXT} tokens: our perplexity over llama.cpp's on the same file "
        "with its 95 % interval; mean KL divergence (nats) of ours / llama.cpp's distributions from llama.cpp's on the "
        "same weights in float32. Both programs round activations.",
        rows(["family", *kinds], cells),
        f"Beyond the bars ({MOST:.0e} for logits, {100 * MOST_PERPLEXITY} % for perplexity). Random weights amplify "
        "rounding, and in mixtures of experts it changes the chosen experts at near ties of the router. So intervals "
        "are wide, and the KL divergence says more about the size of both programs' errors.",
        "\n".join(beyond) or "None.",
        LEFT_OUT,
        "\n".join(notes),
    ]
    return "\n\n".join(parts) + "\n"


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    kl = " / ".join(f"{each:.1e}" for each in found["kl"].values())
    return f"{100 * found['ratio']:+.2f} ± {100 * found['interval']:.2f} %, {kl}"


def main(words: Seq[str] | None = None) -> int:
    """Compare, and write family-logits.json and .md. Returns 1 if a figure is beyond its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.family_logits", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="others keep their figures")
    parser.add_argument("--record", action="store_true", help="write the file of the tests")
    parser.add_argument("--build", type=Path, default=ROOT / ".venv-llama-server")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(words)
    version, of_commit = json.loads((options.build / "version.json").read_text()), commit()
    out, kept = options.out / "family-logits.json", dict(RECORDED)
    figures = {row["family"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    options.out.mkdir(parents=True, exist_ok=True)
    engine = None
    for family in options.only:
        if family in LACKING and not (options.record and family in kept):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            engine = engine or LlamaCpp(options.build.resolve())
            checkpoint, file = make_checkpoint(family, folder / "checkpoint"), folder / "model.gguf"
            try:
                engine.worker.call("convert", checkpoint=str(checkpoint), file=str(file))
                if options.record:
                    kept[family] = describe(read_header(file))
                    if family not in LACKING:
                        kept[family] |= record(engine, kept[family], folder)
                if family not in LACKING:
                    figures[family] = compare(engine, family, checkpoint, file)
            except ContenderError as error:  # a new process goes on
                figures[family] = {"family": family, "stops": public(str(error).strip().splitlines()[-1])}
                engine.worker.close()
                engine = None
        results = {
            "schema": 1, "date": now(), "commit": of_commit, "llama-cpp-python": version, "different": DIFFERENT,
            "lacking": LACKING, "rows": [figures[family] for family in FAMILIES if family in figures],
        }  # fmt: skip
        out.write_text(json.dumps(results, indent=1) + "\n")
        out.with_suffix(".md").write_text(table(results))
    if engine:
        engine.worker.close()
    if options.record:
        lines = [f"{json.dumps(family)}: {json.dumps(kept[family])}" for family in FAMILIES if family in kept]
        RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(out.with_suffix(".md").read_text())
    return int(any(misses(row) for row in figures.values()))


def misses(row: dict[str, Any]) -> list[str]:
    """Return what is beyond the bars."""
    if "stops" in row:
        return [f"llama.cpp stops: {row['stops']}"]
    logits = [f"logits {row['file']:.1e}"] if row["file"] > MOST and row["family"] not in DIFFERENT else []
    return logits + [
        f"perplexity in {kind} {100 * each['ratio']:+.2f} ± {100 * each['interval']:.2f} %"
        for kind, each in row["perplexity"].items() if abs(each["ratio"]) > MOST_PERPLEXITY
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
