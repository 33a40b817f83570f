"""`Engine`: decodes many requests over one target.

    engine.add(seq)             the request waits
    while engine.unfinished:
        ran = engine.step()     requests join, one step runs, finished requests leave

All requests share one drafter. Before it, another drafter proposes the tokens that a request's structured output
forces. Each request keeps its own rule and largest number of draft tokens from its first token to its last. Its output
does not depend on the other requests: with greedy decoding and under the rule `coupled` its text is the same as alone,
and any other rule keeps its distribution.

One forward pass of a step runs the pending token and the draft of each request that decodes, and chunks of prompts. So
a long prompt does not stall the other requests. If the KV cache has a fixed size and a step does not fit, drafts are
shortened or left out first. Then the youngest request is preempted: it loses its KV, waits, and is read again.

If the target fails in a step with several requests, each of them runs alone: a request that fails alone ends with
`finish` "error", and the others continue.
"""

import itertools
from collections import deque
from collections.abc import Generator, Mapping, Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter, NoDrafter
from slipstream.core.plain import plain_steps
from slipstream.core.rules import Rule, check_params
from slipstream.core.sequence import Sequence, source_of
from slipstream.core.step import StepClock, budget, limit_depth, prune, step
from slipstream.core.target import Memory, Target, rewind
from slipstream.drafters.forced import MOST_FORCED, ForcedFirst, FormDrafter, NamedTokens
from slipstream.drafters.guard import Guard
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.messages import EngineStats
from slipstream.engine.request_memory import SharedPrefixes, check_fits, check_source, fit_lengths, slots
from slipstream.engine.timed_step import TimedStep
from slipstream.host.turns import Turns

_nonces = itertools.count()
"""Numbers the nonces of the process, because engines may share a drafter. The numbers ascend, so that a program that is
run again gets the same texts."""

MOST_ROWS = 512
"""Prompts are read in chunks of this many rows if no request decodes."""

FEW_PROMPT_ROWS, PROMPT_ROWS = 32, 64
"""Bounds of the prompt rows in a step in which requests decode. Each such request allows `ROWS_PER_TOKEN` prompt rows,
because requests wait for prompt rows, and a step of few requests is short without them."""

ROWS_PER_TOKEN = 4


@dataclass(eq=False)
class Request:
    """A sequence, and its largest number of draft tokens per step.

    chosen     whether the engine's `DraftLengths` chooses the draft length; otherwise the length is `draft_tokens`.
    kind       see `DraftLengths.use`.
    followed   whether the request drafted in the last step; if not, the drafter catches up before it drafts.
    detached   whether the request decodes without the drafter until it ends or is preempted: a drafter that reads
               hidden states needs them for all tokens.
    preempted  whether the request ran before, and lost its KV to other requests.
    """

    seq: Sequence
    draft_tokens: int
    chosen: bool
    kind: int
    followed: bool = False
    detached: bool = False
    preempted: bool = False


