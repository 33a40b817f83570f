"""Generates training text with the target: prompts and the target's continuations.

A head predicts text of the target, so training on such text instead of the data raises the acceptance rate (EAGLE,
2401.15077, section 4.2; DistillSpec, 2310.08461, section 3). Speculative decoding is lossless either way.

The text is generated in shards. A shard is a function of (seed, index of the shard, number of missing tokens) and is
written atomically, so an interrupted regeneration continues where it stopped and gives the same result.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from itertools import compress
from pathlib import Path

import numpy as np

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.errors import ParameterError
from slipstream.llm import LLM, Completion
from slipstream.measure.loops import find_looping, measure_periodic_tail
from slipstream.tokens.tokenizer import Tokenizer
from slipstream.training.packing import Marked, TokenStream, write_masked
from slipstream.training.schedule import make_counter

MARK = "\ue000the user's message\ue000"
"""Stands for the user's message while the chat template is rendered."""
TURN = SamplingParams(temperature=1.0, min_p=0.03, max_tokens=160)
SHORTEST = 12
"""Minimum length of a user's message in characters. Shorter messages are dropped."""
ROUNDS = 8
LEAST = 16
"""Minimum number of prompts in a shard. The answers to fewer prompts may all end in loops by chance."""

Prompts = Callable[[np.random.Generator, int], list[list[int]]]
"""Function (random generator, count) that returns at most `count` prompts."""
Show = Callable[[Seq[Sequence]], None]
"""Called with all texts after each step."""


def make_prefixes(streams: list[TokenStream], lengths: tuple[int, int], longest: int) -> Prompts:
    """Return a function that draws prefixes of documents (`draw_prompts`), from sources in proportion to their size."""
    sizes = np.array([len(s.tokens) for s in streams], dtype=np.float64)

    def draw(rng: np.random.Generator, count: int) -> list[list[int]]:
        stream = streams[int(rng.choice(len(streams), p=sizes / sizes.sum()))]
        return draw_prompts(stream, rng, count, lengths, longest)

    return draw


def draw_prompts(
    stream: TokenStream, rng: np.random.Generator, count: int, lengths: tuple[int, int], longest: int
) -> list[list[int]]:
    """Draw prefixes of documents. A prefix ends at the start of an answer, and has at most `longest` tokens before it.

    In documents without answers a prefix has a random length between the two `lengths`. Half of these prefixes begin at
    the document's start and half at a random position, so that heads see text at every distance from the start."""
    low, high = lengths
    prompts: list[list[int]] = []
    for _ in range(100 * count):
        d = int(rng.integers(len(stream.starts) - 1))
        start, end = int(stream.starts[d]), int(stream.starts[d + 1])
        mask = None if stream.mask is None else np.asarray(stream.mask[start:end])
        if mask is not None and mask.any():
            begins = np.flatnonzero(np.diff(np.concatenate(([0], mask))) == 1)
            begin, stop = start, start + int(rng.choice(begins))
        else:
            length = int(rng.integers(low, high + 1))
            begin = start if rng.random() < 0.5 else int(rng.integers(start, end))
            stop = min(begin + length, end - 1)
        ids = stream.tokens[begin:stop].tolist()[-longest:]
        if len(ids) >= 2:
            prompts.append(ids)
        if len(prompts) == count:
            break
    if not prompts:
        raise ParameterError(
            "--regenerate found no prefix to continue",
            why="documents are too short",
            fix="give longer texts",
        )
    return prompts


