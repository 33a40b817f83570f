"""Functions that make each drafter of the registry for a toy target, and variants of drafters with other settings."""

from collections.abc import Callable

from slipstream.backends.native.native_heads import NativeDFlash
from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.drafters.registry import DRAFTERS, make_drafter
from tests.drafters.conformance import LENGTH, Case
from tests.drafters.fakes import ExitToy, MaskedToy, MultiStepToy, string_match, toy_model
from tests.drafters.scripted_drafters import RandomDrafter, ScriptedDrafter, replay
from tests.heads.tiny_heads import PARALLEL, dflash_drafter, eagle_drafter, medusa_drafter
from tests.heads.tiny_mtp import native_drafter, random_drafter
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

V = 5


def target() -> ToyTarget:
    return ToyTarget(V, order=3, seed=21, sharpness=1.5)


def other() -> ToyTarget:
    return ToyTarget(V, order=2, seed=22, sharpness=1.0)


def several_steps() -> MultiStepToy:
    return MultiStepToy(V + 1, order=2, seed=22, sharpness=1.0)


def exits(in_one_call: bool = True) -> ExitToy:
    target = ExitToy(V, order=2, seed=22, sharpness=1.0)
    target.in_one_call = in_one_call
    return target


MAKERS: dict[str, Callable[[Target], Drafter]] = {
    "model": lambda target: make_drafter("model", target, model=other()),
    "layerskip": lambda target: make_drafter("layerskip", exits(), exit=1),
    "medusa": lambda target: medusa_drafter(V, nodes=8),
    "eagle": lambda target: eagle_drafter(V, 1),
    "eagle3": lambda target: eagle_drafter(V, 3),
    "dflash": lambda target: dflash_drafter(V),
    "mtp": lambda target: random_drafter(V, V),
    "hybrid": lambda target: make_drafter("hybrid", target, model=other()),
}
"""Registered drafters that need more than a target."""

LOOKUPS = [name for name in DRAFTERS if name not in MAKERS and name != "none"]
"""Registered drafters that need nothing but the sequence and the target's outputs."""


def maker(name: str) -> Callable[[Target], Drafter]:
    """Return a function that makes the registered drafter with this name for a target."""
    return MAKERS.get(name, lambda target: make_drafter(name, target))


def _recorded(target: Target) -> dict[tuple[int, ...], list[int]]:
    """Return the target's greedy continuation of every prompt in the conformance tests."""
    oracle = Oracle(target)
    prompts = [*Case(lambda: target, scripted).prompts(7), [0, 1, 2, 0, 1, 2, 0]]
    return {tuple(p): oracle.greedy(p, LENGTH) for p in prompts}


def scripted(target: Target) -> Drafter:
    return ScriptedDrafter(_recorded(target), V, replay(0.7))


VARIANTS: dict[str, Callable[[Target], Drafter]] = {
    "ngram, bounded": lambda target: NgramDrafter(NgramConfig(max_entries=40, row_cost=0.1)),
    "model, parallel": lambda target: ModelDrafter(MaskedToy(V + 1, order=2, seed=22, sharpness=1.0), V),
    "model, several steps": lambda target: ModelDrafter(several_steps(), V),
    "model, string": string_match,
    "model, string, several steps": lambda target: string_match(target, toy_model(MultiStepToy)),
    "layerskip, step by step": lambda target: make_drafter("layerskip", exits(False), exit=2),
    "medusa, fixed tree": lambda target: medusa_drafter(V, tree="3,2,1"),
    "suffix, bounded": lambda target: make_drafter("suffix", target, max_depth=4, max_tokens=16, row_cost=0.0),
    "lookahead, large": lambda target: make_drafter("lookahead", target, window=4, ngram=3, guesses=3, row_cost=0.0),
    "lookahead, smallest": lambda target: make_drafter("lookahead", target, window=1, ngram=2, guesses=1),
    "eagle3, parallel": lambda target: eagle_drafter(V, 3, PARALLEL),
    "eagle tree, drawn": lambda target: eagle_drafter(V, 3, shape="tree", width=3, nodes=7),
    "dspark": lambda target: dflash_drafter(V, changes={"from_anchor": True, "markov_rank": 3}),
    "dflash, windows and a draft vocabulary": lambda target: dflash_drafter(
        V,
        changes={"decoder": {"windows": (5, None)}, "causal_windows": True, "draft_vocab": V - 2, "own_lm_head": True},
    ),
    "dspark, native": lambda target: dflash_drafter(
        V, changes={"from_anchor": True, "markov_rank": 3}, runs=NativeDFlash
    ),
    "dflash, causal": lambda target: dflash_drafter(V, changes={"causal": True}),
    "mtp, native": lambda target: native_drafter(V, V),
    "mtp, native, draft vocabulary": lambda target: native_drafter(V, V, V - 2),
    "mtp, two layers": lambda target: random_drafter(V, V, 2),
    "mtp, three layers": lambda target: random_drafter(V, V, 3),
    "hybrid, continued": lambda target: make_drafter(
        "hybrid", target, members=[make_drafter("ngram", target, row_cost=0.0), ModelDrafter(other(), V)],
        min_match=99, neural=1, append_tokens=3, append_match=1,
    ),
    "scripted": scripted,
    "random": lambda target: RandomDrafter(V, sampled=True),
}  # fmt: skip
"""Registered drafters with other settings, and the scripted drafters of other tests."""

REMEMBERING: dict[str, Callable[[Target], Drafter]] = {
    "suffix": lambda target: make_drafter("suffix", target, across=True, past_tokens=64),
}
"""Settings with which a drafter keeps data of a request for later requests."""
