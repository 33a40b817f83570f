"""`slipstream trace`: records one generation token by token."""

import typer

from slipstream.cli import render
from slipstream.cli.loading import check_drafters, load, name_backend
from slipstream.cli.measuring import LabModels, OutputOptions, finish, keep_unfinished, show_section
from slipstream.cli.option_groups import argument, expand_groups, option
from slipstream.cli.options import SamplingOptions
from slipstream.errors import ParameterError
from slipstream.measure import prompts as texts
from slipstream.measure.results import Result


@expand_groups
def trace(
    models: LabModels,
    sampling: SamplingOptions,
    *,
    prompt: str | None = argument("The prompt. Default: the first built-in prompt.", default=None, shown=False),
    chat: bool = option(False, "Treat the prompt as a chat message."),
    files: OutputOptions,
) -> None:
    """Record one generation, token by token.

    The record says who proposed each token, whether it was accepted, its probabilities, and the acceptance rate over
    time. `report` draws the file that --out writes.
    """
    params, contenders = sampling.params(), models.contenders()
    if len(contenders) != 1 and models.drafter:
        raise ParameterError(
            f"{len(contenders)} drafters were given, only one can be traced",
            fix="give one; A+B stacks two",
        )
    files.check()
    traced = contenders[0]
    check_drafters(models, [(traced.drafter, traced.options)])
    from slipstream.measure import tracing

    llm = load(models.one("none"), quiet=files.as_json, asked=[params])
    if prompt is None:
        entry = texts.read_entries("code")[0]
        ids, name = texts.encode(llm, entry, "auto")[-max(1, llm.target.context // 2) :], entry.name
    else:
        ids, name = texts.encode(llm, texts.Entry(prompt, "", ""), "chat" if chat else "raw"), "prompt"
    render.line(f"trace: {traced.label}, K={traced.draft_tokens}, target={models.target}, {name_backend(llm.target)}")
    with render.status("generating"):
        result, code = keep_unfinished(lambda: tracing.trace(llm, traced, ids, params, files.out, name))
    finish(result, files, show)
    raise typer.Exit(code)


def show(result: Result) -> None:
    """Print the text in colours, and the tables."""
    writer = render.TextWriter()
    for piece, token in zip(result.data.pieces, result.data.tokens, strict=False):
        writer.write(piece, token.drafted)
    writer.end()
    print()
    show_section(result)
