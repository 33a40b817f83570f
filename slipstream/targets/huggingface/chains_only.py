"""`ChainsOnly`: a transformers model as a `Target`, with one transformers cache per sequence.

It is for models that cannot be packed (see `packed_pass`): attention with own code or biases (ALiBi), recurrent or
convolution layers. Each sequence is one forward pass, drafts are chains, and rejected tokens are rolled back
(`rollback`).
"""

import inspect
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from slipstream.backends.torch.rows_apart import may_spoil
from slipstream.checkpoints.module_shape import UNBOUNDED, ModuleShape
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, HeadHost, Runtime, TargetOut
from slipstream.errors import UnsupportedModelError
from slipstream.executor.executor import check_finite, check_ids
from slipstream.host.torch_threads import all_threads
from slipstream.targets.decoder import check_fork, check_is_chain
from slipstream.targets.huggingface.few_rows import FewRows
from slipstream.targets.huggingface.module_parts import ModuleParts
from slipstream.targets.huggingface.rollback import RollbackCache

_LAG = 16
"""Largest number of accepted tokens that are read again together with the next tokens, after states were restored."""


class ChainsOnly:
    """Runs one sequence at a time. parts: the model; shape: its sizes; chunk: most prompt tokens in one forward pass.

    one_by_one  whether tokens after the first forward pass are read one at a time, for models that forget their state
                when they read several (Mamba in transformers 5.23).
    """

    def __init__(
        self,
        parts: ModuleParts,
        shape: ModuleShape,
        runtime: Runtime,
        head_host: HeadHost | None = None,
        chunk: int = 512,
        one_by_one: bool = False,
    ):
        self.parts, self.config, self.one_by_one = parts, shape, one_by_one
        self.chunk = UNBOUNDED if one_by_one else chunk
        self.vocab_size, self.context, self.device = shape.vocab_size, shape.context, parts.device
        self._takes = set(inspect.signature(parts.module.forward).parameters)
        self._few_rows = FewRows(parts.module)
        self._cache_name = parts.cache_name
        if not self._cache_name:
            raise UnsupportedModelError(
                f"a {shape.model_type!r} model does not use a cache object of transformers",
                why="the model keeps its state itself, so Slipstream cannot remove rejected draft tokens from it",
                fix="use another model; transformers itself runs this one, without speculation",
            )
        self._caches: dict[int, RollbackCache] = {}
        self.capabilities = Capabilities(
            eos_ids=frozenset(shape.eos_ids),
            trees=False,
            head_host=head_host,
            runtime=runtime,
            fork=partial(fork_cache, self._caches),
            experts=shape.routed,
        )

    @all_threads()
    @torch.inference_mode()
    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for a draft with siblings."""
        check_is_chain(draft)
        parts: list[Tensor] = []
        hidden: dict[int, list[Tensor]] = {tap: [] for tap in taps}
        splits = [0]
        for b, seq in enumerate(seqs):
            logits, seen = self._run_one(seq, draft.ids[draft.splits[b] : draft.splits[b + 1]], taps)
            parts.append(logits)
            for tap in taps:
                hidden[tap].append(seen[tap])
            splits.append(splits[-1] + seq.end - seq.kv_len + len(logits) - 1)
        out = torch.cat(parts)  # [B + N, V]
        check_finite(out, seqs, draft)
        return TargetOut(out, {tap: torch.cat(each) for tap, each in hidden.items()}, splits)

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        """Does nothing: the next run rolls its cache back."""

    def release(self, seq_id: int) -> None:
        self._caches.pop(seq_id, None)

    def _run_one(self, seq: Sequence, chain: Seq[int], taps: Seq[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the logits [n + 1, V] of the last pending token and the chain, and the hidden states of all pending
        tokens and the chain."""
        text = [*seq.tokens[: seq.end], *chain]
        cache = self._roll_back(seq)
        try:
            if seq.kv_len - len(cache.tokens) > _LAG:
                self._forward(seq, cache, text[len(cache.tokens) : seq.kv_len], 1, ())
            cache.mark()
            read = seq.kv_len - len(cache.tokens)  # accepted tokens that are read again
            pieces: list[dict[int, Tensor]] = []
            while len(text) - len(cache.tokens) > max(self.chunk, len(chain) + 1):
                most = min(self.chunk, len(text) - len(cache.tokens) - len(chain) - 1)
                pieces.append(self._forward(seq, cache, text[len(cache.tokens) : len(cache.tokens) + most], 1, taps)[1])
            before = len(cache.tokens)
            logits, last = self._forward(seq, cache, text[before:], len(chain) + 1, taps)
            if may_spoil(logits, 1):  # an overflow at one draft token may spoil the rows before it
                if not cache.roll_back(before):
                    cache = self._caches[seq.id] = RollbackCache(self.parts.cache_config)
                if len(cache.tokens) < before:
                    self._forward(seq, cache, text[len(cache.tokens) : before], 1, ())
                logits, last = self._apart(seq, cache, text[before:], len(chain) + 1, taps)
        except BaseException:  # perhaps only some layers have read the tokens
            del self._caches[seq.id]
            raise
        return logits, {tap: torch.cat([p[tap] for p in (*pieces, last)])[read:] for tap in taps}

    def _roll_back(self, seq: Sequence) -> RollbackCache:
        """Return the cache of a sequence, rolled back to accepted tokens of this sequence."""
        cache = self._caches.get(seq.id)
        if cache is not None:
            length = min(len(cache.tokens), seq.kv_len)
            if cache.tokens[:length] == seq.tokens[:length] and cache.roll_back(length):
                return cache
        cache = self._caches[seq.id] = RollbackCache(self.parts.cache_config)
        return cache

    def _forward(
        self, seq: Sequence, cache: RollbackCache, tokens: Seq[int], keep: int, taps: Seq[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if self.one_by_one and cache.tokens and len(tokens) > 1:
            return self._apart(seq, cache, tokens, keep, taps)
        ids = torch.tensor([list(tokens)], device=self.device)  # [1, n]
        check_ids(ids[0], self.vocab_size)
        given = self._inputs(seq, cache, ids)
        if "logits_to_keep" in self._takes:
            # Row indices: where layers share keys (Gemma 4), a count would also cut the last hidden states.
            rows = torch.arange(len(tokens) - keep, len(tokens), device=self.device)
            given["logits_to_keep"] = rows if taps else keep
        with self.parts.collect_states(taps) as seen, self._few_rows.fast():
            out = self.parts.module(use_cache=True, **given)
        cache.tokens += tokens
        logits: Tensor = out.logits[0, -keep:].to(self.device)  # [keep, V]
        states = {tap: seen[tap].to(self.device) for tap in taps}
        return (logits if logits.dtype == torch.float64 else logits.float()), states

    def _apart(
        self, seq: Sequence, cache: RollbackCache, tokens: Seq[int], keep: int, taps: Seq[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run `_forward` for one token after another, so that no token can spoil an earlier one (see `rows_apart`)."""
        each = []
        for token in tokens:
            cache.mark()
            each.append(self._forward(seq, cache, [token], 1, taps))
        states = {tap: torch.cat([seen[tap] for _, seen in each]) for tap in taps}
        return torch.cat([logits for logits, _ in each[-keep:]]), states

    def _inputs(self, seq: Sequence, cache: RollbackCache, ids: Tensor) -> dict[str, object]:
        given: dict[str, object] = {"input_ids": ids, self._cache_name: cache.cache}
        if "position_ids" in self._takes:
            start = len(cache.tokens)
            given["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device)[None]
        return given


def fork_cache(caches: dict[int, RollbackCache], parent_id: int, child_id: int, length: int) -> None:
    """Fork a cache as `core.target.Fork`. States are copied; keys and values are shared until one changes."""
    parent = caches.get(parent_id)
    read = None if parent is None else len(parent.tokens)
    check_fork(parent_id, child_id, length, read, child_id in caches)
    assert parent is not None
    caches[child_id] = parent.copy()  # the child's next run rolls back to `length`
