"""Measures passes of hybrid models over one row and over eight rows, with the shapes of Qwen3.5-0.8B and LFM2-1.2B, and
of Qwen3-0.6B for comparison. Weights are random, in 4 bits. Then measures the time to the first token of a prompt, cold
and with a hit in the prefix cache.

    python -m benchmarks.recurrent_passes [--rounds 30] [--context 200] [--prompt 4000] [--prompts 5]

A pass over one row is plain decoding. The time of eight rows over the time of one row is the cost of a draft of seven
tokens. A pass reads and writes each state of a hybrid once. Convolutions and states are computed token by token; their
share of the time is measured in a pass over 512 rows of a prompt ("recurrence"). --prompts 0 leaves prompts out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from slipstream import LLM, SamplingParams
from slipstream.backends.native.kernels import matrices
from slipstream.backends.native.kernels.records import LAYER
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.native.threads import kernel_lock, pool
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.core.sequence import Sequence
from slipstream.executor.executor import Batch
from slipstream.targets.decoder import Decoder

ROWS, PIECE = (1, 8), 512
COMMON = {"vocab_size": 151936, "hidden_size": 1024, "max_position_embeddings": 32768, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": COMMON | {
        "model_type": "qwen3", "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "Qwen3.5-0.8B": COMMON | {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "LFM2-1.2B": COMMON | {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
}  # fmt: skip


def random_weights(config: DecoderConfig) -> Weights:
    """Return random weights of this shape, which are made when they are read."""
    random = torch.Generator().manual_seed(0)

    def read(dims: tuple[int, ...]) -> Callable[[slice], torch.Tensor]:
        def rows(part: slice) -> torch.Tensor:
            count = len(range(dims[0])[part])
            return torch.randn((count, *dims[1:]), generator=random).mul_(0.02).to(torch.bfloat16)

        return rows

    readers = {name: (name, read(dims)) for name, dims in config.shapes().items()}
    return Weights(readers, config, torch.float32)


def random_executor(shape: dict[str, Any]) -> NativeExecutor:
    config = DecoderConfig.from_dict(shape)
    return NativeExecutor(config, random_weights(config), LoadSettings(quantize="int4"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    executors = {name: random_executor(shape) for name, shape in SHAPES.items()}
    for executor in executors.values():
        run(executor, 0, options.context)
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for rows in ROWS:
            for name, executor in executors.items():
                began = time.perf_counter()
                run(executor, options.context, rows)
                times.setdefault((name, rows), []).append(time.perf_counter() - began)
    for name, executor in executors.items():
        one, eight = (statistics.median(times[name, rows]) for rows in ROWS)
        size = executor.memory()["weights"]
        print(
            f"{name}: {size / 1e6:.0f} MB of weights, states {executor.config.state_bytes() / 1e6:.1f} MB; "
            f"1 row {one * 1e3:.1f} ms ({1 / one:.1f} tokens/s, {size / one / 1e9:.1f} GB/s), "
            f"8 rows {eight * 1e3:.1f} ms, {eight / one:.2f}x"
        )
        if executor.config.recurrences:
            share = recurrence(executor, PIECE, options.rounds)
            print(f"{name}: the recurrence takes {share:.1%} of a pass over {PIECE} rows of a prompt")
    for name, executor in executors.items() if options.prompts else ():
        cold, warm = first_tokens(executor, options.prompt, options.prompts)
        print(f"{name}: first token of {options.prompt}: cold {cold:.3f} s, warm {warm:.3f} s, {cold / warm:.1f}x")


def first_tokens(executor: NativeExecutor, length: int, prompts: int) -> tuple[float, float]:
    """Return the median seconds until the first token of a prompt, and of the same prompt once more."""
    executor.release(1)  # the sequence of `run`
    llm, params = LLM(Decoder(executor)), SamplingParams(max_tokens=1, ignore_eos=True)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(prompts):
        engine = llm.engine()
        text = [(i * i * 7 + i * number + number) % 50021 for i in range(length)]
        for each in times:
            began = time.perf_counter()
            for _ in engine.decode([Sequence(list(text), params)]):
                pass
            each.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


@njit
def _recur(boards, parts, caches, rows, inputs, out, scratch, threads):  # type: ignore[no-untyped-def]
    board = boards[0]
    board.threads = threads
    board.prepare.scratch, board.prepare.scratch_bytes = scratch.ctypes.data, scratch.nbytes // board.size
    for number in range(parts.shape[0]):
        part, given, into = parts[number], inputs.ctypes.data, out.ctypes.data
        matrices.recur(board, part, caches[0], rows[0], given, inputs.shape[1], into, out.shape[1])


def recurrence(executor: NativeExecutor, count: int, rounds: int) -> float:
    """Return the share of the recurrence in a pass over `count` rows of a prompt, from interleaved medians."""
    (layers,) = (array for array in executor._layout.arrays if array.dtype == LAYER)
    parts = layers["recurrent"][layers["recurrent"]["kind"] > 0].copy()
    wide = int((parts["heads"] * parts["value"]).max())
    inputs = np.random.default_rng(0).normal(size=(count, int(parts["gate"].max()) + wide)).astype(np.float32)
    out, scratch, threads = np.empty((count, wide), np.float32), np.empty(1 << 20, np.uint8), executor._workspace.most
    batch = Batch((1,), torch.arange(count), range(count), (0, count), (0,), (None,), (count - 1,), (count,))
    alone, whole = list[float](), list[float]()
    for _ in range(rounds + 1):
        executor.release(1)
        began = time.perf_counter()
        executor.forward(batch)
        whole.append(time.perf_counter() - began)
        executor.release(1)
        with kernel_lock():
            rows, caches, workers = executor._rows(batch), executor._caches(batch), pool(threads)
            began = time.perf_counter()
            workers.run(_recur, parts, caches, rows.record[:1], inputs, out, scratch, threads=threads)
            alone.append(time.perf_counter() - began)
    executor.release(1)
    return statistics.median(alone[1:]) / statistics.median(whole[1:])


def run(executor: NativeExecutor, past: int, rows: int) -> None:
    """Run a pass over a pending token and a draft of rows - 1 tokens, which are not accepted."""
    at = range(past, past + rows)
    select = range(rows) if past else (rows - 1,)
    certain = (1 if past else rows,)
    executor.forward(Batch((1,), torch.arange(rows), at, (0, rows), (past,), (None,), select, certain))


if __name__ == "__main__":
    main()
