"""`--engine vllm`: starts vLLM's server for a command. Also code that all commands for servers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.cli import render
from slipstream.cli.measuring import LabModels, parse_drafter
from slipstream.cli.option_groups import option
from slipstream.cli.options import ModelOptions, parse_options
from slipstream.core.declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.core.strict import JsonMapping, JsonObject, parse_json
from slipstream.drafters.draft_plan import MTP, WITHOUT_DRAFT
from slipstream.drafters.registry import DRAFTERS, limit_chosen
from slipstream.errors import ParameterError
from slipstream.measure.configs import DrafterChoice
from slipstream.measure.vllm_server import LOADING, VllmServer, find_interpreter
from slipstream.settings import AUTO, one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SLIPSTREAM, VLLM = "slipstream", "vllm"
READ = ("target", "draft", "dtype", "threads", "trust_remote_code", "generation_config", "drafter", "draft_tokens",
        "drafter_option", "rule", "config")  # fmt: skip
"""Options of models that are passed on to vLLM's server."""
METHODS = {"rejection": "standard", "block": "block"}
"""Verification rule -> vLLM's `rejection_sample_method`."""


@dataclass(frozen=True)
class EngineOptions:
    PANEL: ClassVar[str] = "Engine"
    engine: str = option(SLIPSTREAM, "slipstream, or vllm: this command starts and ends vLLM's server.")
    vllm_python: Path | None = option(
        None, "Python interpreter of the environment with vLLM.", shown="that of `make vllm`, or the current one"
    )
    vllm_option: list[str] | None = option(
        None,
        "Argument of `vllm serve`, as in tensor_parallel_size=2 or speculative_config='{...}'; repeatable.",
        metavar="NAME=VALUE",
    )

    def __post_init__(self) -> None:
        one_of("engine", self.engine, (SLIPSTREAM, VLLM))
        if not self.vllm and (self.vllm_python or self.vllm_option):
            raise ParameterError("an option of vLLM was given without --engine vllm", fix="add --engine vllm")
        self.arguments  # noqa: B018 raises for values that are no JSON

    @property
    def vllm(self) -> bool:
        return self.engine == VLLM

    @property
    def arguments(self) -> JsonObject:
        """Arguments of `vllm serve` by name. Raises ParameterError."""
        options = parse_options(self.vllm_option or ())
        for name, value in options.items():
            if isinstance(value, str) and value[:1] in ("{", "["):
                try:
                    options[name] = parse_json(value)
                except ValueError as fault:
                    raise ParameterError(f"the value of --vllm-option {name} is {value!r}, which is not JSON: {fault}",
                                         fix='write JSON, as in \'{"method": "mtp"}\'') from fault  # fmt: skip
        return options


def make_vllm_server(
    models: ModelOptions, engine: EngineOptions, more: JsonMapping | None = None, plain: bool = False
) -> VllmServer:
    """Translate options of models to settings of vLLM. more: further arguments, which those of the user override;
    plain: True for a server without speculation. Raises ParameterError for options that vLLM's server would ignore."""
    refuse_ignored(models, ModelOptions, READ)
    if not models.drafter and models.draft_model is None and len(models.names) > 1:
        # vLLM runs one drafter: the MTP layers, else a lookup (it cannot read the head that ships).
        models = replace(models, drafter=MTP if MTP in models.names else WITHOUT_DRAFT)
    if models.rule not in METHODS:
        raise ParameterError(f"vLLM has no rule {models.rule!r}", fix=f"give --rule {' or '.join(METHODS)}")
    given = engine.arguments
    if plain:
        given.pop("speculative_config", None)
        models = replace(models, drafter="none", draft=None, drafter_option=None, draft_tokens=None)
    method = given.get("speculative_config", {}).get("method") or given.get("speculative_config", {}).get("model")
    name = "none" if method else models.method
    draft = models.draft_model if name != "none" else None
    choice = DrafterChoice(
        name,
        _length(models),
        str(Checkpoint.open(models.target)),
        None if draft is None else str(Checkpoint.open(draft, "draft")),
        dict(parse_options(models.drafter_option or ())),
    )
    defaults: JsonObject = {"served_model_name": models.target, "dtype": models.dtype, **(more or {})}
    if models.trust_remote_code:
        defaults["trust_remote_code"] = True
    if models.generation_config != AUTO:
        defaults["generation_config"] = "vllm"
    if choice.drafter != "none" and models.rule != "rejection":
        defaults["speculative_config"] = {"rejection_sample_method": METHODS[models.rule]}
    return VllmServer(choice, defaults | given, models.threads)


