"""Checks whether a target and a draft model are compatible.

Draft tokens are passed as ids, so both models must map each id to the same token. The output heads may have different
numbers of rows: vocabularies are padded to round numbers (Qwen2.5: 151936 and 152064 rows for the same tokens). An
incompatible pair still decodes correctly, because the target verifies ids, but hardly any draft token is accepted.
"""

from dataclasses import asdict, dataclass
from functools import cached_property

from slipstream.checkpoints.checkpoint import CheckpointName
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.module_shape import differ
from slipstream.core.strict import JsonObject
from slipstream.errors import PairError, ParameterError
from slipstream.targets.describe import describe
from slipstream.targets.described import Described

SHOWN = 5
"""Maximum number of differing ids to list."""


@dataclass(frozen=True)
class Difference:
    """An id with different tokens in the target and in the draft model."""

    id: int
    target: str
    draft: str

    def __str__(self) -> str:
        return f"{self.id}: {self.target!r} / {self.draft!r}"


@dataclass(frozen=True)
class PairReport:
    """The result of `check_pair`.

    common    number of ids that both models have.
    ordinary, special  common ids that map to different tokens; special: ids that both models have as special tokens.
    """

    target: Described
    draft: Described
    common: int
    ordinary: tuple[Difference, ...]
    special: tuple[Difference, ...]

    @property
    def compared(self) -> bool:
        """Return whether both models have a token map; if not, only sizes were compared."""
        return self.target.token_map is not None and self.draft.token_map is not None

    @property
    def differing(self) -> int:
        return len(self.ordinary) + len(self.special)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The first five differences; of ordinary tokens if any of them differ."""
        return (self.ordinary or self.special)[:SHOWN]

    @property
    def fits(self) -> bool:
        return self.fault is None

    @property
    def problem(self) -> str:
        """Why the pair is incompatible, in one sentence; empty if it is compatible."""
        return "" if self.fault is None else self.fault.what

    @cached_property
    def fault(self) -> PairError | None:
        """The error that makes the pair incompatible: a model of another kind, or other tokens; None if compatible."""
        target, draft = self.target, self.draft
        fault = kind_fault(target.config.source_context is not None, draft.config.source_context is not None)
        if fault is not None:
            return fault
        names = f"target {str(target.checkpoint)!r} and draft {str(draft.checkpoint)!r}"
        if self.ordinary:
            return _other_tokens(
                f"{names} do not share a vocabulary: {len(self.ordinary)} of {self.common} common ids map to different "
                f"tokens; the first are (id: target / draft) {'; '.join(map(str, self.differences))}"
            )
        for whole, other in ((target, draft), (draft, target)):  # a token may have no row in the other head
            width = other.config.vocab_size
            if whole.token_map and not other.token_map and max(whole.token_map.tokens, default=0) >= width:
                return _other_tokens(
                    f"{names} do not share a vocabulary: {str(whole.checkpoint)!r} has {len(whole.token_map.tokens)} "
                    f"tokens, but {str(other.checkpoint)!r} has only {width} logits, and no tokenizer to compare"
                )
        neither = target.token_map is draft.token_map is None
        return width_fault(target.config.vocab_size, draft.config.vocab_size) if neither else None

    def require(self) -> None:
        """Raise PairError unless both models are of one kind and map the same ids to the same tokens."""
        if self.fault is not None:
            raise self.fault

    @property
    def notes(self) -> tuple[str, ...]:
        """Harmless differences of the pair, one sentence each."""
        notes, target, draft = list[str](), self.target.config, self.draft.config
        if not self.compared:
            lacking = [name for name in ("target", "draft") if getattr(self, name).token_map is None]
            who = "neither model has" if len(lacking) == 2 else f"the {lacking[0]} has no"
            sizes = f"{target.vocab_size} and {draft.vocab_size} ids"
            notes.append(f"only sizes were compared ({sizes}): {who} tokenizer files")
        elif self.special:
            count, listed = len(self.special), "; ".join(map(str, self.differences))
            notes.append(
                f"{count} special tokens have different names ({listed}): at worst, drafts of them are rejected"
            )
        if draft.context < target.context:
            notes.append(
                f"the draft model's context is {draft.context} tokens, the target's {target.context}: after "
                f"{draft.context} tokens, decoding continues without drafts"
            )
        return tuple(notes)

    @property
    def cost_ratio(self) -> float:
        """c: bytes that a draft step reads divided by bytes that a target step reads, both in the same dtype.

        Decoding is memory-bound, so this estimates the cost of a draft token in decode steps; the cost of small models
        is higher than that. The ratio is also the acceptance rate above which some draft length saves time (Leviathan
        et al. 2211.17192, corollary 3.9). Above 1, no draft length does."""
        return self.draft.config.step_parameters / self.target.config.step_parameters

    def as_dict(self) -> JsonObject:
        return {
            "fits": self.fits,
            "problem": self.problem,
            "notes": list(self.notes),
            "token_maps_compared": self.compared,
            "common_ids": self.common,
            "differing_ids": self.differing,
            "differences": [asdict(d) for d in self.differences],
            "cost_ratio": self.cost_ratio,
        }


def check_pair(target: CheckpointName | Described, draft: CheckpointName | Described) -> PairReport:
    """Check whether two checkpoints (folders, hub ids, GGUF files, "embedded", or results of `describe`) are
    compatible. Weights are not loaded.

    Raises LoadError or a subclass if one of them cannot be read, ParameterError for a model in memory."""
    a, b = _describe(target, "target"), _describe(draft, "draft")
    if a.token_map is None or b.token_map is None:
        return PairReport(a, b, 0, (), ())
    tokens, draft_tokens = a.token_map.tokens, b.token_map.tokens
    ids, special = sorted(tokens.keys() & draft_tokens.keys()), a.token_map.special & b.token_map.special
    differences = [Difference(i, tokens[i], draft_tokens[i]) for i in ids if tokens[i] != draft_tokens[i]]
    ordinary = tuple(each for each in differences if each.id not in special)
    return PairReport(a, b, len(ids), ordinary, tuple(each for each in differences if each.id in special))


def _describe(model: CheckpointName | Described, role: str) -> Described:
    if isinstance(model, CheckpointName):
        return describe(model, LoadSettings(role=role))
    if isinstance(model, Described):
        return model
    raise ParameterError(
        f"the {role} is a model in memory, of the class {type(model).__name__}",
        why="the check compares tokenizers, and a model in memory has none",
        fix="give the folder, hub id or GGUF file that the model was loaded from, or 'embedded'",
    )


_KIND = {True: "an encoder-decoder", False: "a decoder"}


def kind_fault(target: bool, draft: bool) -> PairError | None:
    """Return the error for a pair in which only one model is an encoder-decoder; otherwise None."""
    if target == draft:
        return None
    return PairError(
        f"the target is {_KIND[target]}, but the draft model is {_KIND[draft]}",
        why="a decoder continues a prompt, and an encoder-decoder answers a source text",
        fix=f"use a draft model that is {_KIND[target]}, too, or the drafter 'ngram', which needs no draft model",
    )


def width_fault(target: int, draft: int) -> PairError | None:
    """Return the error for models without token maps whose numbers of ids differ by more than padding, or None."""
    if not differ(target, draft):
        return None
    return _other_tokens(
        f"the target has {target} logits, the draft model {draft}: a difference too large to be padding, and there are "
        "no tokenizers to compare"
    )


def _other_tokens(problem: str) -> PairError:
    return PairError(
        problem,
        why="draft tokens are token ids, so nearly all would be rejected, and decoding would be slower",
        fix="use a draft model of the target's family (see `slipstream info TARGET DRAFT`), the drafter 'ngram', which "
        "needs no draft model, or draft_tokenizer='string' (--draft-tokenizer string), which translates draft tokens "
        "from one tokenizer to the other",
    )
