"""Measures passes over 1, 2, 4 and 8 rows of mixtures of experts, with the shapes of Qwen3-30B-A3B in Q4_K and of
gpt-oss-20b in MXFP4, random weights and fewer layers.

    python -m benchmarks.mixture_passes [--rounds 40] [--context 200] [--before CHECKOUT]

A pass reads the union of the experts that its rows choose. The table compares the time of the pass with the bytes of
this union. Rows are random tokens, which choose experts independently; every pass has other tokens, so that its experts
are not in the processor's cache. With --before, another checkout of Slipstream (`git worktree add`) runs in turns with
this one. Shapes have 4 and 3 layers instead of 48 and 24, and a vocabulary of 4096, so that a pass reads little besides
the layers. All experts of a layer have equal weights, each in memory of its own. The bandwidth in the table is the
bandwidth of a loop that only adds numbers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import slipstream
from benchmarks.gguf.slipstream_worker import bandwidth
from benchmarks.protocol import ROOT, THREADS, Worker, serve
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_blocks import READERS, TYPES, Blocks
from slipstream.checkpoints.weight_formats import FORMATS
from slipstream.checkpoints.weights import Weights
from slipstream.executor.executor import Batch

ROWS = (1, 2, 4, 8)
VOCAB = 4096
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 32768, "tie_word_embeddings": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("Q4_K", COMMON | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    }),
    "gpt-oss-20b": ("MXFP4", COMMON | {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 3,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4,
    }),
}  # fmt: skip
"""By shape: (type of the experts' weights, configuration). Other matrices are Q8_0, and routers float32."""


class RandomWeights(Weights):
    """Random weights in blocks, made on access. Matrices of the same shape and type are equal."""

    def __init__(self, config: DecoderConfig, expert_type: str):
        random = torch.Generator().manual_seed(0)

        def read(dims: tuple[int, ...], size: float) -> Callable[[slice], torch.Tensor]:
            return lambda part: size * torch.randn(dims, generator=random)[part]

        # Embeddings are large, because the outputs of layers are similar in all rows: so rows choose independently.
        sizes = {n: 50.0 if "embed" in n else 1.0 for n in config.shapes()}
        super().__init__({n: (n, read(dims, sizes[n])) for n, dims in config.shapes().items()}, config, torch.float32)
        self.expert_type = expert_type
        self._blocks = cache(random_blocks)

    def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:
        dims = self.shapes[name]
        if len(dims) != 2 or "embed" in name or name.endswith("mlp.gate.weight"):
            return None
        return self._blocks(self.expert_type if ".experts." in name else "Q8_0", *dims)[rows]


def random_blocks(kind: str, outs: int, columns: int) -> Blocks:
    """Return random weights of about 0.02 with a mean of 0. With another mean, rows would become similar and choose the
    same experts."""
    stored, rng = next(each for each in TYPES.values() if each.name == kind), np.random.default_rng(columns)
    raw = rng.integers(0, 256, (outs, columns // stored.count, stored.nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = 121
    else:
        halves = np.array([1.2e-4, 9e-4] if kind == "Q4_K" else [3e-4], np.float16)
        raw[..., : 2 * len(halves)] = halves.view(np.uint8)
    return READERS[kind](raw)


model: list[NativeExecutor] = []


def load(shape: str, context: int) -> dict[str, Any]:
    """Make a model, which replaces the model before, and let it read a context. Returns the bytes of the weights that
    every pass reads, and the bytes of an expert."""
    model.clear()
    expert_type, keys = SHAPES[shape]
    config = DecoderConfig.from_dict(keys)
    model.append(NativeExecutor(config, RandomWeights(config, expert_type), LoadSettings(threads=THREADS)))
    run(0, context, 0)
    experts = {name: math.prod(dims) for name, dims in config.shapes().items() if ".experts.0." in name}
    stored = next(each.format for each in TYPES.values() if each.name == expert_type)
    expert = FORMATS[stored].bytes_per_weight * sum(experts.values()) / config.layers
    assert config.experts is not None
    always = model[0].memory()["weights"] - config.layers * config.experts.count * expert
    return {"always": always, "expert": expert, "code": slipstream.__file__}


def run(past: int, rows: int, seed: int) -> dict[str, Any]:
    """Run a pass over a pending token and a draft of rows - 1 tokens, which are not accepted. Returns its seconds, and
    the number of experts that it read."""
    tokens = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(seed))
    select = range(rows) if past else (rows - 1,)
    batch = Batch((1,), tokens, range(past, past + rows), (0, rows), (past,), (None,), select)
    began = time.perf_counter()
    out = model[0].forward(batch)
    return {"seconds": time.perf_counter() - began, "experts": getattr(out, "experts_read", 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--before", type=Path, help="another checkout of Slipstream")
    options = parser.parse_args()
    folders = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    workers = {name: start(name, folder) for name, folder in folders.items()}
    try:
        for shape in SHAPES:
            measure(shape, workers, folders, options.rounds, options.context)
    finally:
        for worker in workers.values():
            worker.close()


def start(name: str, folder: Path) -> Worker:
    """Start a process that runs this file with the package of a checkout."""
    path = f"{folder}:{Path(__file__).parent}"
    return Worker(name, Path(__file__).stem, environment={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})


def measure(shape: str, workers: dict[str, Worker], folders: dict[str, Path], rounds: int, context: int) -> None:
    """Print a line for each checkout and number of rows."""
    facts = {name: worker.call("load", shape=shape, context=context) for name, worker in workers.items()}
    for name, folder in folders.items():
        assert Path(facts[name]["code"]).is_relative_to(folder), "needs Python 3.11 or newer"
    reading = workers["now"].call("bandwidth")["bandwidth"]
    print(f"{shape}: bandwidth {reading / 1e9:.1f} GB/s, {rounds} rounds, medians")
    times: dict[tuple[str, int], list[float]] = {}
    read: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for number in range(rounds):
        for rows in ROWS:
            for name, worker in workers.items():
                reply = worker.call("run", past=context, rows=rows, seed=number * ROWS[-1] + rows)
                times.setdefault((name, rows), []).append(reply["seconds"])
                if name == "now":  # the other checkout chooses the same experts
                    read[rows].append(reply["experts"])
    for name in workers:
        sizes = {r: facts[name]["always"] + statistics.mean(read[r]) * facts[name]["expert"] for r in ROWS}
        for rows in ROWS:
            took, one = statistics.median(times[name, rows]), statistics.median(times[name, 1])
            share = sizes[rows] / took / reading
            print(
                f"  {name:6} {rows} rows: {took * 1e3:6.2f} ms, {sizes[rows] / 1e6:5.0f} MB, "
                f"{share:.2f} of the bandwidth; {took / one:.2f}x one row, {sizes[rows] / sizes[1]:.2f}x by bytes; "
                f"{took / statistics.median(times['now', rows]):.2f}x now"
            )


if __name__ == "__main__":
    if __spec__ and __spec__.name == Path(__file__).stem:  # a worker
        serve({"load": load, "run": run, "bandwidth": bandwidth})
    else:
        main()
