"""Makes the requests of `slipstream verify`, with the user's sampling parameters and with further settings, and decodes
requests side by side, as on a busy server.

Faults hide in rare situations: at the end of a text, at the edge of a filter, in the history of a penalty, in a batch
of different requests. Each setting, a variant of the user's `SamplingParams`, makes one such situation frequent in the
texts of this model. The reference computes the distribution that each setting promises.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.theory.closed_forms import smallest
from slipstream.verify.reference import logits_of

END_CHANCE = 0.2
"""Mean probability of EOS in texts of the setting "EOS"."""
SHORT = 28
"""Largest number of tokens of a text with one of the `settings`."""
BATCH = 16
"""Number of requests in a batch whose requests all have the user's parameters."""
TOGETHER = 5
"""Number of requests in a batch of different requests."""
HISTORY, ENDS = ("penalties", "repeats"), ("EOS", "stop ids", "stop strings")
"""Settings in which a token depends on the draft tokens before it, and settings that end a text early. One text
of these settings shows little, so more texts are made with them."""
PREEMPTED_EVERY = 5
"""Number of steps after which a request is preempted."""


@dataclass(frozen=True)
class PanelRequest:
    """A request. name: names of prompt and setting. ids: token ids of the prompt."""

    name: str
    ids: Seq[int]
    params: SamplingParams


def lengths(draft_tokens: int) -> list[int]:
    return sorted({1, min(2, draft_tokens), draft_tokens})


def mix_lengths(draft_tokens: int) -> list[int]:
    """Return draft lengths of parallel requests: pairs of equal and of different lengths, and one without drafts."""
    return [draft_tokens, draft_tokens, 1, min(2, draft_tokens), 0, draft_tokens, min(3, draft_tokens)]


def across_kinds(prompts: PromptSet) -> list[Prompt]:
    """Return the prompts in the order of one prompt from each category in turn, so that the first are of all kinds."""
    seen: Counter[str] = Counter()
    places = []
    for prompt in prompts.prompts:
        places.append(seen[prompt.category])
        seen[prompt.category] += 1
    return [prompt for _, prompt in sorted(zip(places, prompts.prompts, strict=True), key=lambda pair: pair[0])]


def settings(llm: LLM, base: SamplingParams, prompts: Seq[Seq[int]], texts: Seq[Seq[int]]) -> dict[str, SamplingParams]:
    """Return name -> parameters, derived from `base`. texts: the target's own texts after the prompts, from which
    frequent tokens, a stop string and a bias for EOS are taken."""
    short = replace(base, max_tokens=min(base.max_tokens, SHORT), logprobs=None, stop=())
    # Some encoder-decoders force the first or the last token. If that token is forbidden, no token is possible.
    forced = [{text[place] for text in texts if text} for place in (0, -1)]
    ends = llm.target.capabilities.eos_ids.union(*(tokens for tokens in forced if len(tokens) == 1))
    counts = Counter(token for text in texts for token in text if token not in ends)
    frequent = [token for token, _ in counts.most_common(4)]
    pairs = [
        pair
        for pair, _ in Counter(pair for text in texts for pair in pairwise(text) if pair[1] not in ends).most_common(2)
    ]
    changes_of: dict[str, JsonObject] = {
        "top-k": {"top_k": 4},
        "top-p": {"top_p": 0.6},
        "min-p": {"min_p": 0.08},
        "all filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": min(100.0, 1.5 * base.temperature)},
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.5, "logprobs": 1},
        "repeats": {"frequency_penalty": 0.8, "presence_penalty": -2.0},
        "stop ids": {"stop_token_ids": tuple(frequent[:3]), "min_tokens": 3},
        "bad words": {
            "bad_words": (*((token,) for token in frequent[3:]), *pairs),
            "logit_bias": dict.fromkeys(frequent[:2], 1.5),
        },
    }
    bias = _end_bias(llm, prompts, texts)
    if bias is not None:
        changes_of["EOS"] = {"logit_bias": dict.fromkeys(llm.target.capabilities.eos_ids, bias), "logprobs": 0}
    strings = _frequent_strings(llm, texts)
    if strings:
        changes_of["stop strings"] = {"stop": strings, "min_tokens": 6}
    variants = {name: replace(short, **changes) for name, changes in changes_of.items()}
    return {name: params for name, params in variants.items() if _possible(llm, prompts[0], params)}


def _possible(llm: LLM, prompt: Seq[int], params: SamplingParams) -> bool:
    """Return True if some token remains possible under these parameters, which include what the user forbids."""
    try:
        llm.sequence(list(prompt), params)
    except ParameterError:
        return False
    return True


