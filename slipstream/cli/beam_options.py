"""The options of beam search, and what `slipstream generate --beams` prints. Importable without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.cli import render
from slipstream.cli.option_groups import option
from slipstream.cli.options import ModelOptions
from slipstream.core.beam_params import BeamParams
from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.core.beams import Beam

_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True)
class BeamOptions:
    """See `BeamParams`."""

    PANEL: ClassVar[str] = "Beam search"
    beams: int | None = option(None, "Search for the most probable text with so many beams.")
    beam_texts: int | None = option(None, "How many texts to print, best first.", shown="1")
    length_penalty: float | None = option(
        None, "Power of the length in the score; above 0 favours long texts.", shown="1"
    )
    early_stopping: str | None = option(
        None,
        "true: end with as many texts as beams; false: when better ones are unlikely; never: impossible.",
        shown="false",
    )

    def params(self, sampling: SamplingParams) -> BeamParams | None:
        """The search that was asked for, or None. Raises ParameterError, also for a sampling parameter that a search
        would ignore."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if "beams" not in given:
            for name in given:
                raise ParameterError(f"{name} was given without beams", fix="add --beams 4, or leave it out")
            return None
        shared = {f.name for f in fields(BeamParams)} & {f.name for f in fields(SamplingParams)}
        for f in fields(SamplingParams):
            if f.name not in shared and getattr(sampling, f.name) != f.default:
                raise ParameterError(
                    f"{f.name} was given with beams",
                    why="a beam search keeps the most probable texts: it draws nothing, and edits no distribution",
                    fix=f"leave out {f.name}, or --beams",
                )
        if "early_stopping" in given:
            if given["early_stopping"] not in _STOPPING:
                raise ParameterError(
                    f"early_stopping is {given['early_stopping']!r}", fix=f"choose {', '.join(_STOPPING)}"
                )
            given["early_stopping"] = _STOPPING[given["early_stopping"]]
        if "beam_texts" in given:
            given["n"] = given.pop("beam_texts")
        return BeamParams(**given, **{name: getattr(sampling, name) for name in shared})


def plain(models: ModelOptions) -> ModelOptions:
    """The same models without a drafter. Raises ParameterError for options of speculation."""
    off = models.names == ("none",) or models.length == 0
    default = ModelOptions()
    for name in ("draft", "drafter", "draft_tokens", "drafter_option", "draft_quantize", "rule"):
        if getattr(models, name) not in (getattr(default, name), None) and not off:
            raise ParameterError(
                f"{name} was given with beams",
                why="beams are not drafted: a step keeps the best of all continuations, not one accepted text",
                fix=f"leave out {name}, or --beams",
            )
    return replace(models, draft=None, drafter="none", draft_tokens=None, rule=default.rule)


def show(found: Seq[Beam], params: BeamParams, quiet: bool) -> None:
    """Print texts, each after a line about it on standard error."""
    for i, beam in enumerate(found, 1):
        if not quiet:
            place = f"text {i} of {len(found)}, " if params.n > 1 else ""
            render.line(
                f"beam search, {params.beams} beams: {place}score {beam.score:.3f}, "
                f"{render.counted(len(beam.token_ids), 'token')}, finish reason {beam.finish_reason}"
            )
        writer = render.TextWriter(colours=False)
        writer.write(beam.text + ("\n" if params.n > 1 and not beam.text.endswith("\n") else ""))
        writer.end()


def as_line(found: Seq[Beam]) -> str:
    """The texts as a JSON object on a line."""
    return json.dumps({"beams": [asdict(beam) for beam in found]}, ensure_ascii=False)
