"""`PackedModule`: a transformers model as an `Executor`: packed rows of several sequences over our own KV blocks.

So everything that is made for our own decoder holds for the model: trees, ragged batches, prompts in chunks, the
prefix cache, hidden states, early exits. What makes it possible is described in `packed_pass`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from slipstream.backends.torch.rows_apart import spoilt
from slipstream.backends.torch.torch_paged import TorchPaged, consecutive
from slipstream.core.target import Runtime
from slipstream.core.torch_threads import all_threads
from slipstream.kv.blocks import BLOCK
from slipstream.models.executor import Batch, Output, check_ids, check_slice
from slipstream.models.module_shape import ModuleShape
from slipstream.targets.huggingface.few_rows import FewRows
from slipstream.targets.huggingface.module_blocks import ModuleBlocks, PackedCache
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.packed_pass import NAME, PackedError, PackedPass, PackedRow, running

_SPREAD = 16  # blocks that a sequence can grow by next to others before reading it needs a copy


class PackedModule(TorchPaged[ModuleBlocks]):
    """parts: the model; shape: of it; kind: how it takes part, one of `packed_pass.KINDS`.

    slices  whether layers can be run apart (see `Executor.forward`); decided by `huggingface_target`, which tries.
    """

    torch_threads = None
    multi_step = None
    packed_embedding = None

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
        self.slices = self.tuples = False
        self._takes = set(inspect.signature(parts.module.forward).parameters)
        self._few_rows = FewRows(parts.module)
        self._cache = PackedCache(shape.layers)
        super().__init__(ModuleBlocks(shape.layers), kv_blocks, _SPREAD)

    @all_threads()
    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        taps: tuple[int, ...] = (),
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> Output:
        check_ids(batch.tokens, self.config.vocab_size)
        with self._calls:
            first, last = layers or (0, self.config.layers)
            check_slice(self.config, first, last, taps)
            wanted = tuple(dict.fromkeys(taps if layers is None else (*taps, last)))
            apart = nullcontext() if layers is None else self.parts.only(first, last, hidden, self.tuples)
            with self.parts.hidden_states(wanted) as seen, apart:
                logits = self._run(batch, last - first)
                if self.kind != "dense" and spoilt(logits, len(batch.seq_ids)):
                    logits = self._run(batch, last - first, apart=True)
            stream = seen.get(last)
            if layers is not None and -1 not in taps and last not in taps:
                seen.pop(last, None)
            return Output(logits, {tap: seen[tap].to(self.device) for tap in taps}, stream)

    def memory(self) -> dict[str, int]:
        return {
            "weights": sum(p.nbytes for p in self.parts.module.parameters()),
            "kv": self._blocks.nbytes,
        }

    # --- parts -------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch, layers: int, apart: bool = False) -> Tensor:
        """Logits [R, V] of the selected rows, through this many layers."""
        places = [place for own in self._reserve(batch) for place in own]
        scattered: list[int] = []
        rows: list[PackedRow] = []
        for b in range(len(batch.seq_ids)):
            rows.append(self._row(batch, b, scattered, rows[-1].offset + rows[-1].total if rows else 0))
        copied = torch.tensor(scattered) if scattered else None
        one = PackedPass(self.kind, rows, self._blocks, torch.tensor(places), copied, self.device, apart)
        select = torch.tensor(list(batch.select), dtype=torch.int64, device=self.device)
        given: dict[str, Any] = {"use_cache": True, "past_key_values": self._cache}
        given["position_ids"] = torch.tensor([list(batch.positions)], device=self.device)  # [1, M]
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = select
        with self._attending(), running(one), self._few_rows.fast():
            out = self.parts.module(input_ids=batch.tokens[None], **given)
        used = one.cached if self.kind == "dense" else one.attended
        if used != layers:
            raise PackedError(f"{used} of {layers} layers used the attention and the cache that were given")
        logits: Tensor = out.logits[0].to(self.device)  # [R, V], or [M, V]
        logits = logits if "logits_to_keep" in self._takes else logits[select]
        return logits if logits.dtype == torch.float64 else logits.float()

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """The model uses our attention in this block, and its own after it: it may be someone else's, too."""
        config = self.parts.module.config
        before = {id(one): (one, one._attn_implementation) for one in (config, self.parts.config)}
        for one, _ in before.values():
            one._attn_implementation = NAME
        try:
            yield
        finally:
            for one, own in before.values():
                one._attn_implementation = own

    def _row(self, batch: Batch, b: int, scattered: list[int], offset: int) -> PackedRow:
        """Sequence `b` of the batch. Blocks that are not consecutive are added to `scattered`."""
        start, stop = batch.splits[b], batch.splits[b + 1]
        total = batch.past[b] + stop - start
        table = self._pool.tables[batch.seq_ids[b]][: -(-total // BLOCK)]
        in_place = consecutive(table)
        first = BLOCK * (table[0] if in_place else len(scattered))
        if not in_place:
            scattered += table
        positions = torch.tensor(list(batch.positions[start:stop]))
        return PackedRow(start, stop, total, positions, batch.trees[b], in_place, first, offset)
