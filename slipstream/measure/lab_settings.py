"""Settings of measurements. Settings with a help text become options of commands. This module does not import torch."""

from dataclasses import dataclass, field

from slipstream.core.params import SamplingParams, Strict, check_integer, integer, number, option
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError

COUNT, SECONDS = integer(1), number(0.0, float("inf"))
TIME_LIMIT = "Stop measuring after this many seconds, but not before three passes over all prompts."


@dataclass(frozen=True)
class BenchConfig(Strict):
    """Settings of `slipstream bench`.

    tokens       largest number of new tokens per prompt.
    temperatures, batches, contexts   every combination is measured, each with its own plain decoding.
    contexts     number of tokens before the answer: earlier text is put before each prompt (see
                 `PromptSet.in_context`); None: the prompt alone.
    sampling     further fields of `SamplingParams`.
    """

    tokens: int = option(64, "Number of tokens generated for a prompt.", "--max-new-tokens", "-n", check=COUNT, min=1)
    rounds: int = option(5, "Number of timed passes over the prompts.", check=COUNT, min=1)
    seconds: float = option(60, TIME_LIMIT, check=SECONDS, min=0)
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)
    seed: int = option(0, "Sampling seed.")
    sampling: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperatures or not self.batches or not self.contexts:
            raise ParameterError("no temperature, batch size or context was given", fix="give at least one of each")
        for context in self.contexts:
            if context is not None:
                check_integer("context", context, 1)
        for batch in self.batches:
            check_integer("batch", batch, 1)
        for temperature in self.temperatures:
            self.params(temperature)

    def params(self, temperature: float) -> SamplingParams:
        """Make the sampling parameters at this temperature. Raises ParameterError for values out of range."""
        return SamplingParams(temperature=temperature, max_tokens=self.tokens, **self.sampling)


@dataclass(frozen=True)
class TuneConfig(Strict):
    """tokens   largest number of new tokens per prompt.
    confirm  number of settings with the best predictions that are measured against plain decoding.
    rounds, seconds   timed passes and time limit of this second measurement, as in `BenchConfig`.
    """

    tokens: int = option(64, check=integer(2))
    batch: int = option(1, "Batch size.", check=COUNT, min=1)
    confirm: int = option(3, "Number of the best settings to time against plain decoding.", check=COUNT, min=1)
    rounds: int = option(5, "Number of timed passes of the comparison with plain decoding.", check=COUNT, min=1)
    seconds: float = option(45, TIME_LIMIT, check=SECONDS, min=0)
    seed: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
