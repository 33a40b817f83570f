"""`LLM`: a target, a drafter and a rule, ready to generate.

>>> llm = LLM("embedded", draft="embedded")
>>> print(llm.generate("def fibonacci(n):")[0].text)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Number
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from slipstream.checkpoints.checkpoint import CheckpointName
from slipstream.checkpoints.generation_defaults import generation_defaults
from slipstream.checkpoints.load_settings import LoadKeywords, LoadSettings, show_settings
from slipstream.core.params import SamplingParams, check_draft_tokens, check_integer
from slipstream.core.rules import Rule, find_rule
from slipstream.core.sequence import Sequence, request_ids
from slipstream.core.stats import SpecStats, TokenLogprob
from slipstream.core.target import Target, start_sequence
from slipstream.core.text_ends import Decode, find_completed, text_after
from slipstream.core.warp import check_possible
from slipstream.drafters.draft_plan import STACK, DrafterFactory, DraftPlan, check_draft_settings
from slipstream.drafters.forced import MOST_FORCED
from slipstream.drafters.guard import Guard
from slipstream.drafters.hybrid import with_predictions
from slipstream.drafters.registry import DRAFTERS, limit_chosen
from slipstream.engine.beam_params import BeamParams
from slipstream.engine.beam_search import BeamSearch, Search
from slipstream.engine.beams import Beam
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.engine import MOST_ROWS, Engine
from slipstream.engine.engine_thread import Prepared
from slipstream.engine.messages import RequestSpec
from slipstream.engine.request_checks import Message, Prompt, RequestChecks, not_params, takes_params
from slipstream.errors import ParameterError, UnsupportedModelError
from slipstream.grammar.compiler import Grammars
from slipstream.host.turns import Turns
from slipstream.settings import AUTO
from slipstream.targets.describe import adopt, describe
from slipstream.targets.described import Described, check_memory
from slipstream.tokens.text import Piece, TextStream, decoder_of, stray_byte, tokenizer_of
from slipstream.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from slipstream.drafters.draft_plan import DraftArgument
    from slipstream.targets.describe import Model

log = logging.getLogger("slipstream")

MOST_CHOSEN = limit_chosen(STACK)
"""Longest draft of a request with a prediction, if draft lengths are chosen in each step."""


class LLMKeywords(LoadKeywords, total=False):
    """The keywords of `LLM` except target, draft and draft length, for type checkers."""

    rule: str
    max_batch: int
    tokenizer: Tokenizer | None
    draft_options: Mapping[str, object] | None
    progress: Callable[[int, int], None] | None


@dataclass(frozen=True)
class Completion:
    """The result of one request.

    text           output text, without special tokens, cut before the stop string that ended it.
    token_ids      output ids, the stop id or the token that completed a stop string included.
    finish_reason  "stop" (EOS, stop id, stop string) or "length" (max_tokens or end of context).
    stop_cause     the id or string that ended it, or None.
    drafted        for each output token, True if it is an accepted draft token.
    logprobs       log-probabilities of each output token under the target's own logits; None unless requested.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_cause: int | str | None
    drafted: list[bool]
    logprobs: list[TokenLogprob] | None
    stats: SpecStats
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class Chunk:
    """The text that one step of a stream added, often several tokens. The last chunk carries the completion."""

    pieces: list[Piece]
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class LLM:
    """Generates with a target and, if there is one, a drafter.

    target        a directory or hub id in Hugging Face layout, a GGUF file, "embedded", "smollm2", a loaded
                  transformers model, or any `Target`.
    draft         None; a name from the registry such as "ngram"; a path, "embedded" or a loaded model (a draft model);
                  the path of a draft head (Medusa, EAGLE, DFlash); any `Drafter`; a pair of one of these and its
                  options; or a list of these, stacked as a hybrid.
    draft_tokens  largest number of draft tokens per step (K, gamma). "auto": chosen in each step from measured times
                  and acceptance rates, down to 0 if drafts do not pay (see `engine.draft_lengths`). With "auto", a seed
                  repeats a sampled text only under the rule "coupled"; with a number, under every rule. A
                  `DraftLengths` is "auto" with the record of an earlier run. Text that structured output forces is
                  drafted even without a `draft`, at most this many tokens per step ("auto": 32); 0 turns this off, too.
    rule          how draft tokens are verified: "rejection", "block", "coupled" or "greedy".
    max_batch     largest number of sequences in one step.
    settings      fields of `LoadSettings`: executor, dtype, device, quantize, threads, kv_dtype, kv_tokens, ... With a
                  `Target`, which is loaded already, settings of how the target runs are refused. With `kv_tokens` a
                  request waits for memory instead of failing; refused if the KV cache cannot fit. draft_quantize and
                  draft_tokenizer are refused where no draft model is loaded; neither changes the output's distribution.
                  generation_config gives the defaults of requests; a `Target` has none.
    tokenizer     only needed if the target has none; without a tokenizer, prompts are token ids.
    draft_options options of the drafter, e.g. {"max_ngram": 4}.
    progress      called with (bytes read, bytes in all) while weights are loaded.

    Raises the errors of `slipstream.errors`.
    """

    @show_settings(before="tokenizer")
    def __init__(
        self,
        target: Model | Described | None = None,
        draft: DraftArgument = None,
        *,
        draft_tokens: int | str | DraftLengths = AUTO,
        rule: str = "rejection",
        max_batch: int = 8,
        tokenizer: Tokenizer | None = None,
        draft_options: Mapping[str, object] | None = None,
        progress: Callable[[int, int], None] | None = None,
        **settings: Unpack[LoadKeywords],
    ):
        self.settings = LoadSettings.of(settings, "LLM", tuple(inspect.signature(LLM).parameters))
        if target is None:
            raise ParameterError("no target was given", fix='write LLM("path/to/target")')
        load = self.settings
        check_integer("max_batch", max_batch, 1)
        if draft_options is not None and not isinstance(draft_options, Mapping):
            raise ParameterError(
                f"draft_options is {draft_options!r}, must map names to values", fix='write {"max_ngram": 4}'
            )
        self.max_batch = max_batch
        self._lock = Turns()  # steps of several Python threads take turns, and a fork waits for them
        if isinstance(target, CheckpointName):
            target = describe(target, load)
        described = target if isinstance(target, Described) else None
        plan = DraftPlan.of(draft, draft_options).ready(described, load.of_draft())
        check_draft_settings(load, [plan])
        # The size of a model with its own code is known only after loading.
        with suppress(UnsupportedModelError) if load.trust_remote_code else nullcontext():
            check_memory(described, load.kv_tokens, *plan.loads)
        self.target: Target = adopt(target, load, progress) if described is None else described.load(progress)
        opened = None if described is None else described.checkpoint
        self.tokenizer: Tokenizer | None = tokenizer
        if tokenizer is None and opened is not None:
            self.tokenizer = tokenizer_of(opened)
        encoder = self.target.capabilities.encoder
        self.defaults = generation_defaults(load.generation_config, target, opened, encoder is not None)
        self.checks = RequestChecks(self.tokenizer, self.target.vocab_size, self.target.context, encoder)
        self._decode: Decode | None = None if self.tokenizer is None else decoder_of(self.tokenizer)
        self._grammars = Grammars(self.tokenizer, self.target.vocab_size)
        self._factory = DrafterFactory(self.target, described, load, self.tokenizer, progress)
        self.rule = rule
        self._draft_tokens = check_draft_length(draft_tokens)
        self._use(plan)

    def __repr__(self) -> str:
        """One line: target, backend and dtype, drafter, rule. No weights."""
        shown: dict[str, object] = {"target": type(self.target).__name__}
        runtime = self.target.capabilities.runtime
        if runtime is not None:
            if runtime.checkpoint is not None:
                shown["target"] = str(runtime.checkpoint)
            shown |= {"backend": runtime.backend, "dtype": str(runtime.dtype).removeprefix("torch.")}
            if runtime.quantize is not None:
                shown["quantize"] = runtime.quantize
        shown |= {"drafter": self.drafter.name, "draft_tokens": self.draft_tokens, "rule": self.rule.name}
        return f"LLM({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: str | Rule) -> None:
        self._rule = rule if isinstance(rule, Rule) else find_rule(rule)

    @property
    def draft_tokens(self) -> int | str | DraftLengths:
        return self._draft_tokens

    @draft_tokens.setter
    def draft_tokens(self, count: int | str | DraftLengths) -> None:
        self._draft_tokens = check_draft_length(count)
        self.lengths = self._new_lengths()

    @property
    def most_draft_tokens(self) -> int:
        """Largest number of draft tokens per step: the given number, or the largest number that "auto" chooses."""
        if isinstance(self._draft_tokens, str):
            return self.drafter.traits.longest or limit_chosen(self.drafter.name)
        return self._draft_tokens if isinstance(self._draft_tokens, int) else self._draft_tokens.most

    @property
    def _forced_tokens(self) -> int:
        """Largest number of draft tokens of a step whose text structured output forces."""
        return self._draft_tokens if isinstance(self._draft_tokens, int) else MOST_FORCED

    def _new_lengths(self) -> int | DraftLengths:
        """Return the draft length, or a new record for "auto": rates of one drafter do not apply to another drafter."""
        if not self.drafter.traits.drafts:
            return 0
        if self._draft_tokens == AUTO:
            return DraftLengths(self.most_draft_tokens)
        longest = self.drafter.traits.longest
        if longest is not None and self.most_draft_tokens > longest:
            log.warning(
                f"draft_tokens is {self.most_draft_tokens}, but the drafter {self.drafter.name!r} drafts at most "
                f"{longest} tokens in a step: it drafts these"
            )
        return self._draft_tokens  # type: ignore[return-value]

    def use(self, draft: DraftArgument, **options: object) -> None:
        """Change the drafter between requests; `draft` as in the class."""
        plan = DraftPlan.of(draft, options).ready(self._factory.described, self.settings.of_draft())
        check_memory(None, None, *plan.loads)
        self._use(plan)

    def _use(self, plan: DraftPlan) -> None:
        self.drafter = self._factory.make(plan)
        self._guarded = Guard(self.drafter, self.target)
        self.lengths = self._new_lengths()

    @takes_params
    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete one prompt or several (text or token ids), `max_batch` at a time. Returns completions in the order
        of the prompts. params: one for all prompts, or a list with one for each prompt."""
        many = _as_list(prompts)
        if isinstance(params, Mapping):
            raise not_params(params)
        one = params is None or isinstance(params, SamplingParams)
        each: list[SamplingParams | None] = [params] * len(many) if one else list(params)  # type: ignore
        if len(each) != len(many):
            raise ParameterError(
                f"{len(each)} sampling parameters for {len(many)} prompts", fix="give one for all, or one for each"
            )
        seqs = [self.sequence(prompt, p) for prompt, p in zip(many, each, strict=True)]
        for _ in self.decode(seqs):
            pass
        return [self.completion(seq) for seq in seqs]

    def beam_search(self, prompts: Prompt | Seq[Prompt], params: BeamParams | None = None) -> list[list[Beam]]:
        """Return the most probable continuations of one prompt or several (text or token ids), by beam search: for each
        prompt the best `n`, best first. Each step is one forward pass over all beams of up to `max_batch` prompts.

        Beam search drafts nothing (see `engine.beams`). Raises ParameterError if the `LLM` has a drafter."""
        params = self.checks.beams(params or BeamParams())
        if self.drafter.traits.drafts and self.most_draft_tokens:
            raise ParameterError(
                f"beam search does not work with the drafter {self.drafter.name!r}",
                why="beams are not drafted: a step keeps the best of all continuations, not one accepted text",
                fix="write LLM(target) without a draft, or llm.use(None) before",
            )
        if self.defaults.rules:
            raise ParameterError(
                f"beam search does not work with {', '.join(self.defaults.rules)} of generation_config.json",
                why="beams are compared by their probabilities without such rules",
                fix='write LLM(..., generation_config="none")',
            )
        stop_ids = self._stop_ids(params.ignore_eos, params.stop_token_ids)
        more = {"params": SamplingParams(max_tokens=params.max_tokens), "context": self.target.context}
        searches = [
            Search(start_sequence(self.target, self.checks.prompt(prompt), **more), params, stop_ids)
            for prompt in _as_list(prompts)
        ]
        for _ in BeamSearch(self.target, self.max_batch, self._lock).run(searches):
            pass
        return [
            [replace(beam, text=self.text_of(beam.token_ids, search.prompt)) for beam in search.beams.best()]
            for search in searches
        ]

    @takes_params
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, step by step. Closing the iterator early releases everything."""
        return self.follow(self.sequence(prompt, params))

    def follow(self, seq: Sequence) -> Iterator[Chunk]:
        """Do the same as `stream` for a request made by `sequence`. `completion(seq)` works at any time, also after the
        iterator was closed early."""
        text, done = self.text_stream(seq.params, seq.tokens[: seq.prompt]), 0
        for _ in self.decode([seq]):
            pieces: list[Piece] = []
            if text is not None:
                pieces = text.add(seq.output[done:], seq.was_drafted(done), seq.finish is not None, seq.stop_cause)
            done = len(seq.proposers)
            yield Chunk(pieces, self.completion(seq) if seq.finish else None)

    @takes_params
    def chat(self, messages: str | Seq[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation (a list of {"role", "content"}, or one user message) by the tokenizer's template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: str | Seq[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the assistant's answer."""
        return self.checks.chat_ids(self.checks.chat_text(messages))

    def sequence(self, prompt: Prompt, params: SamplingParams | None = None) -> Sequence:
        """Check a request, and return its sequence, ready for `decode`."""
        params = self.defaults.fill(self.checks.params(params or SamplingParams()))
        ids = self.checks.prompt(prompt)
        stop_ids = self._stop_ids(params.ignore_eos, params.stop_token_ids)
        structured = params.structured
        seq = start_sequence(
            self.target,
            ids,
            params=params,
            stop_ids=stop_ids,
            context=self.target.context,
            decode=self._decode,
            constraint=None if structured is None else self._grammars.make_constraint(structured, stop_ids),
        )
        check_possible(seq, self.target.vocab_size)
        return seq

    def _stop_ids(self, ignore_eos: bool, more: Seq[int]) -> frozenset[int]:
        eos = () if ignore_eos else self.target.capabilities.eos_ids
        return frozenset(eos) | frozenset(more)

    def decode(self, seqs: Seq[Sequence]) -> Iterator[list[Sequence]]:
        """Run sequences to their ends, `max_batch` at a time; yields the batch after every step, or after several steps
        if nothing is drafted (see `core.plain`). Drafter, rule and draft length are fixed when the call
        begins; changing them takes effect with the next call."""
        engine = Engine(
            self.target,
            self._guarded,
            self._rule,
            self.lengths,
            self.max_batch,
            self._lock,
            MOST_ROWS,  # no client waits for single tokens: read prompts as fast as possible
            forced_tokens=self._forced_tokens,
        )
        yield from engine.decode(seqs)

    def engine(self) -> Engine:
        """Make a persistent engine for requests that come and go (see `AsyncLLM`). It has a prefix cache, also for
        predictions, and keeps the present drafter, rule, draft length and `max_batch`. `prepare` makes its requests."""
        lengths = DraftLengths(MOST_CHOSEN) if self._draft_tokens == AUTO else self._draft_tokens
        return Engine(
            self.target,
            with_predictions(self.drafter, self.target),
            self._rule,
            lengths,  # type: ignore[arg-type]
            self.max_batch,
            self._lock,
            prefix_cache=True,
            usual_draft_tokens=self.most_draft_tokens if self.drafter.traits.drafts else 0,
            forced_tokens=self._forced_tokens,
        )

    def prepare(self, spec: RequestSpec) -> Prepared:
        """Check a request, and make the `Prepared` that an `EngineThread` adds. Raises the error of a bad request.

        A request with a prediction is drafted by a suffix tree before the drafter, even in an LLM without a drafter
        (`drafters.hybrid.with_predictions`).

        The prediction may be an earlier output with the same seed. Verifying it with the random numbers that produced
        it would bias the text. So the prediction is part of the seed; with fixed draft lengths, a repeated request
        still repeats its text. Under the rule `coupled` the text does not depend on drafts.
        """
        seq = self.sequence(spec.ids, spec.params)
        rule = None if spec.rule is None else find_rule(spec.rule)
        if not spec.prediction:
            return Prepared(seq, rule)
        seq.prediction = spec.prediction
        if not (rule or self.rule).coupled:
            digest = blake2b(np.asarray(spec.prediction, np.int64).tobytes(), digest_size=8).digest()
            seq.random.nonce = int.from_bytes(digest, "little") | 1 << 63  # the nonces that an engine counts are small
        if self.drafter.traits.reads_predictions:
            return Prepared(seq, rule, self.most_draft_tokens)
        return Prepared(seq, rule, DRAFTERS[STACK].length if isinstance(self._draft_tokens, int) else MOST_CHOSEN)

    def text_of(self, output: Seq[int], before: Seq[int] = (), stop_cause: int | str | None = None) -> str:
        """Return the text that output ids add to the tokens `before`, cut before the stop string that ended it; empty
        without a tokenizer."""
        if self._decode is None:
            return ""
        text = text_after(self._decode, before, output)
        if isinstance(stop_cause, str):
            text = text[: find_completed(text, text_after(self._decode, before, output[:-1]), stop_cause)]
        return text

    def text_stream(self, params: SamplingParams, before: Seq[int]) -> TextStream | None:
        """Make the stream that turns the tokens of a request into pieces of text; None without a tokenizer. before:
        the tokens before the output."""
        if self._decode is None or self.tokenizer is None:
            return None
        return TextStream(self._decode, params.stop, stray_byte(self.tokenizer), before)

    def completion(self, seq: Sequence) -> Completion:
        if seq.finish == "length" and seq.params.structured and seq.params.structured.kind.startswith("json"):
            log.warning(f"the JSON of a text is cut after {len(seq.output)} tokens: a larger max_tokens completes it")
        return Completion(
            text=self.text_of(seq.output, seq.tokens[: seq.prompt], seq.stop_cause),
            token_ids=seq.output,
            finish_reason=seq.finish or "length",
            stop_cause=seq.stop_cause,
            drafted=seq.was_drafted(),
            logprobs=seq.logprobs if seq.params.logprobs is not None else None,
            stats=seq.stats,
            prompt_token_ids=request_ids(seq),
        )


def check_draft_length(value: int | str | DraftLengths) -> int | str | DraftLengths:
    """Check the argument `draft_tokens` of `LLM`, and return it. Raises ParameterError."""
    if isinstance(value, str) and value != AUTO:
        raise ParameterError(f"draft_tokens is {value!r}", fix=f'choose a number, or "{AUTO}"')
    if not isinstance(value, (str, DraftLengths)):
        check_draft_tokens(value)
    return value


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A single prompt may be text, or token ids in a list, array or tensor."""
    if isinstance(prompts, (np.ndarray, Tensor)):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    given = list(prompts)
    return [given] if given and isinstance(given[0], (Number, np.number)) else given  # type: ignore[list-item, return-value]
