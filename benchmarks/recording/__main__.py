"""`python -m benchmarks.recording` records plain and speculative decoding of one text, as an animated SVG.

SmolLM2-135M-Instruct corrects a text, as in the first scene of `slipstream demo`. Plain and speculative decoding run
alternately several times, and for each of them the run with the median time is drawn. Decoding is greedy, so all
outputs must have the same tokens; otherwise nothing is drawn. Tokens appear at the measured times, slowed down by one
factor, which the picture states.
"""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import date
from pathlib import Path
from time import perf_counter

from benchmarks.recording.drawing import Recording, Take, Token, draw
from slipstream import LLM, SamplingParams, __version__
from slipstream.measure.provenance import OtherProcesses, machine
from slipstream.settings import EXECUTORS
from slipstream.zoo import SMOLLM2, smollm2_file

ROOT = Path(__file__).resolve().parents[2]
REQUEST = "Correct the mistakes in this text. Change nothing else."
TEXT = (
    "The lighthouse was built in 1891 on a small rock near the harbour. It was painted red and white so that ships "
    "could sees it by day. The last keeper left in 1974, when the lamp became automatic. Today visitors can climb the "
    "two hundred steps on summer weekends."
)
NOTES = {
    "suffix": "drafts by suffix matching",
    "ngram": "drafts by n-gram lookup",
    "eagle3": "drafts with an EAGLE-3 head",
}
"""Text in the picture about each drafter."""


def record(llm: LLM, prompt: list[int], name: str, note: str) -> Take:
    """Decode the prompt once, and time every step. Tokens of one speculative step appear together. If plain decoding
    runs several steps in one call, the time of the call is divided equally among its tokens."""
    seq = llm.sequence(prompt, SamplingParams(max_tokens=400))
    plain = llm.drafter.name == "none"
    tokens: list[Token] = []
    start, before = perf_counter(), 0.0
    for _ in llm.follow(seq):
        now = perf_counter() - start
        new = range(len(tokens), len(seq.output))
        for i, at in enumerate(new, 1):
            seconds = before + (now - before) * i / len(new) if plain else now
            text = llm.tokenizer.decode([seq.output[at]], skip_special_tokens=True)
            tokens.append(Token(text, seq.was_drafted(at)[0], seconds))
        before = now
    text = llm.completion(seq).text
    if "".join(token.text for token in tokens) != text:
        raise SystemExit("error: the tokens do not add up to the text; choose a text in ASCII")
    return Take(name, note, tokens, before, seq.stats.mean_acceptance_length or 1.0)


def rounds(llm: LLM, prompt: list[int], draft: str | list[str], length: int, note: str, count: int) -> list[list[Take]]:
    """Record rounds of [plain, speculative], after one warm-up round. The drafter is created again in each round."""
    takes = []
    for _ in range(count + 1):
        llm.use(None)
        plain = record(llm, prompt, "Plain decoding", "one token per forward pass")
        llm.use(draft)
        llm.draft_tokens = length
        takes.append([plain, record(llm, prompt, "Speculative decoding", note)])
    return takes[1:]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    add = parser.add_argument
    add("--draft", default="suffix", help="drafter as in LLM(draft=...); commas stack; default: suffix")
    add("--draft-tokens", type=int, default=10, help="draft length; default: 10")
    add("--executor", default="auto", choices=EXECUTORS, help="default: auto")
    add("--rounds", type=int, default=31, help="timed rounds, an odd number; default: 31")
    add("--seconds", type=float, default=7.0, help="how long plain decoding takes in the picture; default: 7")
    add("--out", type=Path, default=ROOT / "docs", help="folder of recording.svg and recording-narrow.svg")
    return parser


def origin(llm: LLM, each: list[list[Take]], other_load: float | None) -> str:
    """Describe the origin of the picture. each: the runs of plain and of speculative decoding, sorted by time.
    other_load: share of the machine's time that other processes used; None: unknown."""
    cpu = machine()
    command = " ".join(["python -m benchmarks.recording", *sys.argv[1:]])
    times = [
        f"{takes[0].name.lower()} {middle(takes).seconds * 1e3:.0f} ms "
        f"({takes[len(takes) // 4].seconds * 1e3:.0f} to {takes[-1 - len(takes) // 4].seconds * 1e3:.0f})"
        for takes in each
    ]
    parts = [
        f"{date.today()}, {cpu['cores']} cores of {cpu['cpu']} ({', '.join(cpu['vector'])}), {platform.system()}",
        f"slipstream {__version__}, {llm!r}".replace(str(smollm2_file()), SMOLLM2),
        f"command: {command}",
        f"medians of {len(each[0])} interleaved passes (quartiles), prompt included: {', '.join(times)}",
    ]
    if other_load is not None:
        parts.append(f"{other_load:.0%} of the machine's time went to other work")
    return "; ".join(parts).replace(f"{ROOT}/", "")


def middle(takes: list[Take]) -> Take:
    return takes[len(takes) // 2]


def main() -> int:
    options = parser().parse_args()
    if options.rounds < 1 or options.rounds % 2 == 0:
        print(f"error: rounds is {options.rounds}, must be an odd number", file=sys.stderr)
        return 2
    names = options.draft.split(",")
    note = f"{NOTES.get(names[0], 'drafts with ' + names[0])}, {options.draft_tokens} tokens per step at most"
    llm = LLM(SMOLLM2, executor=options.executor)
    prompt = llm.chat_prompt(f"{REQUEST}\n\n{TEXT}")
    draft = names if len(names) > 1 else names[0]
    other_processes = OtherProcesses()
    recorded = rounds(llm, prompt, draft, options.draft_tokens, note, options.rounds)
    share = other_processes.share()
    each = [sorted(takes, key=lambda take: take.seconds) for takes in zip(*recorded, strict=True)]
    if len({take.text for takes in each for take in takes}) > 1:
        print("error: the texts differ, so there is nothing to compare", file=sys.stderr)
        return 1
    chosen = [middle(takes) for takes in each]
    slowdown = max(1, round(options.seconds / chosen[0].seconds))
    recording = Recording(REQUEST, chosen, slowdown, origin(llm, each, share))
    for name, narrow in (("recording.svg", False), ("recording-narrow.svg", True)):
        path = options.out / name
        path.write_text(draw(recording, narrow))
        print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB")
    print(recording.origin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