class Engine:
    """Decodes requests, several at a time.

    drafter       drafter of all requests; the engine wraps it in a `Guard`.
    rule, draft_tokens  values for requests that give none (see `add`). If `draft_tokens` is a `DraftLengths`, it
                  chooses a length in each step.
    usual_draft_tokens  upper bound of `draft_tokens` for requests that give no number.
    forced_tokens  largest number of draft tokens per step that structured output forces. It is fixed, because such
                   draft tokens are nearly certain.
    max_batch     largest number of requests in a step; further requests wait.
    lock          held during each step: targets and drafters must not be used by two Python threads at once. Engines
                  that share a target share a lock.
    prompt_rows   largest number of prompt rows in a step in which requests decode; None: see `PROMPT_ROWS`.
    prefix_cache  whether requests reuse the KV of a prefix that they share with earlier requests, and leave their KV
                  for later requests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: Rule,
        draft_tokens: int | DraftLengths,
        max_batch: int,
        lock: AbstractContextManager[object] | None = None,
        prompt_rows: int | None = None,
        prefix_cache: bool = False,
        usual_draft_tokens: int | None = None,
        forced_tokens: int = MOST_FORCED,
    ):
        self.target, self.rule = target, rule
        self.drafter = drafter if isinstance(drafter, Guard) else Guard(drafter, target)
        self.lengths = draft_tokens if isinstance(draft_tokens, DraftLengths) else None
        if self.lengths is not None:
            self.lengths.serve(self.drafter.traits.prices_rows, target.capabilities.relative_cost)
        most = draft_tokens.most if isinstance(draft_tokens, DraftLengths) else draft_tokens
        self.draft_tokens = most if usual_draft_tokens is None else usual_draft_tokens
        self.forced_tokens, self._form_drafter = forced_tokens, FormDrafter(target.device)
        self._forms = Guard(self._form_drafter, target)
        self.max_batch, self.prompt_rows = max_batch, prompt_rows
        self.stats = EngineStats()  # counts; `EngineThread.stats` adds the other fields
        memory = target.capabilities.memory
        self._bounded = memory if memory is not None and memory.bounded else None
        self.prefixes = SharedPrefixes(memory if prefix_cache else None, self.drafter)
        self._lock = lock or Turns()
        self._requests: dict[int, Request] = {}  # waiting and running
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # requests in the order in which they joined
        self._learning = 0.0  # seconds that learning from the last step took

    # --- requests ------------------------------------------------------------------------------------------------

    def add(
        self, seq: Sequence, rule: Rule | None = None, draft_tokens: int | None = None, chosen: bool = True
    ) -> None:
        """Queue a request; it joins the batch as soon as there is room. None means the engine's own value. chosen:
        whether the request's draft lengths are chosen, if the engine chooses lengths.

        A drafter that remembers earlier requests, and chosen lengths that learn from them, depend on the random numbers
        of those requests. With the same seed, verification would decide on a draft with the numbers that it was made
        from, and the text would not have the target's distribution. So each such request gets a nonce for other random
        numbers. Under `coupled` the text does not depend on drafts.

        Raises TargetError if the whole KV cache is too small for the request, if only one of request and target has a
        source or encoder; RuleError if the request's rule cannot verify it."""
        check_fits(seq, self._bounded)
        check_source(seq, self.target)
        seq.rule = rule or self.rule
        check_params(seq.rule, seq.params)
        most = 0
        if self.drafter.traits.drafts:
            most = limit_depth(seq, self.draft_tokens if draft_tokens is None else draft_tokens)
        chosen = chosen and most > 0 and self.lengths is not None
        if chosen and self.lengths is not None:
            most = min(most, self.lengths.most)
        if (chosen or (most and self.drafter.traits.remembers)) and not seq.rule.coupled:
            seq.random.nonce = next(_nonces)
        kind = 0 if seq.params.argmax_only else 1 if seq.params.temperature_only else 2
        self._requests[seq.id] = Request(seq, most, chosen, kind)
        self._waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """Forget a request and free its memory, whether it waits, runs or is unknown."""
        if seq in self._waiting:
            self._waiting.remove(seq)
        if seq.id in self._requests:
            with self._lock:
                if seq in self._running:
                    self._running.remove(seq)
                self._leave(seq)

    @property
    def unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Number of running requests, including requests whose prompts are still being read."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # --- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[Sequence]:
        """Run one step of the batch, or several if nothing is drafted (see `core.plain`). Returns the requests that
        ran; requests with `finish` have left the batch."""
        with self._lock:
            self._admit()
            self._use_lengths()
            seqs, prompts = self._rows()
            aside = self.drafter.seconds
            forced = self._draft_forced(seqs)
            self.drafter.seconds = aside  # excludes lookups after forced tokens, whose lengths are not chosen
            began = perf_counter() - self._learning
            budgets = self._choose_budgets(seqs, prompts, forced)
            if self._bounded is not None:
                budgets = self._fit_budgets(self._bounded, seqs, prompts, budgets)
            timed = None if self.lengths is None else self._start_timer(seqs, prompts, budgets, forced)
            draft = None
            try:
                if timed is not None and not _prompt_rows(seqs, prompts) and not any(each.depth for each in budgets):
                    self._run_plainly(seqs)
                else:
                    draft = self._run(seqs, prompts, budgets, forced=forced)
            except Exception as fault:
                timed = None
                self._run_alone([*seqs, *prompts], budgets, fault)
            if timed is not None and self.lengths is not None:
                ended = perf_counter()
                spent = self.drafter.seconds - aside
                self.lengths.learn(timed.end(draft, draft=spent, rest=ended - began - spent, aside=aside))
                self.drafter.seconds, self._learning = 0.0, perf_counter() - ended
            elif any(one.draft_tokens and not one.chosen for one in map(self._request, [*seqs, *prompts])):
                self.drafter.seconds = 0.0  # drafts of fixed lengths teach nothing about chosen lengths
            for seq, budget in zip(seqs, budgets, strict=True):
                self._request(seq).followed = budget.depth > 0
            self.stats.steps += 1
            ran = [*seqs, *prompts]
            done = [seq for seq in ran if seq.finish]
            if done:
                self._running = [seq for seq in self._running if not seq.finish]
            for seq in done:
                self._leave(seq)
        return ran

    def decode(self, seqs: Seq[Sequence]) -> Generator[list[Sequence], None, None]:
        """Add requests and run them to their ends; yields the requests of each step. Raises the error of a failed
        request. Closing the iterator aborts the requests."""
        try:
            for seq in seqs:
                self.add(seq)
            while self.unfinished:
                ran = self.step()
                failed = next((seq.error for seq in ran if seq.error is not None), None)
                if failed is not None:
                    raise failed
                yield ran
        finally:
            for seq in seqs:
                self.abort(seq)

    def _run(
        self,
        seqs: Seq[Sequence],
        prompts: Seq[Sequence],
        budgets: Seq[Budget],
        drafts: bool = True,
        several: bool = True,
        forced: Mapping[int, NamedTokens] | None = None,
    ) -> Draft | None:
        """Run one step, or several plain steps in one call. Return the draft of the single step; None for several.
        drafts: whether the drafter sees its requests, which come first in `seqs`. With no such request, the target
        returns no hidden states. forced: see `_draft_forced`."""
        shown, reading = (sum(map(self._is_attached, seqs)), sum(map(self._is_attached, prompts))) if drafts else (0, 0)
        drafter: Drafter = self.drafter if shown + reading else NO_DRAFTER
        if forced:
            drafter = ForcedFirst(forced, drafter, shown, self.target.vocab_size)
        elif shown + reading:
            budgets = budgets[:shown]
        several = several and not prompts and not any(each.depth for each in budgets)
        if several and plain_steps(seqs, self.target, drafter, self.rule, budgets):
            return None
        first = [seq for seq in seqs if seq.unread > 1]
        draft, _ = step(seqs, self.target, drafter, self.rule, budgets, prompts, reading)
        for seq in first:
            self.prefixes.keep(seq)
        return draft

    def _run_plainly(self, seqs: Seq[Sequence]) -> None:
        """Run a plain step that is timed. If the drafter needs hidden states that a call of several steps does not
        return, the next step reads the same tokens again. Recurrent layers cannot do that, so they take a single
        step."""
        calls, runtime = self.target.capabilities.multi_step, self.target.capabilities.runtime
        loses = self.drafter.traits.taps and calls is not None and calls.steps_per_call > 1 and not calls.has_states
        rereads = loses and (runtime is None or runtime.rollback is None)
        again = [(seq, seq.kv_len) for seq in seqs if rereads and self._is_attached(seq)]
        self._run(seqs, [], [Budget(0)] * len(seqs), drafts=not again)
        for seq, known in again:
            seq.kv_len = known if seq.finish is None else seq.kv_len

    def _draft_forced(self, seqs: Seq[Sequence]) -> dict[int, NamedTokens]:
        """Draft the text that structured output forces in these requests, and lookups after it. Returns the drafts by
        sequence id; a request with no forced text has none."""
        formed = [seq for seq in seqs if seq.constraint is not None and len(seq.tokens) > seq.prompt]
        if not formed or not self.forced_tokens:
            return {}
        forced = dict[int, NamedTokens]()
        with StepClock(formed) as clock, clock("draft"):
            draft = self._forms.propose(formed, [self._forced_budget(seq) for seq in formed])
            for b, seq in enumerate(formed):
                chain = draft.ids[draft.splits[b] : draft.splits[b + 1]]
                if chain:
                    following = self._continue_forced(seq, chain)
                    forced[seq.id] = [*((token, FormDrafter.name) for token in chain), *following]
        return forced

    def _forced_budget(self, seq: Sequence) -> Budget:
        """Return the budget for forced tokens of a request. If its draft lengths are fixed, rows have no price (see
        `Budget`), so its seed repeats its text."""
        return replace(self._price(seq), depth=budget(seq, self.forced_tokens).depth)

    def _price(self, seq: Sequence) -> Budget:
        """Return the price of rows in this step; no price if the draft lengths of the request are not chosen."""
        if self.lengths is None or not self._request(seq).chosen:
            return Budget(0)
        return self.lengths.policy.costs.price

    def _continue_forced(self, seq: Sequence, chain: list[int]) -> NamedTokens:
        """Draft what lookups find after forced tokens, up to the first token that the structured output forbids."""
        request, reached = self._request(seq), self._form_drafter.chance(seq.id)
        room = budget(seq, max(self.forced_tokens, request.draft_tokens)).depth - len(chain)
        depth = min(request.draft_tokens, room) if self._is_attached(seq) and reached else 0
        if depth <= 0 or seq.constraint is None or seq.constraint.complete(seq.output, chain):
            return []
        price = self._price(seq)
        costs = price.row_costs[len(chain) :] or price.row_costs[-1:]
        found = self.drafter.continue_from(seq, chain, replace(price, depth=depth, row_costs=costs, reached=reached))
        allowed = prune([seq], Draft.chains([[*chain, *(token for token, _ in found)]])) if found else chain
        return found[: max(0, len(allowed) - len(chain))]

    def _start_timer(
        self, seqs: Seq[Sequence], prompts: Seq[Sequence], budgets: Seq[Budget], forced: Mapping[int, NamedTokens]
    ) -> TimedStep | None:
        """Make the timer of a step, from which draft lengths are learned. Returns None if a draft length in the step is
        fixed, or if no request may draft. Rows of forced tokens count as prompt rows, which run anyway."""
        # The first step of a sequence with a source also runs the encoder, so it is not timed.
        if any(source_of(seq) and seq.kv_len == 0 for seq in (*seqs, *prompts)):
            return None
        decoding = [b for b, seq in enumerate(seqs) if _decodes(seq) and seq.id not in forced]
        requests = [self._request(seqs[b]) for b in decoding]
        if not any(one.chosen for one in requests) or any(one.draft_tokens and not one.chosen for one in requests):
            return None
        drafts = [[seq for seq in each if self._request(seq).draft_tokens] for each in (seqs, prompts)]
        return TimedStep(
            [seqs[b] for b in decoding],
            [budgets[b].depth for b in decoding],
            catching_up=any(budgets[b].depth and not one.followed for b, one in zip(decoding, requests, strict=True)),
            prompt_rows=_prompt_rows(seqs, prompts) + _count_forced_rows(forced),
            forced=len(forced),
            read_rows=_prompt_rows(*drafts),
        )

    def _choose_budgets(
        self, seqs: Seq[Sequence], prompts: Seq[Sequence], forced: Mapping[int, NamedTokens]
    ) -> list[Budget]:
        """Choose the budget of each request that gains a token in this step."""
        requests = list(map(self._request, seqs))
        budgets = [budget(one.seq, 0 if one.detached else one.draft_tokens) for one in requests]
        for b, seq in enumerate(seqs):
            if seq.id in forced:
                budgets[b] = Budget(len(forced[seq.id]))
        if self.lengths is None:
            return budgets
        decoding = [b for b, seq in enumerate(seqs) if _decodes(seq) and seq.id not in forced]
        choosing = [b for b in decoding if requests[b].chosen or not requests[b].draft_tokens]
        if any(requests[b].chosen for b in choosing):
            ids, limits = [seqs[b].id for b in choosing], [budgets[b].depth for b in choosing]
            rows = _prompt_rows(seqs, prompts) + _count_forced_rows(forced)
            for b, chosen in zip(choosing, self.lengths.choose(ids, limits, rows, len(forced)), strict=True):
                budgets[b] = chosen
        return budgets

    def _run_alone(self, seqs: Seq[Sequence], budgets: Seq[Budget], fault: Exception) -> None:
        """After a fault, run each request without the others, with the draft length of the failed step, so that it
        takes no block of a fixed KV cache that another request needs. Drafts of the failed step are lost. The drafter
        releases its state of these requests, because their last draft tokens were not verified.

        budgets: budgets of the requests that gain a token, which come first in `seqs`."""
        for seq, each in zip(seqs, [*budgets, *[Budget(0)] * (len(seqs) - len(budgets))], strict=True):
            self.drafter.release(seq.id)
            prompts = [seq] if seq.chunk_end is not None else []
            try:
                if len(seqs) == 1:
                    raise fault
                rewind(self.target, [seq])
                gains = [] if prompts else [seq]
                self._run(gains, prompts, [each] * len(gains), several=False)
            except Exception as error_alone:
                seq.finish, seq.error = "error", error_alone
                self.stats.errors += 1

    def _request(self, seq: Sequence) -> Request:
        return self._requests[seq.id]

    # --- who runs, and what --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let requests join while the batch, the prompt rows of this step, and a KV cache of fixed size have room. If
        another request is reading a prompt that this one can reuse, this one waits, so that n answers to a prompt read
        the prompt once; later requests do not wait behind it."""
        if not self._waiting:
            return
        writes = [] if self._bounded is None else [slots(one, 1) for one in self._running]
        unread = [seq.unread for seq in self._running if seq.unread > 1]
        room = self._prompt_room(len(self._running) - len(unread)) - sum(unread)
        for seq in list(itertools.islice(self._waiting, self.max_batch)):
            if room <= 0 or len(self._running) >= self.max_batch:
                return
            request = self._request(seq)
            drafts = request.draft_tokens > 0
            reading = (
                one for one in self._running if one.unread > 1 and (self._request(one).draft_tokens > 0 or not drafts)
            )
            if self.prefixes.is_being_read(seq, drafts, reading):
                continue
            if self._bounded is not None:
                writes.append(slots(seq, 0))
                if self._running and self._bounded.count_missing(writes):
                    return
            self._waiting.remove(seq)
            self._running.append(seq)
            request.detached = False
            if request.chosen and self.lengths is not None:
                self.lengths.note_join()
                self._use_lengths()
            attached = self._is_attached(seq)  # a drafter without taps may draft after a pause
            self.prefixes.begin(seq, attached or (drafts and not request.detached), request.preempted)
            room -= seq.unread

    def _use_lengths(self) -> None:
        """Use the draft lengths that fit the requests that decode. If none does, all requests count."""
        if self.lengths is not None and self._running:
            some = [seq for seq in self._running if _decodes(seq)] or self._running
            context = sum(len(seq.tokens) for seq in some) // len(some)
            self.lengths.use(max(self._request(seq).kind for seq in some), context, len(self._running))

    def _rows(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return (requests that gain a token in this step, requests that read a chunk of their prompt). In each list,
        requests with drafts come first, and requests of one kind are neighbours. Other requests wait for rows."""
        seqs = [seq for seq in self._running if seq.unread == 1]
        prompts: list[Sequence] = []
        room = self._prompt_room(len(seqs)) if len(seqs) < len(self._running) else 0
        for seq in self._running:
            seq.chunk_end = None  # an interrupted step may have set it
            if room > 0 and seq.unread > 1:
                if seq.unread <= room:
                    seqs.append(seq)
                else:
                    seq.chunk_end = seq.kv_len + room
                    prompts.append(seq)
                room -= seq.unread
        return sorted(seqs, key=self._kind), sorted(prompts, key=self._kind)

    def _prompt_room(self, decoding: int) -> int:
        """Return the rows that prompts may take in a step in which `decoding` requests decode."""
        if not decoding:
            return MOST_ROWS
        return self.prompt_rows or min(PROMPT_ROWS, max(FEW_PROMPT_ROWS, ROWS_PER_TOKEN * decoding))

    def _kind(self, seq: Sequence) -> tuple[bool, bool, str, bool]:
        """Return a sort key. Requests with fixed lengths come first: they keep the drafter when others pause."""
        assert seq.rule is not None
        return not self._is_attached(seq), self._request(seq).chosen, seq.rule.name, seq.params.argmax_only

    def _is_attached(self, seq: Sequence) -> bool:
        """Return whether the drafter sees a request in this step. While drafting pauses, the drafter reads no hidden
        states: decoding is plain, and several steps may run in one call. Hidden states cannot be read later, so a
        drafter that needs them drafts only for requests that begin after the pause."""
        request = self._request(seq)
        if request.chosen and self.lengths is not None and self.lengths.resting:
            request.detached = request.detached or bool(self.drafter.traits.taps)
            return False
        return request.draft_tokens > 0 and not request.detached

    # --- memory --------------------------------------------------------------------------------------------------

    def _fit_budgets(
        self, memory: Memory, seqs: list[Sequence], prompts: list[Sequence], chosen: Seq[Budget]
    ) -> list[Budget]:
        """Return `chosen`, or smaller budgets, so that the step fits into the KV cache. If it does not fit without any
        draft, the youngest requests are preempted, and removed from the lists."""
        by_id = {seq.id: each for seq, each in zip(seqs, chosen, strict=True)}
        while True:
            depths = [by_id[seq.id].depth for seq in seqs]
            lengths = fit_lengths(memory, seqs, depths, prompts, self.drafter.most_nodes)
            if lengths is None and len(self._running) == 1:
                lengths = [0] * len(seqs)  # fits (see `add`), or else the target will raise
            if lengths is not None:
                return [replace(by_id[seq.id], depth=length) for seq, length in zip(seqs, lengths, strict=True)]
            self.preempt(seqs, prompts)

    def preempt(self, *lists: list[Sequence]) -> None:
        """Free the KV of the request that joined last, and remove the request from `lists`. It will wait before all
        others, and be read again."""
        seq = self._running[-1]
        for each in (*lists, self._running):
            if seq in each:
                each.remove(seq)
        self.prefixes.keep(seq)
        self.target.release(seq.id)
        self.drafter.release(seq.id)
        self._request(seq).preempted = True
        seq.kv_len, seq.chunk_end = 0, None
        self._waiting.appendleft(seq)
        self.stats.preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self.prefixes.keep(seq)
        self._requests.pop(seq.id)
        if self.lengths is not None:
            self.lengths.release(seq.id)
        self.target.release(seq.id)
        self.drafter.release(seq.id)
        self._forms.release(seq.id)


NO_DRAFTER = NoDrafter()


def _decodes(seq: Sequence) -> bool:
    """Return whether the whole prompt of this sequence was read before this step."""
    return seq.unread == 1 and seq.kv_len > 0


def _count_forced_rows(forced: Mapping[int, NamedTokens]) -> int:
    """Count the rows of a step that belong to requests with forced tokens."""
    return sum(1 + len(chain) for chain in forced.values())


def _prompt_rows(seqs: Seq[Sequence], prompts: Seq[Sequence]) -> int:
    """Count the prompt rows of a step: of prompts that end in this step, and of chunks."""
    return sum(seq.end - seq.kv_len for seq in (*seqs, *prompts) if not _decodes(seq))