def split_template(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of a chat template before a user's message, and after it up to the start of the answer."""
    talk = [{"role": "user", "content": MARK}]
    rendered = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return [tokenizer.encode(text, add_special_tokens=False) for text in rendered.partition(MARK)[::2]]


def make_self_prompts(llm: LLM, say: Callable[[str], None] = print) -> Prompts:
    """Return a function that lets a chat model write prompts for itself (Magpie, 2406.08464, section 2). The model
    continues its chat template where a user's message belongs; the prompt ends at the start of the answer. Messages
    that do not end, that loop, or that repeat another message are dropped. say: prints progress. Raises ParameterError
    for a target without a chat template."""
    tokenizer = llm.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ParameterError(
            "--self was given, but the target has no chat template",
            why="without a template, it is unknown where a user's message begins",
            fix="give --data, and --regenerate for text that the target writes",
        )
    start, end = split_template(tokenizer)

    def write(rng: np.random.Generator, count: int) -> list[list[int]]:
        rows, seen = list[list[int]](), set[str]()
        counts = make_counter("as the user, the target wrote", say, "messages")

        def show(seqs: Seq[Sequence]) -> None:
            counts(min(count - 1, len(rows) + sum(seq.finish is not None for seq in seqs)), count)

        for _ in range(ROUNDS):
            if len(rows) >= count:
                break
            params = [replace(TURN, seed=int(rng.integers(2**31))) for _ in range(count - len(rows))]
            for turn in _generate(llm, [start] * len(params), params, show):
                ids = [token for token in turn.token_ids if token not in llm.target.capabilities.eos_ids]
                text = turn.text.strip()
                if turn.finish_reason != "stop" or len(text) < SHORTEST or measure_periodic_tail(ids) or text in seen:
                    continue
                seen.add(text)
                rows.append([*start, *ids, *end])
        return rows

    return write


def _generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], show: Show) -> list[Completion]:
    seqs = [llm.sequence(*each) for each in zip(prompts, params, strict=True)]
    for _ in llm.decode(seqs):
        show(seqs)
    return [llm.completion(seq) for seq in seqs]


def continue_prompts(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], show: Show = lambda seqs: None
) -> list[Marked]:
    """Let the target continue prompts. Returns documents of prompt and answer, with the answer marked."""
    texts = zip(prompts, _generate(llm, prompts, params, show), strict=True)
    return [
        ([*done.prompt_token_ids, *done.token_ids], [False] * len(prompt) + [True] * len(done.token_ids))
        for prompt, done in texts
    ]


def regenerate(
    llm: LLM,
    prompts: Prompts,
    path: Path,
    total: int,
    new_tokens: int = 160,
    seed: int = 0,
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8, 1.0),
    shard_size: int = 512,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a stream of prompts and the target's answers, and return its path. Answers that loop are left out.

    total         number of tokens of all answers together
    new_tokens    most tokens of an answer
    temperatures  each answer is sampled at one of these temperatures, chosen at random
    say           called with (tokens of answers so far, total) after every step
    shard_size    largest number of prompts in a shard

    Raises ParameterError if all answers of a shard loop."""
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    parts, tokens, vocab_size = list[Path](), 0, llm.target.vocab_size

    def show(seqs: Seq[Sequence]) -> None:
        say(min(total - 1, tokens + sum(len(seq.output) for seq in seqs)), total)

    while tokens < total:
        shard = len(parts)
        part = path.with_name(f"{path.stem}-{shard:05d}.bin")
        if not part.is_file():
            rng = np.random.default_rng([seed, 17, shard])
            asked = prompts(rng, min(shard_size, max(LEAST, -(-(total - tokens) // new_tokens))))
            params = [
                SamplingParams(
                    temperature=float(rng.choice(temperatures)), max_tokens=new_tokens, seed=int(rng.integers(2**31))
                )
                for _ in asked
            ]
            texts = [
                (ids, mask)
                for ids, mask in continue_prompts(llm, asked, params, show)
                if not find_looping({0: list(compress(ids, mask or ()))})
            ]
            if not texts:
                raise ParameterError(
                    f"each of {len(asked)} answers of the target ends in a repetitive loop"
                    if asked
                    else "the target wrote no usable user message: each is unfinished, a repetition or a loop",
                    why="a head would learn only such text",
                    fix="give other --data, or another target",
                )
            write_masked(part, texts, None, vocab_size)
        mask = TokenStream.open(part, whole=True).mask
        tokens += 0 if mask is None else int(mask.sum())
        parts.append(part)
        say(tokens, total)

    kept: dict[tuple[int, ...], list[bool] | None] = {}
    for part in parts:
        for ids, marks in TokenStream.open(part, whole=True).documents():
            kept.setdefault(tuple(ids), marks)
    write_masked(path, ((list(ids), marks) for ids, marks in kept.items()), None, vocab_size)
    for part in parts:
        for suffix in (".bin", ".starts.npy", ".mask.bin"):
            part.with_suffix(suffix).unlink(missing_ok=True)
    return path
