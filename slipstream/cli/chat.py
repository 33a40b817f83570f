"""`slipstream chat`: a prompt loop, and the session with its slash commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from slipstream.cli import render
from slipstream.cli.generate import run
from slipstream.cli.loading import banner, load
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import ModelOptions, SamplingOptions
from slipstream.cli.table_forms import print_logprobs
from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError, PromptError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.llm import LLM, Prompt

PROMPT, FENCE = ">>> ", '"""'


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """Sampling options of `chat`, where an answer may fill the context by default."""

    max_tokens: int | None = option(
        None,
        "Maximum number of tokens in an answer.",
        "--max-new-tokens",
        "-n",
        shown="as many as fit into the context",
        metavar="N",
        panel="Sampling",
    )


@expand_groups
def chat(
    models: ModelOptions,
    sampling: ChatSampling,
    system: str | None = option(None, "System message.", shown=False),
    raw: bool = option(False, "Continue each prompt as plain text, without the chat template."),
) -> None:
    """Chat with a model.

    /reset starts a new conversation, /help lists all commands."""
    llm = load(models, asked=[sampling.params()])
    params = sampling.params({"max_tokens": llm.target.context, **llm.defaults.sampling})
    session = Session(llm, params, raw=raw, system=system)
    render.line(banner(llm, models))
    how = (
        "without a chat template: prompts are continued as given" if session.raw else "using the model's chat template"
    )
    render.line(f"{how}; {FENCE} starts and ends a prompt of several lines, /help lists commands, Ctrl-D leaves")
    if llm.defaults.sampling:
        from slipstream.checkpoints.generation_defaults import describe_sampling

        render.line(describe_sampling(llm.defaults.sampling))
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows: the console edits lines itself
            import readline  # noqa: F401 makes `input` edit lines and remember them
    loop(session)


def loop(session: Session) -> None:
    """Read and answer prompts until Ctrl-D or /quit. An error is printed and the session continues."""
    while True:
        try:
            line = read()
        except EOFError:
            break
        except KeyboardInterrupt:  # Ctrl-C while typing discards the line
            print(file=sys.stderr)
            continue
        if not line.strip():
            continue
        try:
            if not session.handle(line):
                return
        except SlipstreamError as fault:
            render.error(fault)
        except KeyboardInterrupt:
            render.restore_terminal()
    if sys.stdin.isatty():
        print()


def read() -> str:
    """Read one line, or several lines between fences. Raises EOFError at the end of the input."""
    interactive = sys.stdin.isatty()
    line = input(PROMPT if interactive else "")
    if not line.startswith(FENCE):
        return line
    lines = [line[len(FENCE) :]]
    while not lines[-1].endswith(FENCE):
        lines.append(input("... " if interactive else ""))
    lines[-1] = lines[-1][: -len(FENCE)]
    return "\n".join(lines).strip("\n")


class Session:
    """The conversation so far. raw: complete prompts without a chat template; always true if the tokenizer has no
    template. Raises ParameterError for a system message without a template."""

    def __init__(self, llm: LLM, params: SamplingParams, raw: bool = False, system: str | None = None):
        self.llm, self.params, self.system = llm, params, system
        self.raw = raw or not getattr(llm.tokenizer, "chat_template", None)
        if self.raw and system:
            raise ParameterError("--system was given, but there is no chat template", fix="put it into the prompt")
        self.messages: list[dict[str, str]] = []
        self.total = SpecStats()
        self.commands: dict[str, tuple[Callable[[], bool | None], str]] = {
            "reset": (self._reset, "start a new conversation"),
            "stats": (self._stats, "show the statistics of this session"),
            "help": (self._help, "show this list"),
            "quit": (lambda: False, "leave the chat (or Ctrl-D)"),
        }

    def handle(self, line: str) -> bool:
        """Run a slash command or answer a prompt. Returns False to end the session. Raises SlipstreamError."""
        if line.startswith("/") and not line.startswith("//"):
            return self._command(line[1:].strip().lower()) is not False
        self._answer(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _answer(self, prompt: str) -> None:
        request = self._request(prompt)
        completion, finish = run(self.llm, request, self.params, shown=True, legend=self.total.steps == 0)
        self.total += completion.stats
        if not self.raw:
            self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion.text}]
        if completion.logprobs is not None:
            print_logprobs(completion, self.llm.tokenizer)
        render.line(render.summary(completion.stats, self.llm.rule.name, finish))

    def _command(self, name: str) -> bool | None:
        if name in self.commands:
            return self.commands[name][0]()
        near = get_close_matches(name, self.commands, n=1)
        raise ParameterError(
            f"there is no command /{name}", fix=f"did you mean '/{near[0]}'?" if near else "/help lists them"
        )

    def _reset(self) -> None:
        self.messages = []
        render.line("new conversation started")

    def _stats(self) -> None:
        if not self.total.steps:
            return render.line("nothing has been generated yet")
        render.line(render.summary(self.total, self.llm.rule.name))
        spent = ", ".join(
            f"{phase} {seconds / self.total.total_seconds:.0%}" for phase, seconds in self.total.seconds.items()
        )
        render.line(f"{render.spell(self.total.steps, 'step')}; time: {spent}")
        if self.total.drafted_at:
            rates = " ".join(f"{rate:.0%}" for rate in self.total.position_rates)
            render.line(f"acceptance by position: {rates}")

    def _help(self) -> None:
        render.err().print(render.facts_table([(f"/{name}", text) for name, (_, text) in self.commands.items()]))

    def _request(self, prompt: str) -> Prompt:
        """Return the prompt, or the conversation that ends with the prompt. Raises PromptError if it is too long."""
        if self.raw:
            return prompt
        opening = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.llm.chat_prompt([*opening, *self.messages, {"role": "user", "content": prompt}])
        context = self.llm.target.context
        if len(ids) >= context and self.messages:
            raise PromptError(
                f"the conversation has {len(ids)} tokens, but the target's context holds {context}",
                fix="start a new conversation with /reset",
            )
        return ids
