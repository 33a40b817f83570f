"""`SlipstreamLM`: a model of lm-evaluation-harness. It generates speculatively; likelihoods are one forward a text.

    lm_eval --model slipstream --model_args target=T,draft=D --tasks hellaswag

Releases of the harness without plugins do not find it by name: `python -m slipstream.integrations.lm_eval` is their
command with this model added. From Python: `lm_eval.simple_evaluate(model=SlipstreamLM("T", draft="D"), ...)`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence as Seq
from dataclasses import fields
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from slipstream.core.params import SamplingParams, check_integer
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError, PromptError, did_you_mean
from slipstream.llm import LLM

log = logging.getLogger("slipstream")

BATCH = 8
"""Requests in one step if the harness leaves it to us ("auto")."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the most output tokens in a task, the first that is given counts: as in the harness."""

_UNREAD = {"num_beams": 1, "use_cache": True, "return_dict_in_generate": False}
"""Fields of a task's `generation_kwargs` that are not read, and the value with which they do nothing."""


@register_model("slipstream")
class SlipstreamLM(TemplateLM):
    """target, draft, options  as in `LLM`; in place of a target also an `LLM`, without options.

    batch_size      most requests in one step; "auto" (or None) is 8, or max_batch_size if that is less.
    device          as in `LLM`; one of CUDA counts as none where there is no CUDA, as in the harness's own models.
    max_length      most tokens of a text; None: the context of the target.
    max_gen_toks    most output tokens of a task that names none.
    add_bos_token   whether texts begin with the tokenizer's special tokens; None: as it does by default.
    prefix_token_id  what stands before a text without a context; None: BOS, else EOS.

    Raises the errors of `LLM`, and ParameterError for a target without a tokenizer.
    """

    def __init__(
        self,
        target: Any = "embedded",
        draft: Any = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ):
        super().__init__()
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness's command says "cuda:0" unless it is told otherwise
        if isinstance(target, LLM):
            if draft is not None or options or batch_size is not None or device is not None:
                raise ParameterError(
                    "options were given with an LLM", why="it would ignore them", fix="give them to LLM(...)"
                )
            self.llm = target
        else:
            most = _batch_size(batch_size, max_batch_size)
            self.llm = LLM(target, draft, max_batch=most, device=device, **options)
        self.tokenizer = self.llm.tokenizer
        if self.llm.target.capabilities.encoder is not None:
            raise ParameterError(
                "the harness was given an encoder-decoder",
                why="it cuts a text into context and continuation, whose tokens would be another source",
                fix="score pairs by LLM.log_likelihoods, or use the harness's own class 'hf'",
            )
        if self.tokenizer is None:
            raise ParameterError("the target brings no tokenizer", why="tasks are text", fix="give tokenizer=...")
        for name, value in (("max_length", max_length), ("max_gen_toks", max_gen_toks)):
            if value is not None:
                check_integer(name, value, 1)
        if max_length is not None and max_length > self.llm.target.context:
            raise ParameterError(
                f"max_length is {max_length}, the target's context holds {self.llm.target.context}",
                fix="leave it out, or lower it",
            )
        self.max_length = max_length or self.llm.target.context
        self.max_gen_toks, self.add_bos_token, self._prefix = max_gen_toks, add_bos_token, prefix_token_id
        self.stats = SpecStats()
        """Of all texts that were generated so far."""

    # --- what the harness asks of the tokenizer ------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text: the tokenizer's EOS, or one of the model's."""
        own = self.tokenizer.eos_token_id
        eos = sorted(self.llm.target.capabilities.eos_ids) if own is None else [own]
        if not eos:
            raise PromptError(
                "neither tokenizer nor model has an end of text", why="texts without a context follow it",
                fix="give prefix_token_id",
            )  # fmt: skip
        return int(eos[0])

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        if self._prefix is not None:
            return self._prefix
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Ids of a text. One that begins with BOS, as chat templates write it, gets no second one."""
        if not string:
            return []
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if bos and string.startswith(bos):
            wanted = False
        given = {} if wanted is None else {"add_special_tokens": wanted}
        return list(self.tokenizer.encode(string, **given))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text. Without a prompt for the assistant, its last message is continued."""
        how = {"add_generation_prompt": True} if add_generation_prompt else {"continue_final_message": True}
        text: str = self.tokenizer.apply_chat_template(list(chat_history), tokenize=False, **how)
        return text

    @property
    def tokenizer_name(self) -> str:
        """Names it in the harness's caches of requests."""
        runtime = self.llm.target.capabilities.runtime
        source = None if runtime is None else runtime.source
        return str(source or type(self.tokenizer).__name__).strip("/").replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For the results of the harness: what ran, and how much of it was drafted."""
        return {
            "slipstream": repr(self.llm),
            "lossless": self.llm.rule.lossless,
            "acceptance_rate": self.stats.acceptance_rate,
            "mean_acceptance_length": self.stats.mean_acceptance_length,
        }

    # --- requests ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Seq[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each request (context, generation_kwargs), before the first of the strings `until`."""
        seqs = [self._sequence(*request.args) for request in requests]
        of = {seq.id: request for seq, request in zip(seqs, requests, strict=True)}
        texts: dict[int, str] = {}
        with tqdm(total=len(seqs), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for ran in self.llm.decode(sorted(seqs, key=lambda seq: -seq.prompt)):
                for seq in ran:
                    if seq.finish is not None:
                        texts[seq.id] = self.llm.completion(seq).text
                        self.stats += seq.stats
                        self.cache_hook.add_partial("generate_until", of[seq.id].args, texts[seq.id])
                        bar.update(1)
        return [texts[seq.id] for seq in seqs]

    def _sequence(self, context: str, how: Mapping[str, Any]) -> Sequence:
        """A request; a context that leaves no room for its output loses its beginning."""
        params = _sampling_params(how, self.max_gen_toks)
        room = self.max_length - params.max_tokens
        if room < 1:
            raise ParameterError(
                f"a task asks for {params.max_tokens} tokens, max_length is {self.max_length}",
                why="nothing would be left for the context",
                fix="lower max_gen_toks",
            )
        return self.llm.sequence(_cut(self.tok_encode(context) or [self.prefix_token_id], room), params)

    def _loglikelihood_tokens(
        self, requests: Seq[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether greedy decoding gives it."""
        pairs: list[tuple[list[int], list[int]]] = []
        for _, context, continuation in requests:
            room = self.max_length + 1 - len(continuation)  # the last token is not run
            if room < 1:
                raise PromptError(
                    f"a continuation has {len(continuation)} tokens, max_length is {self.max_length}",
                    why="at least one token stands before it",
                    fix="raise max_length, or leave out the task",
                )
            pairs.append((_cut(context, room), continuation))
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        answers: dict[int, tuple[float, bool]] = {}
        at_once = 16 * self.llm.max_batch
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for first in range(0, len(order), at_once):
                some = order[first : first + at_once]
                for i, one in zip(some, self.llm.log_likelihoods([pairs[i] for i in some]), strict=True):
                    answers[i] = one.logprob, one.greedy
                    if requests[i][0] is not None:  # a window of a text has no key
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
                bar.update(len(some))
        return [answers[i] for i in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Seq[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in windows of `max_length` tokens that predict each token once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            own = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            before = len(windows)
            windows += [(None, *make_disjoint_window(pair)) for pair in own]
            counts.append(len(windows) - before)
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scored)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals


def _cut(context: list[int], room: int) -> list[int]:
    """The last `room` tokens of a context, with a warning if these are not all."""
    if len(context) > room:
        log.warning("a context of %d tokens is cut to its last %d", len(context), room)
    return context[-room:]


def _batch_size(given: int | str | None, most: int | None) -> int:
    """What the harness says, as a number. Raises ParameterError."""
    if given is None or str(given).startswith("auto"):
        return BATCH if most is None else min(BATCH, int(most))
    try:
        return int(given)
    except ValueError as fault:
        raise ParameterError(f"batch_size is {given!r}", fix='give a number, or "auto"') from fault


def _sampling_params(how: Mapping[str, Any], longest: int) -> SamplingParams:
    """The `generation_kwargs` of a task, in the harness's meaning. Raises ParameterError for what is not honoured."""
    given = dict(how)
    until = given.pop("until", None) or []
    lengths = [given.pop(name, None) for name in _LENGTHS]
    sample, temperature = given.pop("do_sample", None), given.pop("temperature", None)
    if sample is None:
        sample = bool(temperature)
    for name, nothing in _UNREAD.items():
        if given.get(name) in (nothing, None):
            given.pop(name, None)
    known = {f.name for f in fields(SamplingParams)}
    for name in given:
        if name not in known:
            raise ParameterError(
                f"a task sets {name}={given[name]!r} in its generation_kwargs",
                why="it would be ignored",
                fix=did_you_mean(name, {*known, "until", *_LENGTHS}),
            )
    values = {
        "max_tokens": int(next((length for length in lengths if length is not None), longest)),
        "temperature": (1.0 if temperature is None else float(temperature)) if sample else 0.0,
        "stop": tuple(text for text in ([until] if isinstance(until, str) else until) if text),
    }
    if sample:
        values["seed"] = int(torch.randint(2**62, ()).item())  # so that the harness's torch_random_seed decides
    return SamplingParams(**values | given)  # type: ignore[arg-type]


def main() -> None:
    """The command of the harness, with the model "slipstream"."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
