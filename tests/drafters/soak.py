"""Long token streams, and how much memory a store holds: for the tests that run stores over a million tokens."""

import gc
import sys
from collections.abc import Iterator

import numpy as np

MILLION = 1 << 20
PIECE = 1 << 17


def stream() -> Iterator[list[int]]:
    """A million tokens and a few, in pieces of `PIECE`, alternately like source text (frequent tokens, repeated
    idioms, passages copied from earlier text) and uniform over 8192."""
    rng = np.random.default_rng(1)
    idioms = [rng.integers(0, 400, size).tolist() for size in rng.integers(3, 12, 200)]
    for number in range(MILLION // PIECE):
        if number % 2:
            yield rng.integers(0, 8192, PIECE).tolist()
            continue
        out: list[int] = []
        words = np.minimum(rng.zipf(1.4, PIECE), 8000).tolist()
        choices, at = rng.random(PIECE).tolist(), 0
        while len(out) < PIECE:
            choice = choices[at]
            if choice < 0.1:
                out += idioms[int(choice * 10 * len(idioms))]
            elif choice < 0.12 and len(out) > 100:
                begin = int((choice - 0.1) * 50 * (len(out) - 60))
                out += out[begin : begin + 60]
            else:
                out.append(words[at])
            at += 1
        yield out[:PIECE]


def held(thing: object, besides: object = None) -> int:
    """Bytes of `thing` and of everything that only it holds: what the garbage collector finds from there, and the
    integers and tuples in it, shared ones once. `besides` and what only it holds are not counted."""
    seen = {id(besides)}
    todo, size = [thing], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return size
