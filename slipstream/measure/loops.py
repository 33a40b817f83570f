"""Finds texts that repeat themselves. Greedy texts of a small model often end in a loop. Loops are easy to draft, so a
speed-up on them says little about other text."""

from collections.abc import Mapping, Sequence as Seq

PERIODS, TURNS = 64, 3
"""Longest period of a loop, in tokens, and number of times that the period must occur."""
SHORTEST = 8
"""Fewest tokens of a loop, so that "....." does not count as a loop."""
LOOPING = 0.25
"""A text counts as looping if more than this share of its tokens is in a periodic tail."""


def measure_periodic_tail(ids: Seq[int]) -> int:
    """Return the number of tokens at the end that repeat exactly with some period; 0 if there is no loop."""
    longest = 0
    for period in range(1, min(PERIODS, len(ids) // TURNS) + 1):
        same = 0
        while same + period < len(ids) and ids[-1 - same] == ids[-1 - same - period]:
            same += 1
        if same + period >= max(TURNS * period, SHORTEST):
            longest = max(longest, same + period)
    return longest


def measure_loops(texts: Mapping[int, Seq[int]]) -> float:
    """Return the share of the tokens of all texts that lie in a periodic tail; 0 without tokens."""
    return sum(map(measure_periodic_tail, texts.values())) / max(1, sum(map(len, texts.values())))


def find_looping(texts: Mapping[int, Seq[int]]) -> list[int]:
    """Return the keys of the looping texts."""
    return [key for key, ids in texts.items() if measure_periodic_tail(ids) > LOOPING * len(ids)]
