"""`DescribedGguf`, and when it is loaded `GgufTarget`: a GGUF model as a `Target`, run by llama.cpp: for architectures
that our own decoder does not run. Its drafts are chains."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.gguf_header import GgufShape, gguf_shape
from slipstream.checkpoints.gguf_keys import warn_of_keys
from slipstream.checkpoints.llamacpp_library import LlamaModel
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import Progress
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Runtime, TargetOut
from slipstream.errors import LoadError, ParameterError, TargetError, UnsupportedModelError
from slipstream.executor.executor import check_finite, make_unknown_ids
from slipstream.host.machine import available_bytes, available_cores
from slipstream.kv.blocks import BLOCK
from slipstream.settings import LLAMACPP, MOST_DRAFT_TOKENS
from slipstream.targets.decoder import check_is_chain
from slipstream.targets.described import Described
from slipstream.targets.gguf.cell_memory import CellMemory
from slipstream.targets.gguf.llama_context import ROWS, LlamaContext, Row
from slipstream.targets.huggingface.kinds import GGUF, Kind

log = logging.getLogger("slipstream")

_USUAL_REQUESTS, _USUAL_CELLS = 8, 16384
"""The KV cache has room for so many full contexts, or for so many tokens if that is less; at least for one context."""

_MOST_MEMORY = 0.25
"""Share of the free memory that a KV cache of unasked size may take."""

_NOT_FINITE = "use kv_dtype='float32' if keys overflow in float16, or convert the model again"


class GgufTarget:
    """context: of llama.cpp. shape: of the model. memory: who holds which cells of the context."""

    def __init__(self, context: LlamaContext, shape: GgufShape, runtime: Runtime):
        self.config, self.memory = shape, CellMemory(context)
        self.vocab_size = context.model.vocab_size
        self.context = min(shape.context, context.cells)
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(
            eos_ids=frozenset(shape.eos_ids),
            trees=False,
            runtime=runtime,
            memory=self.memory,
            fork=self.memory.fork,
            torch_threads=1,
            experts=shape.routed,
        )

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for a draft with siblings, and for taps: llama.cpp gives no hidden
        states."""
        if taps:
            raise TargetError(
                f"hidden states of layers {list(taps)} were asked of a GGUF model",
                why="llama.cpp gives logits only",
                fix="choose a drafter that needs none, or load the model from a folder",
            )
        check_is_chain(draft)
        self._check_ids(token for seq in seqs for token in seq.pending)
        self._check_ids(draft.ids)
        try:
            logits = self._run(seqs, draft)
        except BaseException:  # llama.cpp may have run some of the rows
            for seq in seqs:
                self.release(seq.id)
            raise
        check_finite(logits, seqs, draft, _NOT_FINITE)
        return TargetOut(logits)

    def _run(self, seqs: Seq[Sequence], draft: Draft) -> Tensor:
        """Logits [B + N, V]."""
        rows: list[Row] = []
        for b, seq in enumerate(seqs):
            cells, chain = self.memory.rolled_back(seq), draft.ids[draft.splits[b] : draft.splits[b + 1]]
            text = [*seq.tokens[cells.cells : seq.end], *chain]
            rows += [(token, i, cells.id, i >= seq.end - 1) for i, token in enumerate(text, start=cells.cells)]
            cells.cells += len(text)
        self.memory.make_room(0)
        logits, at = np.empty((len(seqs) + len(draft), self.vocab_size), np.float32), 0
        for start in range(0, len(rows), ROWS):
            rows_out = self.memory.context.decode(rows[start : start + ROWS])
            logits[at : at + len(rows_out)] = rows_out
            at += len(rows_out)
        return torch.from_numpy(logits)

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        for seq, nodes in zip(seqs, path, strict=True):
            self.memory.cut(seq.id, seq.end + len(nodes))

    def release(self, seq_id: int) -> None:
        self.memory.release(seq_id)

    def _check_ids(self, tokens: Iterable[int]) -> None:
        outside = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise make_unknown_ids(f"token id {outside} is outside the model's vocabulary of {self.vocab_size}")


