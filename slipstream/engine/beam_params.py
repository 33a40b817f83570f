"""`BeamParams`: the parameters of a beam search. Importable without torch."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.params import Strict, flag, id_list, integer, number, option
from slipstream.errors import ParameterError

NEVER = "never"

STEEPEST = 16.0
"""Greatest length penalty. With it, length ** penalty is still a finite number for the longest texts."""


@dataclass(frozen=True)
class BeamParams(Strict):
    """The parameters of a beam search. The names in parentheses are parameters of transformers' `generate`.

    beams           number of texts that are continued at a time (`num_beams`); at least 2.
    n               how many texts are returned, best first (`num_return_sequences`); at most `beams`.
    length_penalty  log-probabilities are divided by length ** length_penalty, in [-16, 16]: a penalty above 0 favours
                    long texts, below 0 short texts.
    early_stopping  True: the search ends as soon as `beams` texts are finished. False: when the best running text, at
                    its present length, would score no better than the worst finished one. "never": when no running text
                    could score better at any length.
    min_tokens      no stop id before this many output tokens (`min_new_tokens`).
    max_tokens      largest number of output tokens, at least 1 (`max_new_tokens`).
    ignore_eos      whether the model's EOS does not end a text.
    stop_token_ids  ids that end a text, besides the model's EOS.
    """

    beams: int = option(4, check=integer(1))
    n: int = option(1, check=integer(1))
    length_penalty: float = option(1.0, check=number(-STEEPEST, STEEPEST))
    early_stopping: bool | str = False
    min_tokens: int = option(0, check=integer(0))
    max_tokens: int = option(128, check=integer(1))
    ignore_eos: bool = option(False, check=flag)
    stop_token_ids: Seq[int] = option((), check=id_list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams == 1:
            raise ParameterError(
                "beams is 1", why="a search with one beam is greedy decoding", fix="use generate, or 2 beams and more"
            )
        if self.n > self.beams:
            raise ParameterError(
                f"n is {self.n}, but {self.beams} beams are searched", fix=f"choose n <= {self.beams}, or more beams"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != NEVER:
            raise ParameterError(f"early_stopping is {self.early_stopping!r}", fix=f"choose True, False or {NEVER!r}")