def refuse_ignored(group: object, kind: type[DataclassInstance], read: Seq[str]) -> None:
    """Raise ParameterError if an option of the group differs from the default of `kind`, but is not in `read`."""
    ignored = [f.name for f in fields(kind) if f.name not in read and getattr(group, f.name) != f.default]
    if ignored:
        fix = "give an argument of vLLM instead: --vllm-option NAME=VALUE"
        raise ParameterError(f"{', '.join(ignored)} was given with --engine vllm, but vLLM would ignore it", fix=fix)


def _length(models: ModelOptions) -> int:
    """Return the draft length to set in vLLM: a fixed length, or the longest if lengths are chosen in each step."""
    lookups = [DRAFTERS[name].lookup for name in models.names]
    return limit_chosen(models.method) if models.length == AUTO and all(lookups) else models.fixed_length


def list_servers(models: LabModels, engine: EngineOptions) -> dict[str, VllmServer]:
    """Return name -> server, for plain decoding and for each drafter to measure."""
    servers = {"plain": make_vllm_server(models.one("none"), engine, plain=True)}
    for spec in models.specs():
        one, options = parse_drafter(models, spec)
        pairs = [f"{name}={value}" for name, value in options.items()]
        servers[spec] = make_vllm_server(replace(one, drafter_option=pairs), engine)
    return servers


def is_about_servers(
    url: object,
    flag: str,
    models: DataclassInstance,
    engine: EngineOptions,
    load: DataclassInstance | None = None,
    local: Mapping[str, bool] | None = None,
) -> bool:
    """Return True if a command targets running servers (`flag` gives a URL) or starts vLLM. Raises ParameterError for
    options that would be ignored. models, load: groups of options, for models and for servers; local: option without
    meaning for servers -> True if it was given."""
    if url and engine.vllm:
        raise ParameterError(f"{flag} and --engine vllm were given together", fix="give one of them")
    if not url and not engine.vllm:
        if load is not None and (given := list_changed(load)):
            raise ParameterError(f"{given} was given, but it has an effect only for servers", fix=f"add {flag} URL")
        return False
    if url and (given := list_changed(models)):
        raise ParameterError(f"{given} would be ignored: a running server has its own settings", fix="leave it out")
    if unused := ", ".join(name for name, is_given in (local or {}).items() if is_given):
        raise ParameterError(f"{unused} would be ignored: it has no meaning for servers", fix="leave it out")
    return True


def list_changed(options: DataclassInstance) -> str:
    return ", ".join(each.name for each in fields(options) if getattr(options, each.name) != each.default)


def request_fields(params: SamplingParams) -> JsonObject:
    """Return request fields for sampling parameters that are not at their defaults, except those always set."""
    every = ("max_tokens", "temperature", "seed", "logprobs", "draft_tokens")
    values = {name: (getattr(params, name), known.default) for name, known in declared(type(params)).items()}
    return {name: value for name, (value, default) in values.items() if name not in every and value != default}


@contextmanager
def start_servers(servers: Mapping[str, VllmServer], engine: EngineOptions) -> Iterator[dict[str, str]]:
    """Run servers until the `with` block ends; yields name -> URL. The servers load at the same time. Raises
    ServedError, with the server's output, if a server does not start."""
    python = find_interpreter(engine.vllm_python)
    with ExitStack() as stack:
        running = {name: stack.enter_context(server.process(python, f"vLLM ({name})"))
                   for name, server in servers.items()}  # fmt: skip
        with render.status("starting vLLM"):
            places = {name: process.ready(LOADING) for name, process in running.items()}
        yield places
