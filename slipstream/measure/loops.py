"""Texts that repeat themselves. A small model, decoded greedily, often ends in a loop; a loop is easy to draft, so its
speed-up says little about other text."""

from collections.abc import Mapping, Sequence as Seq

PERIODS, TURNS = 64, 3
"""Longest period that is looked for, and how often it must occur."""
SHORTEST = 8
"""A shorter tail is no loop: "....." is not."""
LOOPING = 0.25
"""A text with a larger share of its tokens in a periodic tail is a looping one."""


def measure_periodic_tail(ids: Seq[int]) -> int:
    """Number of tokens at the end that repeat exactly with some period; 0 if there is no loop."""
    longest = 0
    for period in range(1, min(PERIODS, len(ids) // TURNS) + 1):
        same = 0
        while same + period < len(ids) and ids[-1 - same] == ids[-1 - same - period]:
            same += 1
        if same + period >= max(TURNS * period, SHORTEST):
            longest = max(longest, same + period)
    return longest


def measure_loops(texts: Mapping[int, Seq[int]]) -> float:
    """Share of the tokens of all texts that lie in a periodic tail; 0 without tokens."""
    return sum(map(measure_periodic_tail, texts.values())) / max(1, sum(map(len, texts.values())))


def find_looping(texts: Mapping[int, Seq[int]]) -> list[int]:
    """The keys of the looping texts."""
    return [key for key, ids in texts.items() if measure_periodic_tail(ids) > LOOPING * len(ids)]
