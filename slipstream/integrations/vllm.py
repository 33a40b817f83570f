"""Slipstream's lookup drafters inside vLLM, by its `custom_class` method: see docs/vllm.md for settings and requests.

Slipstream is needed only in vLLM's environment. vLLM passes a proposer no request ids and no prompt lengths, so its
runner's `propose_draft_token_ids` is wrapped to see them. A fault in a drafter costs the drafts of a step, never a
request: the fault is logged once, and after several faults decoding is plain.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence as Seq
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.drafters.registry import DRAFTERS, make_drafter
from slipstream.engine.request_checks import read_prediction
from slipstream.errors import ParameterError, PromptError, did_you_mean
from slipstream.integrations.row_drafts import Row, RowDrafts, RowRequest
from slipstream.settings import one_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

VERSIONS = "0.29 to 0.33"
"""Versions of vLLM with the same interface for proposers."""
LENGTHS = ("learned", "full")
MOST_FAULTS = 8
"""Number of steps with a fault after which drafting stops, because after each fault all texts are read again."""
PREDICTION = "prediction"

Member = tuple[str, Mapping[str, object]]
"""Name of a lookup, and its options."""


def make_lookup(
    vocab_size: int, drafter: str | Seq[str | Member] = "suffix", options: Mapping[str, object] | None = None
) -> Drafter:
    """Make the lookup, or stack of lookups, of these settings. Raises ParameterError for other drafters."""
    members = drafter.split(",") if isinstance(drafter, str) else list(drafter)
    pairs = [(m, {}) if isinstance(m, str) else (m[0], dict(m[1])) for m in members]
    lookups = [name for name, spec in DRAFTERS.items() if spec.lookup]
    for name, _ in pairs:
        if name not in lookups:
            raise ParameterError(
                f"drafter {name!r} does not run inside vLLM",
                why="vLLM gives custom drafters only tokens, no hidden states or logits",
                fix=f"give {', '.join(lookups)}; for draft models and heads, use vLLM's own methods"
                if name in DRAFTERS else did_you_mean(name, lookups),
            )  # fmt: skip
    target = cast("Target", SimpleNamespace(device="cpu", vocab_size=vocab_size))
    if len(pairs) == 1:
        name, drafter_options = pairs[0]
        return make_drafter(name, target, **drafter_options, **(options or {}))
    stack = [make_drafter(name, target, **drafter_options) for name, drafter_options in pairs]
    return make_drafter("hybrid", target, members=stack, **(options or {}))


class Proposer:
    """The object that vLLM creates to draft: see the module. Raises ParameterError for unknown settings."""

    def __init__(self, vllm_config: VllmConfig):
        from vllm import __version__
        from vllm.logger import init_logger

        self._log = init_logger("vllm.slipstream")
        self._model, parallel = vllm_config.model_config, vllm_config.parallel_config
        additional = vllm_config.additional_config
        on_cpu = vllm_config.device_config.device_type == "cpu"
        if on_cpu and self._model.is_hybrid and tuple(map(int, __version__.split(".")[:2])) < (0, 33):
            raise ParameterError(f"vLLM {__version__} cannot verify lookup drafts for a hybrid model on a CPU",
                                 why="a draft that is shorter than num_speculative_tokens would stop its engine",
                                 fix="use vLLM 0.33 or newer, or plain decoding")  # fmt: skip
        settings = dict(additional.get("slipstream", {})) if isinstance(additional, dict) else {}
        unknown = settings.keys() - {"drafter", "options", "lengths"}
        if unknown:
            raise ParameterError(f"additional_config['slipstream'] has the unknown key {', '.join(sorted(unknown))}",
                                 fix="use only drafter, options and lengths")  # fmt: skip
        lengths = settings.pop("lengths", "learned")
        one_of("lengths", lengths, LENGTHS)
        most = vllm_config.speculative_config.num_speculative_tokens
        timed = lengths == "learned" and parallel.world_size == 1
        self._vocab = self._model.get_vocab_size()
        self._settings, self._most, self._timed = settings, most, timed
        self._drafts = self._new_drafts()
        self._runner: GPUModelRunner = None
        self._scheduled: SchedulerOutput = None
        self._faults: set[str] = set()
        self._failed = 0
        _watch_runners()
        self._log.info("Slipstream drafts: %s, at most %d tokens, %s lengths", self._drafts.drafter.name, most,
                       "learned" if timed else "full")  # fmt: skip

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Does nothing: vLLM calls it, but a lookup has no weights."""

    def see(self, runner: GPUModelRunner, scheduled: SchedulerOutput) -> None:
        """Note the runner of this step and its `SchedulerOutput`."""
        self._runner, self._scheduled = runner, scheduled

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return draft tokens for each row of the batch, none for a prompt that is still being read. token_ids_cpu
        [rows, context]: row i holds `num_tokens_no_spec[i]` tokens."""
        if self._failed >= MOST_FAULTS:
            return [[] for _ in sampled_token_ids]
        try:
            batch, scheduled = self._runner.input_batch, self._scheduled
            verified = scheduled.scheduled_spec_decode_tokens
            rows = []
            for i, sampled in enumerate(sampled_token_ids):
                key = batch.req_ids[i]
                rows.append(
                    Row(
                        key,
                        int(num_tokens_no_spec[i]),
                        functools.partial(_read_tokens, token_ids_cpu[i]),
                        len(sampled),
                        len(verified.get(key, ())),
                        scheduled.num_scheduled_tokens[key],
                        functools.partial(self._read_request, key, int(batch.num_prompt_tokens[i])),
                    )
                )
            return self._drafts.propose(rows, self._runner.requests)
        except Exception as fault:
            self._report(fault)
            self._failed += 1
            self._drafts = self._new_drafts()
            return [[] for _ in sampled_token_ids]

    def _new_drafts(self) -> RowDrafts:
        drafter = make_lookup(self._vocab, **self._settings)
        return RowDrafts(drafter, self._most, self._model.max_model_len, self._timed)

    def _read_request(self, key: str, prompt: int) -> RowRequest:
        """Read a request from vLLM's own state."""
        params = self._runner.requests[key].sampling_params
        most = self._model.max_model_len if params.max_tokens is None else prompt + params.max_tokens
        return RowRequest(prompt, most, self._read_prediction((params.extra_args or {}).get(PREDICTION)))

    def _read_prediction(self, given: Any) -> Seq[int]:
        """Return the token ids of a prediction, which is a text or a list of ids; another value is logged."""
        if given is None:
            return ()
        try:
            if isinstance(given, str):
                from vllm.tokenizers import cached_tokenizer_from_config

                return list(cached_tokenizer_from_config(self._model).encode(given, add_special_tokens=False))
            if all(isinstance(token, int) and 0 <= token < self._vocab for token in given):
                return list(given)
            raise ParameterError("prediction is neither a text nor a list of token ids", fix="give one of them")
        except Exception as fault:
            self._report(fault)
            return ()

    def _report(self, fault: Exception) -> None:
        """Log a fault if it is the first of its kind."""
        kind = f"{type(fault).__name__}: {fault}"
        if kind not in self._faults and len(self._faults) < 8:
            self._faults.add(kind)
            self._log.error("a fault in a Slipstream drafter; decoding continues without this draft", exc_info=fault)


