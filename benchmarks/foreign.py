"""`python -m benchmarks.foreign` measures draft models whose tokenizer differs from the target's (`draft_tokenizer`).

The embedded target is so small that no draft model gives a speed-up of 1.5 on it. So layers that add nothing to the
residual stream are added to the target: it writes the same text as the embedded target, and costs as much as a model of
the larger size. The draft model is the embedded draft model with its own tokenizer, and with these tokenizers:

    renamed  every id is different, and the end-of-text token has another name; all tokens are shared
    cut      only 60 % of the tokens, so that words are split differently. The weights are not changed
    trained  with `--trained FOLDER`: the embedded draft model, trained further with another tokenizer on Python source
             (`make foreign-draft`: forty minutes), but not on text of the target

Every arm is measured against plain decoding in one interleaved run, greedy, on the embedded held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks.derived_models import deeper, written
from benchmarks.drafters import arms_of, kept, table
from benchmarks.markdown import beside
from benchmarks.protocol import ROOT, THREADS
from slipstream import zoo
from slipstream.core.target import Target
from slipstream.drafters.string_match import Writer, vocabularies, with_tokenizer
from slipstream.llm import LLM
from slipstream.measure.benchmark import BenchConfig, Contender, bench
from slipstream.measure.prompts import choose_prompts
from slipstream.measure.results import Result
from slipstream.targets.describe import as_target
from slipstream.tokens.text import load_tokenizer

IDLE = 3
"""Number of added layers. With them, the draft model with the target's tokenizer has a speed-up of 1.5 or a little
more."""
SHARE = 0.6
"""Share of the tokens that are in the cut vocabulary."""
END = "</s>"
"""Text of the end-of-text token."""
SAME, LEAST = 1.5, 1.15
"""Speed-ups that must be reached: SAME with the target's tokenizer, without which the comparison means nothing, and
LEAST with another tokenizer."""


def renamed(folder: Path) -> Path:
    """Write the embedded draft model with other ids, and other names of special tokens."""
    return _with_tokens(folder, kept=None)


def cut(folder: Path, share: float = SHARE) -> Path:
    """Write the embedded draft model with only the tokens of the first merges."""
    return _with_tokens(folder, kept=share)


def _with_tokens(folder: Path, kept: float | None) -> Path:
    tokenizer = json.loads((zoo.draft_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((zoo.draft_dir() / "config.json").read_text())
    old: dict[str, int] = tokenizer["model"]["vocab"]
    most = len(old) if kept is None else round(kept * len(old))
    chosen = [token for token, id_ in sorted(old.items(), key=lambda item: item[1]) if id_ < most]
    new: dict[str, int] = dict(zip(chosen, np.random.default_rng(0).permutation(most).tolist(), strict=True))
    end = next(token for token, id_ in old.items() if id_ == config["eos_token_id"])
    specials = {each["content"]: each["content"] for each in tokenizer["added_tokens"]} | {end: END}
    for each in tokenizer["added_tokens"]:
        each["id"], each["content"] = new[each["content"]], specials[each["content"]]
    model = tokenizer["model"]
    model["vocab"] = {specials.get(token, token): id_ for token, id_ in new.items()}
    model["merges"] = [pair for pair in model["merges"] if _joined(pair) in new]
    rows: NDArray[np.int64] = np.empty(most, np.int64)  # new id -> old id
    rows[list(new.values())] = [old[token] for token in new]
    weights = load_file(zoo.draft_dir() / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][rows]
    ends = {"eos_token_id": new[end], "pad_token_id": new[end]}
    checkpoint = written(folder, zoo.draft_dir(), weights, config | ends | {"vocab_size": most})
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    return checkpoint


def _joined(pair: str | Seq[str]) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


def measure(options: argparse.Namespace, folder: Path) -> tuple[Result, dict[str, str]]:
    """Measure all draft models. Returns the result, and for each tokenizer how many tokens are shared."""
    llm = LLM(deeper(folder / "target", zoo.target_dir(), options.idle), threads=THREADS)
    k, arms, shared = options.draft_tokens, list[Contender](), dict[str, str]()

    def arm(label: str, model: Target | Writer) -> None:
        arms.append(Contender(label, "model", k, {"model": model}))

    def draft(path: Path) -> Target:
        return as_target(path, threads=THREADS)

    arm("same tokenizer", draft(zoo.draft_dir()))
    paths = {"renamed": renamed(folder / "renamed"), "cut": cut(folder / "cut")}
    if options.trained is not None:
        paths["trained"] = options.trained
    for name, path in paths.items():
        tokenizer = load_tokenizer(path)
        model = draft(path)
        arm(name, with_tokenizer(model, tokenizer, llm.tokenizer, llm.target.vocab_size))
        shared[name] = str(vocabularies(llm.tokenizer, tokenizer, (llm.target.vocab_size, model.vocab_size)))
    config = BenchConfig(tokens=96, rounds=options.rounds, seconds=60 * options.minutes, sampling={"ignore_eos": True})
    return kept(bench(llm, arms, choose_prompts(llm, "code,edit", options.prompts), config).as_dict()), shared


def figures(result: Result) -> list[tuple[str, float, float]]:
    """Return the figures as (name, value to reach, measured value)."""
    arms = arms_of(result, 0.0)
    least = {label: SAME if label == "same tokenizer" else LEAST for label, arm in arms.items() if not arm["plain"]}
    return [(label, bar, float(arms[label]["overall"]["speedup"]["value"])) for label, bar in least.items()]


def markdown(result: Result, shared: Mapping[str, str], idle: int) -> str:
    arms = list(arms_of(result, 0.0).values())
    source = result.provenance
    lines = [
        "| draft model | must reach | measured | |",
        "|---|---|---|---|",
        *(
            f"| {what} | {bar:g} | {beside(value, bar)} | {'reached' if value >= bar else '**missed**'} |"
            for what, bar, value in figures(result)
        ),
        "",
        *table(arms, list(arms[0]["categories"])),
        "",
        f"The embedded target with {idle} layers more that do nothing, so that it costs as much as a larger model, and "
        "the embedded draft model with other tokenizers (see `benchmarks/foreign.py`). "
        + " ".join(f"{name}: {what}." for name, what in shared.items()),
        "",
        *(f"Warning: {warning}." for warning in result.warnings),
        f"{source['machine']['cpu']}, {source['machine']['cores']} cores, {THREADS} threads; {source['date']}, commit "
        f"{source['commit']}; `python -m benchmarks.{source['command']}`",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign", description=__doc__)
    parser.add_argument("--idle", type=int, default=IDLE, help="layers of the target that do nothing")
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--trained", type=Path, help="folder of a draft model with a tokenizer of its own")
    parser.add_argument("--prompts", type=int, default=16, help="code and edit prompts together")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes over the prompts")
    parser.add_argument("--minutes", type=float, default=4, help="time limit: no pass begins after it")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result, shared = measure(options, Path(folder))
    rows = figures(result)
    report = {"figures": rows, "shared": shared, "idle": options.idle, "run": result.as_dict()}
    (options.out / "foreign.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(result, shared, options.idle)
    (options.out / "foreign.md").write_text(text)
    print(text)
    return 1 if any(value < bar for _, bar, value in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
