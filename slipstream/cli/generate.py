"""`slipstream generate`: complete one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from slipstream.cli import render
from slipstream.cli.loading import banner, load
from slipstream.cli.option_groups import argument, expand_groups, option
from slipstream.cli.options import ModelOptions, SamplingOptions
from slipstream.cli.table_forms import print_logprobs
from slipstream.core.params import SamplingParams
from slipstream.core.strict import JsonObject, check_text
from slipstream.core.structured import Structured
from slipstream.errors import ParameterError, PromptError
from slipstream.host.interrupt import Interrupt

if TYPE_CHECKING:
    from slipstream.llm import LLM, Completion, Prompt


@dataclass(frozen=True)
class StructuredOptions:
    PANEL: ClassVar[str] = "Structured output"
    json_schema: str | None = option(
        None, "JSON schema that the text must match: a file, or JSON.", metavar="FILE|JSON"
    )
    json_object: bool = option(False, "The text must be a JSON object.")
    regex: str | None = option(None, "Regular expression that the text must match.")
    grammar: str | None = option(None, "File of a grammar that the text must follow, in Lark or EBNF.", metavar="FILE")
    choice: list[str] | None = option(None, "String that the text may be; repeatable: the text must be one of them.")
    after: str | None = option(None, "Apply the structure only after this string has been generated, as in </think>.")

    def value(self) -> Structured | None:
        """Return the requested structured output, or None. Raises ParameterError, also for unreadable files."""
        given = {name: value for name, value in vars(self).items() if value not in (None, False, [])}
        if "grammar" in given:
            given["grammar"] = _read("--grammar", given["grammar"])
        schema = given.get("json_schema")
        if schema is not None and not schema.lstrip().startswith("{") and schema not in ("true", "false"):
            given["json_schema"] = _read("--json-schema", schema)
        if not given:
            return None
        structured = Structured(**given)
        from slipstream.grammar.compiler import check_structured

        check_structured(structured)
        return structured


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ParameterError(f"{option} {path} cannot be read: {fault}", fix="check the file name") from fault


@expand_groups
def generate(
    models: ModelOptions,
    sampling: SamplingOptions,
    structured: StructuredOptions,
    prompt: str | None = argument(
        "The prompt; with - or without it, standard input is read.", default=None, shown=False
    ),
    file: Path | None = option(None, "Read the prompt from a file.", "--file", "-f"),
    chat: bool = option(False, "Treat the prompt as a chat message."),
    as_json: bool = option(False, "Print one JSON object instead of text.", "--json"),
    quiet: bool = option(False, "Print only the generated text.", "--quiet", "-q"),
) -> None:
    """Complete a prompt.

    The text goes to standard output, everything else to standard error. On a terminal, colours distinguish accepted
    draft tokens from tokens chosen by the target.
    """
    params = replace(sampling.params(), structured=structured.value())
    text = read_prompt(prompt, file)
    llm = load(models, quiet or as_json, silent=quiet, asked=[params])
    request: Prompt = llm.chat_prompt(text) if chat else text
    if not quiet:
        render.line(banner(llm, models))
    completion, finish = run(llm, request, params, shown=not as_json, legend=not quiet)
    if as_json:
        print(json.dumps(as_dict(completion, finish, llm.rule.name), ensure_ascii=False))
    elif not quiet:
        if completion.logprobs is not None:
            print_logprobs(completion, llm.tokenizer)
        render.line(render.summary(completion.stats, llm.rule.name, finish))
        ended = finish == "stop" and not completion.text.strip()
        if ended and not chat and getattr(llm.tokenizer, "chat_template", None):
            render.line("the model ended the text at once: it answers messages, so try --chat")
    if finish == "interrupted":
        raise typer.Exit(130)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt: argument, file or standard input. Raises PromptError unless exactly one prompt is readable."""
    try:
        if file is None and (prompt == "-" or (prompt is None and not sys.stdin.isatty())):
            prompt = sys.stdin.read() or (prompt and "")
        if (prompt is None) == (file is None):
            raise PromptError(
                "no prompt was given" if prompt is None else "both a prompt and --file were given",
                fix='give one prompt: slipstream generate "def add(a, b):", or - for standard input, or --file FILE',
            )
        text = str(prompt) if file is None else file.read_text(encoding="utf-8")
    except OSError as fault:
        raise PromptError(f"the prompt cannot be read: {fault}", fix="check the file name") from fault
    except UnicodeDecodeError as fault:
        raise PromptError(f"the prompt cannot be read from {file}: {fault}", fix="give UTF-8 text") from fault
    check_text("the prompt", text, PromptError)
    return text


def run(llm: LLM, prompt: Prompt, params: SamplingParams, shown: bool, legend: bool) -> tuple[Completion, str]:
    """Generate and stream the text. Returns the completion, and "stop", "length" or "interrupted"."""
    seq = llm.sequence(prompt, params)
    writer = render.TextWriter(colours=llm.drafter.name != "none")
    if shown and legend and writer.colours:
        render.err().print(render.legend())
    try:
        with Interrupt() as interrupt:
            for chunk in llm.follow(seq):
                for piece in chunk.pieces if shown else ():
                    writer.write(piece.text, piece.drafted)
                if interrupt.asked:
                    break
        completion = llm.completion(seq)
        if shown:
            writer.write(completion.text[len(writer.written) :])  # the part that was held back before an interruption
    finally:
        if shown:
            writer.end()
    return completion, seq.finish or "interrupted"


def as_dict(completion: Completion, finish: str, rule: str) -> JsonObject:
    logprobs = None if completion.logprobs is None else [asdict(token) for token in completion.logprobs]
    more = {"finish_reason": finish, "logprobs": logprobs, "rule": rule, "stats": completion.stats.as_dict()}
    return vars(completion) | more
