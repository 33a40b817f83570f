"""`slipstream sweep`: measures a grid of settings in one interleaved run, and plots measurement and prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.contenders import LabModels, contender, values_of
from slipstream.cli.early import check_contenders
from slipstream.cli.loading import load, on
from slipstream.cli.measuring import Count, OutputOptions, PromptOptions, Source, finish, unfinished
from slipstream.cli.options import grouped, literal
from slipstream.errors import ParameterError
from slipstream.settings import DTYPES, one_of

if TYPE_CHECKING:
    from slipstream.bench.parameter_sweep import Setting

SWEPT = "Swept"


@dataclass(frozen=True)
class SweepModels(LabModels):
    """`LabModels` with several draft lengths and dtypes."""

    draft_tokens: Annotated[
        str | None,
        typer.Option(
            "--draft-tokens",
            "-k",
            help="Draft lengths, as in 2:8 or 2,5,10.",
            rich_help_panel=SWEPT,
            show_default="2:8",
        ),
    ] = None  # type: ignore[assignment]
    dtype: Annotated[
        str | None, typer.Option(help="Dtype, one or several, as in float32,bfloat16.", rich_help_panel=SWEPT)
    ] = None

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name is not None:
                one_of("dtype", name, DTYPES)
        for spec in self.specs():
            contender(self, spec, self.drafter_option or (), draft_tokens=None, dtype=None)

    @property
    def dtypes(self) -> tuple[str | None, ...]:
        return (None,) if self.dtype is None else values_of("--dtype", self.dtype, str)


@dataclass(frozen=True)
class SweepPrompts(PromptOptions):
    """Fewer, because there are many settings."""

    prompts: Source = "code"
    count: Count = 4


@grouped
def sweep(
    models: SweepModels,
    texts: SweepPrompts,
    *,
    temperature: Annotated[
        str, typer.Option(help="Sampling temperatures, as in 0,0.5,1.", rich_help_panel=SWEPT)
    ] = "0",
    batch: Annotated[str, typer.Option(help="Batch sizes, as in 1,2,4.", rich_help_panel=SWEPT)] = "1",
    tree_nodes: Annotated[
        str | None, typer.Option(help="Tree sizes in nodes, for drafters with this option.", rich_help_panel=SWEPT)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Values of a drafter option, as in max_ngram=2:5; repeatable.",
            rich_help_panel=SWEPT,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens generated for each prompt.")
    ] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 4,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit in seconds; at least three passes.")] = 45,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    files: OutputOptions,
) -> None:
    """Measure acceptance and speed over draft lengths, temperatures, drafters, options, dtypes or batch sizes.

    Passes are interleaved: each pass runs every setting once, and plain decoding for each temperature, batch size and
    dtype.
    """
    files.check()
    texts.check()
    axes, settings = plan(models, temperature, batch, tree_nodes, option or ())
    from slipstream.bench.benchmark import BenchConfig

    config = BenchConfig(
        tokens=tokens, rounds=rounds, seconds=seconds, seed=seed,
        temperatures=tuple(axes["temperature"]), batches=tuple(axes["batch"]),
    )  # fmt: skip
    from slipstream.bench import parameter_sweep

    check_contenders(models, [setting.contender for setting in settings])
    engines = {
        dtype: load(
            models.one("none", dtype=dtype, draft_tokens=None),
            quiet=files.as_json,
            asked=map(config.params, config.temperatures),
        )
        for dtype in models.dtypes
    }
    llm = next(iter(engines.values()))
    chosen = texts.load(llm, tokens)
    render.line(
        f"sweep: {render.counted(len(settings), 'setting')}, {chosen.size} of "
        f"{chosen.source}, target={models.target}, "
        f"{on(llm.target)}"
    )
    with render.progress("measuring (interleaved)", parameter_sweep.steps(settings, llm, chosen, config)) as advance:
        result, code = unfinished(
            lambda: parameter_sweep.sweep(engines, settings, axes, chosen, config, files.out, advance)
        )
    finish(result, files)
    raise typer.Exit(code or (1 if any(point["texts"] == "BUG" for point in result.data["arms"]) else 0))


def plan(
    models: SweepModels, temperature: str, batch: str, tree_nodes: str | None, option: Any
) -> tuple[dict[str, Any], list[Setting]]:
    """The axes and all settings of the grid. Raises ParameterError."""
    specs = models.specs()
    if models.drafter is None and models.drafters is None:
        specs = specs[:1]
    if not specs:
        raise ParameterError("there is no drafter to sweep over", fix="name one: --drafter ngram")
    extra = {"tree_nodes": values_of("--tree-nodes", tree_nodes, int)} if tree_nodes else {}
    for each in option:
        name, equals, values = each.partition("=")
        if not equals:
            raise ParameterError(f"--option {each!r} is not NAME=VALUES", fix="write it as in max_ngram=2:5")
        extra[name.strip().replace("-", "_")] = values_of(f"--option {name}", values, literal)
    temperatures, batches = values_of("--temperature", temperature, float), values_of("--batch", batch, int)
    others = max(map(len, (specs, temperatures, batches, models.dtypes, *extra.values())))
    lengths: tuple[int | None, ...] = (None,) if others > 1 else tuple(range(2, 9))
    if models.draft_tokens is not None:
        lengths = values_of("--draft-tokens", models.draft_tokens, int)
    axes: dict[str, Any] = {"draft_tokens": lengths, "drafter": specs, "temperature": temperatures, "batch": batches}
    axes |= {"dtype": models.dtypes, **extra}
    from slipstream.bench.parameter_sweep import Setting, grid

    settings = []
    for values in grid(axes):
        k = {} if values["draft_tokens"] is None else {"draft_tokens": values["draft_tokens"]}
        made = contender(
            models,
            values["drafter"],
            models.drafter_option or (),
            **{"draft_tokens": None} | k,
            dtype=values["dtype"],
        )
        named = {name: values[name] for name in extra}
        made = replace(
            made,
            label=" ".join([made.label, *(f"{n}={v}" for n, v in named.items())]),
            options=made.options | named,
        )
        shown = {name: value for name, value in values.items() if len(axes[name]) > 1}
        settings.append(Setting(made, values["temperature"], values["batch"], values["dtype"], shown))
    return axes, settings