@dataclass(frozen=True)
class DescribedGguf(Described):
    """A GGUF file."""

    config: GgufShape = field(kw_only=True)

    @staticmethod
    def of(checkpoint: Checkpoint, settings: LoadSettings, refusals: Mapping[str, str]) -> DescribedGguf:
        """Raises CheckpointError for a damaged file, ParameterError for settings that llama.cpp does not have. A draft
        model takes what is for the target's own code: dtype and device."""
        draft = settings.role == "draft"
        settings.refuse(
            ("quantize",) if draft else ("quantize", "dtype"),
            "asked of a model that llama.cpp runs",
            "its weights stay as the file has them",
            ("draft_quantize='none'" if draft else "leave it out") + "; llama-quantize of llama.cpp quantises",
        )
        device = settings.device
        if device is not None and not draft and str(device).partition(":")[0] != "cpu":
            raise ParameterError(
                f"device={str(device)!r} was asked of a model that llama.cpp runs",
                why="it is run on the CPU",
                fix="leave it out",
            )
        shape = gguf_shape(checkpoint.header)
        plain = shape.header.file_type == "F32"
        kv_dtype = settings.kv_dtype or ("float32" if plain else "float16")  # else that of llama.cpp
        resolved = replace(settings, device=torch.device("cpu"), dtype=torch.float32, kv_dtype=kv_dtype)
        return DescribedGguf(checkpoint, resolved, LLAMACPP, refusals, config=shape)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Those of llama.cpp, which knows further ones by name; of the file if it is not installed or refuses it."""
        try:
            return LlamaModel(self.checkpoint.header, vocab_only=True).eos_ids
        except LoadError:
            return self.config.eos_ids

    @property
    def kind(self) -> Kind:
        return GGUF

    @property
    def weight_bytes(self) -> int:
        return sum(self.config.header.stored.values())

    @property
    def kv_bytes(self) -> int:
        return max(1, 2 * self.config.kv_width * (4 if self.settings.kv_dtype == "float32" else 2))

    def usual_kv_tokens(self, requests: int = 0) -> int:
        """Not more than is usual: the cache is filled with zeros when it is made."""
        if self.settings.kv_tokens is not None:
            return self.settings.kv_tokens
        each = self.config.context + MOST_DRAFT_TOKENS
        wanted = max(each, min(_USUAL_REQUESTS * each, _USUAL_CELLS))
        return max(BLOCK, min(wanted, int(_MOST_MEMORY * available_bytes(torch.device("cpu")) / self.kv_bytes)))

    def load(self, progress: Progress | None = None) -> GgufTarget:
        """Raises UnsupportedModelError for a model that llama.cpp refuses or that cannot be rolled back, LoadError
        without llama-cpp-python."""
        shape, kv_dtype = self.config, self.settings.kv_dtype
        try:
            model = LlamaModel(self.checkpoint.header, progress=progress)
        except LoadError as fault:  # our own decoder's reason may be the better one
            raise type(fault)("; ".join((*self.refusals.values(), fault.what)), why=fault.why, fix=fault.fix) from fault
        assert kv_dtype is not None
        _check_rollback(model)
        threads = self.settings.threads or available_cores()
        context = LlamaContext(model, self.usual_kv_tokens(), kv_dtype, threads)
        shape = replace(shape, eos_ids=model.eos_ids)
        quantize = None if shape.header.file_type == "F32" else shape.header.file_type
        runtime = Runtime(LLAMACPP, torch.float32, quantize, kv_dtype, threads, model.header.path)
        for why in self.refusals.values():
            log.warning("%s: llama.cpp runs it instead, slower", why)
        warn_of_keys(shape.header.path.name, shape.header.metadata, read=None)
        return GgufTarget(context, shape, runtime)


def _check_rollback(model: LlamaModel) -> None:
    """Raise UnsupportedModelError for a model that is not causal, or whose state cannot be rolled back."""
    library, kind = model.library, model.header.architecture
    sees_all = library.llama_model_is_diffusion(model.handle) or not model.header.setting("attention.causal", True)
    if library.llama_model_has_encoder(model.handle) or sees_all:
        raise UnsupportedModelError(
            f"the architecture {kind!r} is not that of a causal language model",
            why="each token must depend on the text before it only",
            fix="use a decoder-only model",
        )
    if library.llama_model_is_recurrent(model.handle) or library.llama_model_is_hybrid(model.handle):
        raise UnsupportedModelError(
            f"the state of the architecture {kind!r} cannot be rolled back in llama.cpp",
            why="it is recurrent, and rejected draft tokens could not be removed from it",
            fix="use another model; llama.cpp itself runs this one, and transformers may run its checkpoint here",
        )
