"""`BeamSearch`: runs the beams of several prompts over one target, with one forward pass per step for all of them.

If two beams continue the same text, its sequence is forked: the two sequences share KV blocks until one of them writes
to a block. So a prompt is read once for all its beams, and no token is computed twice.
"""

from collections import deque
from collections.abc import Generator, Sequence as Seq
from contextlib import AbstractContextManager

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Memory, Target
from slipstream.engine.beam_params import BeamParams
from slipstream.engine.beams import Beams
from slipstream.errors import ParameterError, TargetError
from slipstream.host.torch_threads import host_threads
from slipstream.host.turns import Turns


class Search:
    """One prompt and its beams. first: the prompt's sequence, before prefill.

    prompt  the prompt's tokens.
    seqs    one sequence for each running text, in the same order.
    cached  ids of sequences that may hold KV.
    """

    def __init__(self, first: Sequence, params: BeamParams, stop_ids: frozenset[int]):
        most = min(params.max_tokens, first.context - first.prompt)
        self.beams = Beams(params, stop_ids, most)
        self.seqs = [first]
        self.cached = {first.id}
        self.prompt, self._most = first.tokens[: first.prompt], most

    def blocks(self, memory: Memory) -> int:
        """Return the largest number of blocks that the search can hold at a time: the full blocks of the prompt, which
        all beams share, and each beam's own. The last token of a text has no KV."""
        shared = len(self.prompt) // memory.block
        whole = -(-(len(self.prompt) + self._most - 1) // memory.block)
        return shared + self.beams.params.beams * (whole - shared)


class BeamSearch:
    """Runs beam searches of several prompts together. max_batch: largest number of prompts in a step, each with all its
    beams; further prompts wait. lock: see `Engine`.

    Raises ParameterError for a target whose sequences cannot be forked."""

    def __init__(self, target: Target, max_batch: int, lock: AbstractContextManager[object] | None = None):
        self.target, self.max_batch = target, max_batch
        if target.capabilities.fork is None:
            raise ParameterError(
                f"beam search does not work with a {type(target).__name__}, which cannot fork sequences",
                why="a beam that splits in two must copy its KV cache",
                fix="load the target from a checkpoint, or implement `fork` and declare it in its capabilities",
            )
        self._fork = target.capabilities.fork
        memory = target.capabilities.memory
        self._bounded = None if memory is None or memory.capacity is None else memory
        self._lock = lock or Turns()

    def run(self, searches: Seq[Search]) -> Generator[list[Search], None, None]:
        """Run searches to their ends; yields the running searches after each step. Closing the iterator frees their
        memory. Raises TargetError, before any search runs, if the KV cache is too small for one of them."""
        for search in searches:
            self._check_fits(search)
        waiting, running = deque(searches), list[Search]()
        try:
            while waiting or running:
                with self._lock:
                    self._admit(waiting, running)
                    self._step(running)
                yield running
                running = [search for search in running if not search.beams.done]
        finally:
            with self._lock:
                for search in searches:
                    self._free(search)

    def _admit(self, waiting: deque[Search], running: list[Search]) -> None:
        """Start waiting searches while the batch has room, and the KV cache can hold all that they may ever need."""
        while waiting and len(running) < self.max_batch:
            if self._bounded is not None and running:
                wanted = sum(search.blocks(self._bounded) for search in (*running, waiting[0]))
                if wanted > (self._bounded.capacity or 0):
                    return
            running.append(waiting.popleft())

    def _step(self, running: Seq[Search]) -> None:
        seqs = [seq for search in running for seq in search.seqs]
        with host_threads(self.target.capabilities.torch_threads):
            out = self.target.run(seqs, Draft.empty(len(seqs), self.target.device))
            self.target.commit(seqs, [[] for _ in seqs])
            row = 0
            for search in running:
                logits = out.logits[row : row + len(search.seqs)]  # [R, V]
                row += len(search.seqs)
                parents = search.beams.advance(logits)
                if search.beams.done:
                    self._free(search)
                else:
                    self._continue(search, parents)

    def _continue(self, search: Search, parents: Seq[int]) -> None:
        """Update the sequences to the running texts. The first beam that continues a text takes over its sequence, the
        others fork it; sequences without a continuation are freed."""
        for parent in set(range(len(search.seqs))) - set(parents):
            self._release(search, search.seqs[parent])
        taken = set[int]()
        seqs = []
        for parent in parents:
            seq = search.seqs[parent]
            seqs.append(self._fork_sequence(search, seq) if parent in taken else seq)
            taken.add(parent)
        for seq, text in zip(seqs, search.beams.running, strict=True):
            seq.take(text.output[-1:], None)
        search.seqs = seqs

    def _fork_sequence(self, search: Search, seq: Sequence) -> Sequence:
        """Return another sequence with the same tokens, all of which have KV."""
        child = seq.copy_for(seq.context)
        search.cached.add(child.id)  # added before forking, so that an interrupt leaves no blocks behind
        self._fork(seq.id, child.id, len(seq.tokens))
        return child

    def _release(self, search: Search, seq: Sequence) -> None:
        self.target.release(seq.id)
        search.cached.discard(seq.id)

    def _free(self, search: Search) -> None:
        for seq_id in search.cached:
            self.target.release(seq_id)
        search.cached.clear()

    def _check_fits(self, search: Search) -> None:
        if self._bounded is None or self._bounded.capacity is None:
            return
        wanted = search.blocks(self._bounded)
        if wanted > self._bounded.capacity:
            raise TargetError(
                f"{search.beams.params.beams} beams may need {wanted} KV blocks, but the KV cache has "
                f"{self._bounded.capacity}",
                why="the size of the cache was fixed when the model was loaded",
                fix="give fewer beams or a smaller max_tokens, or load the model with a larger kv_tokens",
            )
