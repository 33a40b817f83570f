"""The state of one chat session, and its slash commands. Settings are options of the command."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from slipstream.cli import render
from slipstream.cli.generate import run
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError, PromptError
from slipstream.llm import LLM, Prompt

Command = Callable[[], bool | None]


class Session:
    """The LLM, the sampling parameters, and the conversation so far.

    raw: complete each prompt without a chat template; always true if the tokenizer has no chat template. Raises
    ParameterError for a system message without a template.
    """

    def __init__(self, llm: LLM, params: SamplingParams, raw: bool = False, system: str | None = None):
        self.llm, self.params, self.system = llm, params, system
        self.raw = raw or not getattr(llm.tokenizer, "chat_template", None)
        if self.raw and system:
            raise ParameterError("there is no system message without a chat template", fix="include it in the prompt")
        self.messages: list[dict[str, str]] = []
        self.total = SpecStats()
        self.commands: dict[str, tuple[Command, str]] = {
            "reset": (self._reset, "start a new conversation"),
            "stats": (self._stats, "show the statistics of this session"),
            "help": (self._help, "show this list"),
            "quit": (lambda: False, "leave the chat (or Ctrl-D)"),
        }

    def handle(self, line: str) -> bool:
        """Run a slash command or answer a prompt. Returns False to end the session. Raises SlipstreamError."""
        if line.startswith("/") and not line.startswith("//"):
            return self.command(line[1:].strip().lower()) is not False
        self.answer(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def answer(self, prompt: str) -> None:
        """Stream the answer to one prompt and add both to the conversation."""
        request = self._request(prompt)
        completion, finish = run(self.llm, request, self.params, shown=True, legend=self.total.steps == 0)
        self.total += completion.stats
        if not self.raw:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion.text}]
        if completion.logprobs is not None:
            render.logprobs(completion, lambda token: self.llm.tokenizer.decode([token]))
        render.line(render.summary(completion.stats, self.llm.rule.name, completion.lossless, finish))

    def command(self, name: str) -> bool | None:
        if name in self.commands:
            return self.commands[name][0]()
        near = get_close_matches(name, self.commands, n=1)
        raise ParameterError(
            f"there is no command /{name}",
            fix=f"did you mean '/{near[0]}'?" if near else "/help lists them",
        )

    # --- commands --------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.messages = []
        render.line("new conversation started")

    def _stats(self) -> None:
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

    def _help(self) -> None:
        render.err().print(render.facts_table([(f"/{name}", text) for name, (_, text) in self.commands.items()]))

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
