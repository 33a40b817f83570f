"""`GgufTarget`: a GGUF model as a `Target`, run by llama.cpp.

A sequence holds one sequence id of llama.cpp. Each further branch of a draft gets an id of its own for one step: it
shares the cells of the text, and the cells of the nodes that it has in common with others. Committing keeps the id
whose branch was accepted, and drops the others; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.common_beginning import common_beginning
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling, best_steps_per_call
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Runtime, TargetOut
from slipstream.errors import TargetError
from slipstream.models.executor import unknown_ids
from slipstream.targets.decoder import check_finite
from slipstream.targets.gguf.cell_memory import CellMemory
from slipstream.targets.gguf.kept_texts import KeptTexts
from slipstream.targets.gguf.llama_context import IDS, ROWS, LlamaContext, Logits, Row
from slipstream.targets.gguf.tree_passes import Part, leaf_paths, passes

if TYPE_CHECKING:
    from slipstream.models.gguf_shape import GgufShape

_NOT_FINITE = "use kv_dtype='float32' if keys overflow in float16, or convert the model again"


@dataclass(slots=True)
class _Held:
    """What llama.cpp holds of a sequence.

    id        its sequence id. length: leading tokens of the sequence that it holds.
    cells     tokens that it holds, nodes of its own branch included.
    branches  id and nodes of each branch, between `run` and `commit`.
    """

    id: int
    length: int = 0
    cells: int = 0
    branches: list[tuple[int, Seq[int]]] = field(default_factory=list)


class GgufTarget:
    """context: of llama.cpp. shape: of the model."""

    def __init__(self, context: LlamaContext, shape: GgufShape, runtime: Runtime):
        self.context_of_llama, self.config, self._runtime = context, shape, runtime
        self.vocab_size = context.model.vocab_size
        self.context = min(shape.context, context.cells)
        self.device = torch.device("cpu")
        self.max_pending = ROWS
        self.steps_per_call = best_steps_per_call(sum(context.model.header.stored.values()))
        self._eos_ids = frozenset(shape.eos_ids)
        self._rooms = np.empty(0, np.float32)
        self._held: dict[int, _Held] = {}
        self._free = list(range(context.ids))[::-1]
        self._kept = KeptTexts(self._give_back)
        self._memory = CellMemory(context.cells, self, self._kept)

    @property
    def capabilities(self) -> Capabilities:
        """See `Target`."""
        experts = self.config.experts
        return Capabilities(
            eos_ids=self._eos_ids,
            multi_step=self,
            runtime=self._runtime,
            memory=self._memory,
            fork=self.fork,
            torch_threads=1,
            experts=(experts.per_token, experts.count) if experts else None,
        )

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for taps: llama.cpp gives no hidden states."""
        if taps:
            raise TargetError(
                f"hidden states of layers {list(taps)} were asked of a GGUF model",
                why="llama.cpp gives logits only",
                fix="choose a drafter that needs none, or load the model from a folder",
            )
        self._check_ids(token for seq in seqs for token in seq.pending)
        self._check_ids(draft.ids)
        try:
            logits = self._run(seqs, draft)
        except BaseException:  # llama.cpp may have run some of the rows
            for seq in seqs:
                self.release(seq.id)
            raise
        own = [draft.splits[b] + b for b in range(len(seqs))]
        if not np.isfinite(logits[own, 0]).all():  # numpy takes a tenth of the time of torch here
            check_finite(torch.from_numpy(logits), seqs, draft, _NOT_FINITE)
        return TargetOut(torch.from_numpy(logits))

    def decode_steps(
        self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None
    ) -> DecodedSteps:
        """See `core.target.MultiStep`. Tokens are drawn in float64."""
        self._check_ids(token for seq in seqs for token in seq.pending)
        size = len(seqs)
        tokens = np.zeros((steps, size), np.int64)  # [K, B]
        logits = self._room(steps, size)
        probs: list[Tensor] = []
        try:
            alike = self._first_of_several(seqs, steps, logits[0])
            helds, context = [self._held[seq.id] for seq in seqs], self.context_of_llama  # it may be a wider one
            for j in range(steps):
                if j > 1 or (j and alike):
                    logits[j] = context.decode_next(tokens[j - 1])
                elif j:
                    logits[j] = context.decode(
                        [(int(t), seq.end, (h.id,), True) for t, h, seq in zip(tokens[0], helds, seqs, strict=True)]
                    )
                tokens[j], drawn = _picked(logits[j], sampling, j)
                if drawn is not None:
                    probs.append(drawn)
            if not np.isfinite(logits[..., 0]).all():
                for row in logits:
                    check_finite(torch.from_numpy(row), seqs, Draft.empty(size), _NOT_FINITE)
        except BaseException:
            for seq in seqs:
                self.release(seq.id)
            raise
        for seq, held in zip(seqs, helds, strict=True):
            held.cells = held.length = seq.end + steps - 1
        return DecodedSteps(torch.from_numpy(tokens), torch.from_numpy(logits), torch.stack(probs) if probs else None)

    def _first_of_several(self, seqs: Seq[Sequence], steps: int, logits: Logits) -> bool:
        """Run what is pending, into logits [B, V]. Returns whether that is one token of each sequence, so that the next
        pass has the same rows."""
        helds = [self._rolled_back(seq) for seq in seqs]
        rows = [
            (seq.tokens[i], i, (held.id,), i == seq.end - 1)
            for seq, held in zip(seqs, helds, strict=True)
            for i in range(held.length, seq.end)
        ]
        self._make_room(len(rows) + (steps - 1) * len(seqs))
        if len(rows) > ROWS:
            logits[:] = self._run(seqs, Draft.empty(len(seqs)))
            self.commit(seqs, [[]] * len(seqs))
        else:
            logits[:] = self.context_of_llama.decode(rows)
        return len(rows) == len(seqs)

    def _room(self, steps: int, batch: int) -> Logits:
        """Memory for logits [K, B, V], the same in each call: fresh memory would cost more than to fill it."""
        size = steps * batch * self.vocab_size
        if len(self._rooms) < size:
            self._rooms = np.empty(size, np.float32)
        return self._rooms[:size].reshape(steps, batch, self.vocab_size)

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        for seq, nodes in zip(seqs, path, strict=True):
            held = self._held[seq.id]
            common = [common_beginning(branch, nodes) for _, branch in held.branches]
            best = common.index(max(common))
            for i, (seq_id, branch) in enumerate(held.branches):
                if i == best:
                    held.id, held.cells = seq_id, held.length + len(branch)
                else:
                    self._give_back(seq_id)
            held.branches = []
            held.length += common[best]
            self._cut(held, held.length)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        """See `core.target.Fork`. Both sequence ids share the cells."""
        parent = self._held.get(parent_id)
        if parent is None or parent.branches or length > parent.length or child_id in self._held:
            raise TargetError(
                f"sequence {child_id} cannot begin with {length} tokens of sequence {parent_id}",
                why=f"that one holds {0 if parent is None else parent.length}, and a sequence begins once",
                fix="fork between two runs, with another id",
            )
        child = self._begun(child_id)
        self.context_of_llama.fork(parent.id, child.id)
        child.length, child.cells = min(length, parent.length), parent.cells  # 0 if the cache was widened
        self._cut(child, child.length)

    def release(self, seq_id: int) -> None:
        held = self._held.pop(seq_id, None)
        if held is not None:
            for one in {held.id, *(each for each, _ in held.branches)}:
                self._give_back(one)

    # --- what `CellMemory` asks ------------------------------------------------------------------------------------

    def lengths(self) -> dict[int, int]:
        """See `Cells`."""
        return {seq_id: held.cells for seq_id, held in self._held.items()}

    def copied(self, seq_id: int, length: int) -> int | None:
        """See `Cells`."""
        held = self._held.get(seq_id)
        if held is None or held.branches or held.length < length or not self._has_ids(1):
            return None
        copy = self._free.pop()
        self.context_of_llama.fork(held.id, copy)
        if held.cells > length:
            self.context_of_llama.cut(copy, length)
        return copy

    def adopt(self, seq_id: int, source: int, length: int) -> bool:
        """See `Cells`."""
        if not self._free:
            return False
        held = self._begun(seq_id)
        self.context_of_llama.fork(source, held.id)
        self.context_of_llama.cut(held.id, length)
        held.length = held.cells = length
        return True

    # --- parts -------------------------------------------------------------------------------------------------

    def _run(self, seqs: Seq[Sequence], draft: Draft) -> Logits:
        helds = [self._rolled_back(seq) for seq in seqs]
        if not draft.is_chain and not self._has_ids(sum(len(leaf_paths(draft, b)) - 1 for b in range(len(seqs)))):
            self._widen()
        self._make_room(sum(seq.end - held.length for seq, held in zip(seqs, helds, strict=True)) + len(draft))
        counts = [draft.splits[b + 1] - draft.splits[b] for b in range(len(seqs))]
        tails = []  # pending tokens that run together with the nodes
        early: list[Row] = []
        for seq, held, count in zip(seqs, helds, counts, strict=True):
            tails.append(min(seq.end - held.length, ROWS - count))
            early += [(seq.tokens[i], i, (held.id,), False) for i in range(held.length, seq.end - tails[-1])]
        for at in range(0, len(early), ROWS):
            self.context_of_llama.decode(early[at : at + ROWS])
        for seq, held, tail in zip(seqs, helds, tails, strict=True):
            held.cells = seq.end - tail
        parts = passes(draft, tails, len(self._free), ROWS)
        if len(parts) == 1:
            return self._pass(parts[0], seqs, draft)[0]
        logits = np.empty((len(seqs) + len(draft), self.vocab_size), np.float32)
        for each in parts:
            found, rows = self._pass(each, seqs, draft)
            logits[rows] = found
            for part in each:  # the next pass needs the ids
                held = self._held[seqs[part.b].id]
                for seq_id, _ in held.branches[1:]:
                    self._give_back(seq_id)
                del held.branches[1:]
        return logits

    def _pass(self, parts: Seq[Part], seqs: Seq[Sequence], draft: Draft) -> tuple[Logits, list[int]]:
        """Logits [R, V] of the last pending tokens and the nodes of these parts, and which packed rows they are."""
        rows: list[Row] = []
        packed: list[int] = []
        for part in parts:
            seq, first = seqs[part.b], draft.splits[part.b]
            held = self._held[seq.id]
            if not part.first:
                held.cells = held.length + len(held.branches[0][1])
                self._cut(held, held.length)
            ids = (held.id, *(self._free.pop() for _ in part.paths[1:]))
            held.branches = list(zip(ids, part.paths, strict=True))
            if held.cells:
                for seq_id in ids[1:]:
                    self.context_of_llama.fork(held.id, seq_id)
            if part.first:
                rows += [(seq.tokens[i], i, ids, i == seq.end - 1) for i in range(held.cells, seq.end)]
                packed.append(first + part.b)
                held.length = seq.end
            of: dict[int, list[int]] = {}  # node -> ids of the branches that it is on
            for seq_id, path in held.branches:
                for node in path:
                    of.setdefault(node, []).append(seq_id)
            for node in sorted(of):
                position = seq.end - 1 + draft.depths[first + node]
                rows.append((draft.ids[first + node], position, tuple(of[node]), True))
                packed.append(first + part.b + 1 + node)
        return self.context_of_llama.decode(rows), packed

    def _begun(self, seq_id: int) -> _Held:
        """A sequence that holds nothing yet."""
        if not self._has_ids(1):
            self._widen()
        if not self._free:
            raise TargetError(
                f"{len(self._held)} sequences are held already, llama.cpp has {IDS} sequence ids",
                why="each sequence needs one",
                fix="release finished sequences, or choose a smaller max_batch",
            )
        made = self._held[seq_id] = _Held(self._free.pop())
        return made

    def _rolled_back(self, seq: Sequence) -> _Held:
        """What is held of a sequence, with nothing that was not accepted; a new one if there is none."""
        held = self._held.get(seq.id)
        if held is None:
            held = self._begun(seq.id)
        if held.branches:  # nothing of the last run was committed
            for seq_id, _ in held.branches[1:]:
                self._give_back(seq_id)
            held.cells = held.length + len(held.branches[0][1])
            held.branches = []
        held.length = min(held.length, seq.kv_len)
        self._cut(held, held.length)
        return held

    def _has_ids(self, count: int) -> bool:
        """Whether so many ids are free, if need be after kept texts were dropped."""
        while len(self._free) < count and self._kept.drop_oldest():
            pass
        return len(self._free) >= count

    def _make_room(self, rows: int) -> None:
        """Drop kept texts where the cache may have no cells for so many rows. Shared cells are counted for each that
        holds them, so more may be dropped than is needed."""
        lengths = self._kept.lengths
        if lengths:
            over = sum(lengths) + sum(held.cells for held in self._held.values()) + rows - self.context_of_llama.cells
            while over > 0 and self._kept.drop_oldest():
                over -= lengths.pop(0)

    def _widen(self) -> None:
        """Have all ids of llama.cpp. That empties its cache: the texts that it holds are read again."""
        if self.context_of_llama.ids < IDS:
            self.context_of_llama = self.context_of_llama.widened()
            self._free = list(range(IDS))[::-1]
            self._kept.forget()
            for held in self._held.values():
                held.id, held.length, held.cells, held.branches = self._free.pop(), 0, 0, []

    def _cut(self, held: _Held, length: int) -> None:
        if held.cells > length:
            self.context_of_llama.cut(held.id, length)
            held.cells = length

    def _give_back(self, seq_id: int) -> None:
        self.context_of_llama.clear(seq_id)
        self._free.append(seq_id)

    def _check_ids(self, ids: Iterable[int]) -> None:
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise unknown_ids(f"token id {outside} is outside the model's vocabulary of {self.vocab_size}")


def _picked(logits: Logits, sampling: StepSampling, j: int) -> tuple[NDArray[np.int64], Tensor | None]:
    """Tokens [B] of step j from logits [B, V], and the distributions [B, V] that they were drawn from, if they were."""
    known = logits[:, : sampling.vocab]
    if sampling.kind == "maximum":
        return known.argmax(-1), None  # the first of equal ones
    scores = torch.from_numpy(known).double()
    if sampling.uniforms is None:
        assert sampling.noise is not None
        return (sampling.scaled(scores) + sampling.noise[j][..., : scores.shape[-1]]).numpy().argmax(-1), None
    drawn, probs = sampling.draw(scores, j)
    tokens = drawn.numpy()
    padding = logits.shape[-1] - probs.shape[-1]
    return tokens, torch.nn.functional.pad(probs, (0, padding)) if padding else probs
