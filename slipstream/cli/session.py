"""The state of one chat session, and its slash commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from slipstream.cli import render
from slipstream.cli.generate import run
from slipstream.cli.loading import banner
from slipstream.cli.options import ModelOptions, checked_length, literal, parse_options
from slipstream.core.parameter_declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.drafters.draft_plan import asked, names_of
from slipstream.drafters.registry import DRAFTERS
from slipstream.errors import ParameterError, PromptError
from slipstream.llm import LLM, Prompt
from slipstream.settings import AUTO, RULES, one_of

_PARAMETERS = {name: known.option for name, known in declared(SamplingParams).items() if known.option}

SAMPLING = {name.replace("_", "-"): name for name in _PARAMETERS}
"""Slash command -> field of `SamplingParams`. Parameters without a command-line option have no slash command either."""

NAMES = {option.lstrip("-"): name.replace("_", "-") for name, strings in _PARAMETERS.items() for option in strings} | {
    "temp": "temperature",
    "k": "draft-tokens",
    "exit": "quit",
}
"""Aliases of commands; the names of command-line options work, too."""

Command = Callable[[str], bool | None]


class Session:
    """The LLM and the options it was loaded with, the sampling parameters, and the conversation so far.

    raw: complete each prompt without a chat template; always true if the tokenizer has no chat template.
    """

    def __init__(
        self, llm: LLM, models: ModelOptions, params: SamplingParams, raw: bool = False, system: str | None = None
    ):
        self.llm, self.models, self.params, self.system = llm, models, params, system
        self.raw = raw or not getattr(llm.tokenizer, "chat_template", None)
        self.messages: list[dict[str, str]] = []
        self.total = SpecStats()
        self.last = ""
        self.three_ways = False
        self._drafters = {llm.drafter.name: llm.drafter}  # type: ignore[attr-defined]
        self.commands: dict[str, tuple[Command, str]] = {
            "draft-tokens": (
                self._set_length,
                f"N: maximum number of draft tokens per step; 0: none; {AUTO}: chosen in each step",
            ),
            "drafter": (self._set_drafter, f"NAME [OPTION=VALUE ...]: {', '.join(DRAFTERS)}"),
            "rule": (self._set_rule, "NAME: verification rule: " + ", ".join(RULES)),
            "side": (
                self._side,
                "[TEXT]: show TEXT or the next prompt decoded plainly, by the drafter alone, and speculatively",
            ),
            "system": (self._set_system, "TEXT: set the system message and start a new conversation"),
            "reset": (self._reset, "start a new conversation"),
            "stats": (self._stats, "show the statistics of this session"),
            "help": (self._help, "show this list"),
            "quit": (lambda _: False, "leave the chat (or Ctrl-D)"),
        }

    def handle(self, line: str) -> bool:
        """Run a slash command or answer a prompt. Returns False to end the session. Raises SlipstreamError."""
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].strip().partition(" ")
            return self.command(name.lower().replace("_", "-"), argument.strip()) is not False
        prompt = line.removeprefix("/") if line.startswith("//") else line
        if self.three_ways:
            self.three_ways = False
            self._compare(prompt)
        else:
            self.answer(prompt)
        return True

    def answer(self, prompt: str) -> None:
        """Stream the answer to one prompt and add both to the conversation."""
        request = self._request(prompt)
        completion, finish = run(self.llm, request, self.params, shown=True, legend=self.total.steps == 0)
        self.total += completion.stats
        if not self.raw:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion.text}]
        self.last = render.summary(completion.stats, self.llm.rule.name, completion.lossless, finish)
        if completion.logprobs is not None:
            render.logprobs(completion, lambda token: self.llm.tokenizer.decode([token]))
        render.line(self.last)

    def command(self, name: str, argument: str) -> bool | None:
        name = NAMES.get(name, name)
        if name in self.commands:
            return self.commands[name][0](argument)
        if name in SAMPLING:
            self._set_sampling(name, argument)
            return None
        near = get_close_matches(name, [*self.commands, *SAMPLING], n=1)
        raise ParameterError(
            f"there is no command /{name}",
            fix=f"did you mean '/{near[0]}'?" if near else "/help lists them",
        )

    # --- commands --------------------------------------------------------------------------------------------------

    def _set_sampling(self, name: str, argument: str) -> None:
        field = SAMPLING[name]
        if argument:
            self.params = replace(self.params, **{field: _value(field, argument)})
        render.line(f"{name} {getattr(self.params, field)}")

    def _set_length(self, argument: str) -> None:
        if argument:
            self.llm.draft_tokens = checked_length(argument)
        render.line(f"draft-tokens {self.llm.draft_tokens}")

    def _set_drafter(self, argument: str) -> None:
        name, *options = argument.split() or [self.llm.drafter.name]
        names = names_of(name)
        if name not in self._drafters or options:
            drafter, own = asked(names, self.models.draft_model)
            self.llm.use(drafter, **own | parse_options(options))
            self._drafters[name] = self.llm.drafter
        elif argument:
            self.llm.use(self._drafters[name])
        render.line(banner(self.llm, self.models))

    def _set_rule(self, argument: str) -> None:
        if argument:
            one_of("rule", argument, tuple(RULES))
            self.llm.rule = argument
        render.line(render.rule_text(self.llm.rule.name, self.llm.rule.lossless))

    def _side(self, argument: str) -> None:
        if argument:
            self._compare(argument)
        else:
            self.three_ways = True
            render.line("the next prompt is decoded plainly, by the drafter alone, and speculatively")

    def _set_system(self, argument: str) -> None:
        if self.raw:
            raise ParameterError("there is no system message without a chat template", fix="include it in the prompt")
        self.system, self.messages = argument or None, []
        render.line(f"system message {'set' if argument else 'removed'}; new conversation started")

    def _reset(self, argument: str) -> None:
        self.messages = []
        render.line("new conversation started")

    def _stats(self, argument: str) -> None:
        if not self.total.steps:
            return render.line("nothing has been generated yet")
        render.line(render.summary(self.total, self.llm.rule.name, self.llm.rule.lossless))
        spent = ", ".join(
            f"{phase} {seconds / self.total.total_seconds:.0%}" for phase, seconds in self.total.seconds.items()
        )
        render.line(f"{render.counted(self.total.steps, 'step')}; time: {spent}")
        if self.total.drafted_at:
            rates = " ".join(f"{rate:.0%}" for rate in self.total.position_rates)
            render.line(f"acceptance by position: {rates}")

    def _help(self, argument: str) -> None:
        rows = [(f"/{name}", text) for name, (_, text) in self.commands.items()]
        rows.append(("/PARAMETER [VALUE]", "show or set a sampling parameter: " + ", ".join(SAMPLING)))
        render.err().print(render.facts_table(rows))

    def _compare(self, prompt: str) -> None:
        from slipstream.cli.side import three_ways

        three_ways(self.llm, self._request(prompt), self.params)

    def _request(self, prompt: str) -> Prompt:
        """The prompt, or the conversation that ends with it. Raises PromptError if that is too long."""
        if self.raw:
            return prompt
        opening = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.llm.chat_prompt([*opening, *self.messages, {"role": "user", "content": prompt}])
        context = self.llm.target.context
        if len(ids) >= context and self.messages:
            raise PromptError(
                f"the conversation has {len(ids)} tokens, the target's context holds {context}",
                fix="/reset starts a new one",
            )
        return ids


def _value(field: str, text: str) -> Any:
    """Parse the value of a sampling parameter; `SamplingParams` checks its range."""
    if field == "stop":
        try:
            return () if text == "none" else (text.encode("latin-1", "backslashreplace").decode("unicode_escape"),)
        except UnicodeDecodeError as fault:
            raise ParameterError(f"stop {text!r} holds a \\ that is no escape", fix="write \\\\ for it") from fault
    return None if text.lower() == "none" else literal(text)
