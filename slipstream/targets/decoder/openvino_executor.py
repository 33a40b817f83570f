"""`OpenVinoExecutor`: the decoder on a CPU, as an OpenVINO graph around paged attention.

One call checks a packed, ragged batch of tokens, chains and trees alike. The first forward compiles the graph
(0.1 s for 14M parameters, 0.25 s for 110M); other sets of taps, slices of layers and unrolled drafts are compiled
when first asked for, over the same KV cache. Nothing compiled is kept on disk: a blob of a graph with paged
attention cannot be read back by this runtime (it loses the attention's head sizes), and compiling takes no longer
than reading one and checking that it is sound.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draws import GREEDY, Draws
from slipstream.errors import TargetError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import (
    ONE_THREAD_BYTES,
    Batch,
    Output,
    Unrolled,
    check_settings,
    check_slice,
    check_unrolled,
)
from slipstream.targets.decoder.openvino_constants import Constants
from slipstream.targets.decoder.openvino_graph import Graph, for_one_sequence, forward_graph, unrolled_graph
from slipstream.targets.decoder.openvino_paged import PROPERTIES, probe
from slipstream.targets.decoder.openvino_program import Program, core, kept, unrolled_kept
from slipstream.targets.decoder.paged_cache import Paged, PagedCache

FEW_ROWS = (2, 8, 16)
"""Numbers of pending tokens that an unrolled graph is best asked with. For the first, which is by far the most
frequent, there may be a graph of its own."""

_FIXED_BYTES = 16 << 20
"""Up to so many bytes of weights an unrolled graph is small enough to have another one, for the pending rows that a
round most often leaves..."""

_FIXED_AFTER = 8
"""... once it was asked for so many times: compiling one costs as much as it saves in hundreds of calls."""


class Unrolling(NamedTuple):
    """What an unrolled graph is made for: `Draws` of this kind and vocabulary, and so many pending rows (0: any) of one
    sequence."""

    steps: int
    exit: int | None
    kind: str
    vocab: int | None
    rows: int = 0


class OpenVinoExecutor(Paged):
    """A decoder on the CPU; implements `executor.Executor`.

    weights    canonical name -> tensor, any float dtype; each is read once. The model is computed in float32.
    quantize   None, or "int8": int8 weights per output channel, with kernels that round activations to int8 too
               (see `openvino_constants`): a model of its own, close to the float32 one.
    threads    None leaves it to the runtime, except that small models run on one.
    cache_dir  folder of the temporary file that the weights are mapped from; default $SLIPSTREAM_CACHE/openvino,
               else ~/.cache/slipstream/openvino. Nothing is left there.

    A tree on layers with a sliding window is run branch by branch once something has left the window. Mixtures of
    experts run every expert on every token: exact, but no faster than a dense model of their full size.
    Raises UnsupportedModelError where this runtime cannot run the model exactly, and LoadError.
    """

    name = "openvino"
    few_rows = FEW_ROWS

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        quantize: str | None = None,
        threads: int | None = None,
        cache_dir: str | Path | None = None,
    ):
        check_settings(quantize, threads)
        probe(core(), config.heads, config.kv_heads, config.head_dim)
        self.config = config
        self.device = torch.device("cpu")
        self.quantize = quantize
        self._constants = Constants(config, weights, quantize, cache_folder(cache_dir))
        self._constants.evict()
        self.threads = threads  # as asked for
        self._properties = properties(self._constants.matmul_bytes, threads)
        self._wide = properties(ONE_THREAD_BYTES, threads)
        self._cache = PagedCache(config.layers, config.kv_heads, config.head_dim)
        self._programs: dict[tuple[int, int], tuple[Program, frozenset[int]]] = {}
        self._unrolled: dict[Unrolling, Program] = {}
        self._asked: Counter[Unrolling] = Counter()  # how often for one of fixed rows
        self._windows = [w for w in config.windows if w]

    # --- one pass -------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        taps: tuple[int, ...] = (),
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> Output:
        """See `Executor.forward`. A new set of taps recompiles the graph once (taps only ever accumulate, so that
        the packed weights exist once); each slice of layers has packed weights of its own."""
        if self._beyond_window(batch):
            return self._forward_branches(batch, taps, layers, hidden)
        first, last = layers or (0, self.config.layers)
        made = tuple(t for t in taps if t != first or first == 0)  # tap `first` of a later slice is what is handed in
        program = self._program(first, last, made)
        rows = batch.splits[-1]
        program.feed_batch(self._cache, batch)
        if first == 0:
            program.bind("ids", (rows,)).copy_(batch.tokens)
        else:
            if hidden is None:
                raise TargetError(f"layers {first}..{last - 1} need the hidden states of the layers below")
            program.bind("hidden_in", tuple(hidden.shape)).copy_(hidden)
        program.feed("select", batch.select)
        width = self.config.hidden_size
        logits = program.bind("logits", (len(batch.select), self.config.vocab_size))
        for name in program.outputs:
            if name != "logits":
                program.bind(name, (rows, width))
        program.infer()
        return Output(
            logits,
            {t: program.bound(f"tap.{t}" if t in made else "hidden_in") for t in taps},
            program.bound("hidden") if "hidden" in program.outputs else None,
        )

    def unrolled(
        self,
        batch: Batch,
        steps: int,
        draws: Draws = GREEDY,
        exit: int | None = None,
    ) -> Unrolled:
        """Draft `steps` tokens a sequence in one call.

        Runs the pending tokens of the batch (chains), then one token at a time, each picked by `draws`. KV is written
        for the pending tokens and the first steps-1 drafted ones; with `exit`, in its layers only, for all of them.
        """
        check_unrolled(steps, exit, self.config.layers)
        rows = batch.splits[-1]
        program = self._drafting(Unrolling(steps, exit, draws.kind, draws.vocab), rows, len(batch.seq_ids))
        count, vocab, width = len(batch.seq_ids), self.config.vocab_size, self.config.hidden_size
        program.feed_batch(self._cache, batch, steps - (exit is None))
        program.bind("ids", (rows,)).copy_(batch.tokens)
        program.feed("select", [s - 1 for s in batch.splits[1:]])
        program.feed_draws(count, draws)
        tokens, logits = program.bind("tokens", (steps, count)), program.bind("logits", (steps, count, vocab))
        if exit is not None:
            program.bind("hidden", (rows, width))
            program.bind("later", (steps, count, width))
        program.infer()
        if exit is None:
            return Unrolled(tokens, logits)
        return Unrolled(tokens, logits, program.bound("hidden"), program.bound("later"))

    def _drafting(self, general: Unrolling, rows: int, count: int) -> Program:
        """The compiled draft for `count` sequences with so many pending rows: the general one, or the one for just
        these rows."""
        weights, wanted = self._constants.matmul_bytes, general
        if count == 1 and rows == self.few_rows[0] and weights <= _FIXED_BYTES:
            fixed = general._replace(rows=rows)
            self._asked[fixed] += 1
            if self._asked[fixed] > _FIXED_AFTER:
                wanted = fixed

        def make() -> Program:
            w = wanted
            graph = unrolled_graph(self.config, self._constants, w.steps, w.exit, w.kind, w.vocab)
            if not w.rows:
                return self._compile(graph, wide=True)
            return self._compile(for_one_sequence(graph, rows, w.steps, self.config.vocab_size))

        return kept(self._unrolled, wanted, unrolled_kept(weights), make)

    def _program(self, first: int, last: int, taps: Seq[int]) -> Program:
        """The compiled slice with at least these taps."""
        held = self._programs.get((first, last))
        if held is not None and held[1].issuperset(taps):
            return held[0]
        check_slice(self.config, first, last, taps)
        wanted = frozenset(taps) | (held[1] if held else frozenset())
        if held is not None:
            del self._programs[first, last], held  # before the next: packed weights exist once
        program = self._compile(forward_graph(self.config, self._constants, first, last, sorted(wanted)))
        self._programs[first, last] = (program, wanted)
        return program

    def trim(self) -> None:
        """Let go of what was compiled for slices of layers: each has packed weights of its own."""
        self._programs = {key: held for key, held in self._programs.items() if key == (0, self.config.layers)}

    def _compile(self, graph: Graph, wide: bool = False) -> Program:
        """wide: a prompt may be among the rows of a small model, too, and all threads are worth their waking."""
        self._constants.forget()
        return Program(graph, self._wide if wide else self._properties, self._constants)

    # --- trees beyond a sliding window ----------------------------------------------------------------------------

    def _beyond_window(self, batch: Batch) -> bool:
        """True if a tree's tokens do not all see the whole past. The runtime's window counts slots, and a node on
        a later branch has a slot beyond its position, so it would lose tokens that it should see."""
        if not self._windows or all(t is None for t in batch.trees):
            return False
        splits, least = batch.splits, min(self._windows)
        return any(
            t is not None and batch.past[b] + splits[b + 1] - splits[b] > least for b, t in enumerate(batch.trees)
        )

    def _forward_branches(
        self, batch: Batch, taps: tuple[int, ...], layers: tuple[int, int] | None, hidden: Tensor | None
    ) -> Output:
        """The same forward, each root-to-leaf path of a tree as a chain of its own: slow, exact, and rare."""
        rows, width = batch.splits[-1], self.config.hidden_size
        logits = torch.zeros(rows, self.config.vocab_size)
        tapped = {t: torch.zeros(rows, width) for t in taps}
        stream = torch.zeros(rows, width)
        for b, seq_id in enumerate(batch.seq_ids):
            start, past, tree = batch.splits[b], batch.past[b], batch.trees[b]
            count = batch.splits[b + 1] - start
            if tree is None:
                paths = [list(range(count))]
            else:
                sees = tree.bool()
                leaves = [i for i in range(count) if int(sees[:, i].sum()) == 1]  # seen by nobody else
                paths = [torch.nonzero(sees[i]).flatten().tolist() for i in leaves]
            self._cache.reserve(seq_id, past + count)
            kept: dict[int, list[np.ndarray]] = {}
            for path in paths:
                packed = [start + i for i in path]
                chain = Batch(
                    (seq_id,), batch.tokens[packed], [batch.positions[i] for i in packed], (0, len(path)),
                    (past,), (None,), range(len(path)), (batch.limit[b],),
                )  # fmt: skip
                out = self.forward(chain, taps, layers, None if hidden is None else hidden[packed])
                logits[packed] = out.logits
                for t in taps:
                    tapped[t][packed] = out.taps[t]
                if out.hidden is not None:
                    stream[packed] = out.hidden
                if len(paths) > 1:
                    kept |= {i: self._cache.slot(seq_id, past + j) for j, i in enumerate(path)}
            for i, content in kept.items():
                self._cache.write(seq_id, past + i, content)
        return Output(logits[list(batch.select)], tapped, stream if layers else None)

    def memory(self) -> dict[str, int]:
        """Bytes: "weights" without tables of which only rows are read, "kv" of the blocks in use so far."""
        return {"weights": self._constants.resident_bytes, "kv": self._cache.nbytes}


def properties(matmul_bytes: int, threads: int | None) -> dict[str, Any]:
    """What to compile a model with that reads so many bytes of matrices a pass."""
    if threads is None and matmul_bytes < ONE_THREAD_BYTES:
        threads = 1
    return PROPERTIES if threads is None else PROPERTIES | {"INFERENCE_NUM_THREADS": threads}


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where the temporary file of weights goes (see `OpenVinoExecutor`)."""
    if cache_dir is not None:
        return Path(cache_dir)
    root = os.environ.get("SLIPSTREAM_CACHE")
    folder = (Path(root) if root else Path.home() / ".cache" / "slipstream") / "openvino"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home is no reason to fail
        if not root:
            return Path(tempfile.gettempdir())
    return folder