def _end_bias(llm: LLM, prompts: Seq[Seq[int]], texts: Seq[Seq[int]]) -> float | None:
    """Find the bias that gives EOS the mean probability `END_CHANCE` over some texts; None without EOS."""
    ends = list(llm.target.capabilities.eos_ids)
    if not ends:
        return None
    odds = []
    for prompt, text in list(zip(prompts, texts, strict=True))[:3]:
        for logits in logits_of(llm.target, prompt, text[:SHORT]):
            weights = np.exp(logits - logits.max())
            mass = weights[ends].sum()
            odds.append(float(np.log(mass / (weights.sum() - mass))))

    def enough(bias: float) -> bool:
        return bool(np.mean(1 / (1 + np.exp(-np.clip(np.array(odds) + bias, -700, 700)))) >= END_CHANCE)

    return smallest(enough, -100.0, 100.0)  # range of `logit_bias`


def _frequent_strings(llm: LLM, texts: Seq[Seq[int]]) -> tuple[str, ...]:
    """Return strings that texts of this model often contain: one within a token, and two that span tokens."""
    if llm.tokenizer is None:
        return ()
    pieces = [[llm.text_of([token]) for token in text] for text in texts]
    within = Counter(piece.strip()[:2] for text in pieces for piece in text)
    across = Counter(one[-1:] + other[:1] for text in pieces for one, other in pairwise(text))
    known = {piece for text in pieces for piece in text}
    borders = [s for s, _ in across.most_common() if len(s) > 1 and not any(s in piece for piece in known)]
    strings = [next((s for s, _ in within.most_common() if len(s) > 1), ""), *borders[:2]]
    return tuple(dict.fromkeys(string for string in strings if string))


def panel(
    names: Seq[str], prompts: Seq[Seq[int]], each: Mapping[str, SamplingParams], times: int, lengths: Seq[int]
) -> list[PanelRequest]:
    """Make `times` requests with the parameters of each setting (`each`: name -> parameters), mixed, with the prompts
    in turn. Two neighbours share prompt and setting. lengths: largest numbers of draft tokens, used in turn."""
    requests: list[PanelRequest] = []
    pairs = [(setting, min(2, times - done)) for done in range(0, times, 2) for setting in each.items()]
    for i, at in enumerate(np.random.default_rng(0).permutation(len(pairs)).tolist()):
        ((setting, params), count), prompt = pairs[at], i % len(prompts)
        for _ in range(count):
            settings = replace(params, draft_tokens=lengths[len(requests) % len(lengths)])
            requests.append(PanelRequest(", ".join(filter(None, (names[prompt], setting))), prompts[prompt], settings))
    return requests


def among(each: Mapping[str, SamplingParams], names: Seq[str]) -> dict[str, SamplingParams]:
    """Return the settings with these names; names that do not exist are left out."""
    return {name: params for name, params in each.items() if name in names}


def continue_requests(requests: Seq[PanelRequest], outputs: Seq[Seq[int]], longest: int) -> list[PanelRequest]:
    """Make requests whose prompts are earlier prompts and outputs, as in the next turn of a conversation. longest:
    largest number of tokens of a prompt."""
    prompts = [[*one.ids, *output, *one.ids[:1]] for one, output in zip(requests, outputs, strict=True)]
    return [
        PanelRequest(f"{one.name}, continued", prompt, one.params)
        for one, prompt in zip(requests, prompts, strict=True)
        if len(prompt) + one.params.max_tokens <= longest
    ]


def cross_requests(requests: Seq[PanelRequest], outputs: Seq[Seq[int]], block: int) -> list[PanelRequest]:
    """Make requests whose prompt begins like one earlier text and continues like another, as in prompts made of common
    parts. The prefix cache has blocks (of `block` tokens) of both texts, and must not join them."""
    texts = [[*one.ids, *output] for one, output in zip(requests, outputs, strict=True)]
    crossed = []
    for one, own, other in zip(requests, texts, [*texts[-2:], *texts], strict=False):  # neighbouring texts are alike
        if len(own) >= 2 * block and len(other) > block and own[:block] != other[:block]:
            crossed.append(replace(one, name=f"{one.name}, crossed", ids=[*other[:block], *own[block:]]))
    return crossed


def together(
    llm: LLM, drafter: Drafter | None, requests: Seq[PanelRequest], streams: Iterator[Stream] | None, batch: int
) -> list[Sequence]:
    """Decode requests as a busy server does: requests join one by one, reuse the KV cache of earlier texts with the
    same beginning, and some are preempted. streams: random numbers of each request; None: from its parameters.
    Raises the error of a failed request."""
    llm.use(drafter)
    before, llm.max_batch = llm.max_batch, batch
    engine = llm.engine()
    llm.max_batch = before
    seqs = [llm.sequence(list(request.ids), request.params) for request in requests]
    for seq, stream in zip(seqs, streams or (), strict=False):
        seq.random = stream
    coming = iter(seqs)
    try:
        for seq in islice(coming, 2):
            engine.add(seq)
        while engine.unfinished:
            for seq in engine.step():
                if seq.error is not None:
                    raise seq.error
            for seq in islice(coming, 1 if engine.unfinished and engine.stats.steps % 2 else 2):
                engine.add(seq)
            if engine.stats.steps % PREEMPTED_EVERY == 0 and engine.running > 1:
                engine.preempt()
    finally:
        for seq in seqs:
            engine.abort(seq)
    return seqs