def _read_tokens(row: np.ndarray, begin: int, end: int) -> list[int]:
    tokens: list[int] = row[begin:end].tolist()
    return tokens


def _watch_runners() -> None:
    """Make vLLM's runners show each step to their proposer before it drafts. Raises ParameterError if this version of
    vLLM has no such runner."""
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        plain = GPUModelRunner.propose_draft_token_ids
    except (ImportError, AttributeError) as fault:
        from vllm import __version__

        raise ParameterError(
            f"Slipstream does not support vLLM {__version__}: it lacks GPUModelRunner.propose_draft_token_ids",
            fix=f"use vLLM {VERSIONS}",
        ) from fault
    if hasattr(plain, "__wrapped__"):
        return
    _mend_sampling_on_cpus()

    @functools.wraps(plain)
    def propose_draft_token_ids(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: object, **kwargs: object
    ) -> object:
        if isinstance(self.drafter, Proposer):
            self.drafter.see(self, scheduler_output)
        return plain(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def _mend_sampling_on_cpus() -> None:
    """Replace two functions that fail in vLLM's CPU build, even with vLLM's own n-grams. First, if top_k is given, a
    step in which no row has drafts ends the engine: the maximum of no numbers is an error. Second, the temperature,
    top_k and top_p of a request never reach its rows: in 0.32 and 0.33 `_expand_kernel_impl` writes into the copy that
    `_ensure_int64` makes of any tensor that is not int64, and the rows keep old memory (issue 55005 of vLLM)."""
    from vllm.v1.sample import rejection_sampler

    filtered, spread = rejection_sampler.apply_top_k_top_p, rejection_sampler.expand_batch_to_tokens

    @functools.wraps(filtered)
    def apply_top_k_top_p(logits: Tensor, *args: object) -> Tensor:
        return filtered(logits, *args) if logits.numel() else logits

    @functools.wraps(spread)
    def expand_batch_to_tokens(
        x: Tensor, ends: Tensor, count: int, replace_from: float = 0, replace_to: float = 0
    ) -> Tensor:
        if x.device.type != "cpu":
            return spread(x, ends, count, replace_from, replace_to)
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))

    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def register() -> None:
    """Entry point `vllm.general_plugins`: lets vLLM's server read `prediction` in completions and chats."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    except ImportError:  # another version: users give predictions by vllm_xargs
        return
    for kind in (ChatCompletionRequest, CompletionRequest):
        _read_predictions(kind)


def _read_predictions(kind: Any) -> None:
    """Make requests of this kind pass their field `prediction` on among vLLM's extra arguments."""
    plain = kind.to_sampling_params
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def to_sampling_params(self: Any, *args: object, **kwargs: object) -> object:
        try:
            text = read_prediction((self.model_extra or {}).get(PREDICTION))
        except PromptError as fault:
            raise ValueError(str(fault)) from fault  # vLLM answers with status 400
        if text:
            self.vllm_xargs = {PREDICTION: text, **(self.vllm_xargs or {})}
        return plain(self, *args, **kwargs)

    kind.to_sampling_params = to_sampling_params
