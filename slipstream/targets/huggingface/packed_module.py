"""`PackedModule`: a transformers model as an `Executor`: packed rows of several sequences over our own KV blocks.

With it all features of our own decoder work for the model: trees, ragged batches, prompts in chunks, the prefix cache,
hidden states, early exits. `packed_pass` describes how.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.utils import ALL_CACHE_NAMES

from slipstream.backends.torch.rows_apart import may_spoil
from slipstream.backends.torch.torch_paged import SPREAD, TorchPaged
from slipstream.checkpoints.module_shape import ModuleShape
from slipstream.core.target import Runtime, Slice
from slipstream.executor.executor import Batch, Output, check_ids, check_slice
from slipstream.host.torch_threads import all_threads
from slipstream.targets.huggingface.few_rows import FewRows
from slipstream.targets.huggingface.module_blocks import ModuleBlocks
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.packed_cross import CrossAttention
from slipstream.targets.huggingface.packed_inputs import PackedCache
from slipstream.targets.huggingface.packed_pass import NAME, PackedPass, PackedRow, running


class PackedLayers(TorchPaged[ModuleBlocks]):
    """Layers of transformers that run in packed passes over our own KV blocks; see `packed_pass` for `kind`."""

    kind: str
    device: torch.device

    def _pack(self, batch: Batch, apart: bool = False, cross: CrossAttention | None = None) -> PackedPass:
        """Return the pass over a batch, and reserve its slots. Masks compare the positions of the batch with slots."""
        places = torch.tensor([place for reserved in self._reserve(batch) for place in reserved])
        scattered: list[int] = []
        rows: list[PackedRow] = []
        for b, (start, stop) in enumerate(pairwise(batch.splits)):
            total, in_place, first = self._place(batch, b, scattered)
            offset = rows[-1].offset + rows[-1].total if rows else 0
            positions = torch.tensor(list(batch.positions[start:stop]))
            rows.append(PackedRow(start, stop, total, positions, batch.trees[b], in_place, first, offset))
        copied = torch.tensor(scattered) if scattered else None
        return PackedPass(self.kind, rows, self._blocks, batch.tokens, places, copied, self.device, apart, cross)


@contextmanager
def attend_packed(*configs: PreTrainedConfig) -> Iterator[None]:
    """Make models with these configurations use the packed attention within this block. Their own attention is restored
    afterwards, because other code may use them, too."""
    before = {id(config): (config, config._attn_implementation) for config in configs}
    for config, _ in before.values():
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, replaced in before.values():
            config._attn_implementation = replaced


class PackedModule(PackedLayers):
    """Runs a model in packed passes. parts: the model; shape: its sizes; kind: one of `packed_pass.KINDS`.

    slices  whether layers can run apart (see `Executor.forward`); set by the trial in `trials.check_packed`.
    """

    torch_threads = None
    multi_step = None
    packed_tables = None

    def __init__(
        self,
        parts: ModuleParts,
        shape: ModuleShape,
        runtime: Runtime,
        kind: str = "blocks",
        kv_blocks: int | None = None,
    ):
        self.kind = kind
        self.parts, self.config, self.runtime = parts, shape, runtime
        self.device = parts.device
        self.slices = False
        self._takes = set(inspect.signature(parts.module.forward).parameters)
        self._cache_name = parts.cache_name or ALL_CACHE_NAMES[0]  # a model may pass it on without naming it
        self._few_rows = FewRows(parts.module)
        self._cache = PackedCache(shape.layers)
        super().__init__(ModuleBlocks(shape.layers), kv_blocks, SPREAD)

    @all_threads()
    @torch.inference_mode()
    def forward(
        self, batch: Batch, taps: tuple[int, ...] = (), layers: Slice = None, hidden: Tensor | None = None
    ) -> Output:
        check_ids(batch.tokens, self.config.vocab_size)
        with self._calls:
            first, last = layers or (0, self.config.layers)
            check_slice(self.config, first, last, taps)
            wanted = tuple(dict.fromkeys(taps if layers is None else (*taps, last)))
            through = partial(self._through, batch, hidden, wanted, (first, last), layers is not None)
            logits, seen = through()
            # In a dense pass, attention also computes with rows of other sequences, masked.
            if may_spoil(logits, 1 if self.kind == "dense" else len(batch.seq_ids)):
                logits, seen = through(apart=True)
            stream = seen.get(last)
            if layers is not None and -1 not in taps and last not in taps:
                seen.pop(last, None)
            return Output(logits, {tap: seen[tap].to(self.device) for tap in taps}, stream)

    def memory(self) -> dict[str, int]:
        return {"weights": sum(p.nbytes for p in self.parts.module.parameters()), "kv": self._blocks.nbytes}

    def _through(
        self,
        batch: Batch,
        hidden: Tensor | None,
        taps: tuple[int, ...],
        span: tuple[int, int],
        sliced: bool,
        apart: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return logits [R, V] of the selected rows, and hidden states by tap, of a pass through the layers `span`."""
        only = self.parts.only(*span, hidden) if sliced else nullcontext()
        one = self._pack(batch, apart, self._cross(batch))
        select = torch.tensor(list(batch.select), dtype=torch.int64, device=self.device)
        with self.parts.collect_states(taps) as seen, only, self._attend(), running(one), self._few_rows.fast():
            given = self._inputs(one)
            if "logits_to_keep" in self._takes:
                given["logits_to_keep"] = select
            out = self.parts.module(use_cache=True, **given)
        one.check_used(span[1] - span[0])
        logits: Tensor = out.logits[0].to(self.device)  # [R, V], or [M, V]
        logits = logits if "logits_to_keep" in self._takes else logits[select]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if lost := one.find_lost():
            logits[[i for i, row in enumerate(batch.select) if row in lost]] = torch.nan
            for states in seen.values():
                states[list(lost)] = torch.nan
        return logits, seen

    def _cross(self, batch: Batch) -> CrossAttention | None:
        return None

    def _inputs(self, one: PackedPass) -> dict[str, object]:
        return {
            "input_ids": one.tokens[None],
            self._cache_name: self._cache,
            "position_ids": one.positions[None],  # [1, M]
        }

    def _attend(self) -> AbstractContextManager[None]:
        return attend_packed(self.parts.module.config, self.parts.config, self.parts.cache_config)
