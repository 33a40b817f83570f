"""The planted faults. Each is a bug that a developer could write: a wrong row, a wrong neighbour, a random number used
twice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERIFY: dict[str, dict[str, Any]] = {
    "a rejected point mass may come again": {"draft": "suffix"},
    "siblings are tried against the first p": {"draft": "eagle3", "draft_options": {"shape": "tree"}},
    "block: weights above 1": {"rule": "block"},
}
"""For some faults, the options of `LLM` with which `slipstream verify` runs the faulty line. The default is the
embedded draft model."""


@dataclass(frozen=True)
class Mutant:
    """A fault: code `new` replaces code `old`, which occurs once in `module`.

    tests   test files below `tests/` that are expected to find the fault.
    verify  options of `LLM`, see `VERIFY`.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    verify: Mapping[str, Any]


WARP = ("core/test_warp.py", "core/test_sampling_parameters.py")
RULES = ("core/test_rules_exact.py", "core/test_rules.py", "core/test_step.py")
STEP = ("core/test_step.py", "test_llm.py", "engine/test_engine.py")
STOP = ("core/test_stop.py", "core/test_step.py", "test_llm.py")
DRAFTERS = ("drafters/test_conformance.py", "drafters/test_model.py")
ENGINE = ("engine/test_engine.py", "kv")

FAULTS: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, str]]] = {
    # what the distribution is
    ("core.warp", WARP): {
        "top-k keeps one more": ("_keep_first(probs, params.top_k)", "_keep_first(probs, params.top_k + 1)"),
        "top-k is not renormalised":
            ("probs.gather(-1, keep))\n    return kept / kept.sum(-1, keepdim=True)",
             "probs.gather(-1, keep))\n    return kept"),
        "the nucleus loses its last token":
            ("value.masked_fill(before >= top_p, 0.0)",
             "value.masked_fill((before + value >= top_p) & (before > 0), 0.0)"),
        "min-p is absolute":
            ("probs < params.min_p * probs.amax(-1, keepdim=True)",
             "probs < params.min_p * probs.amax(-1, keepdim=True).clamp(min=0.5)"),
        "presence counts each occurrence": ("count.clamp(max=1)", "count"),
        "repetition penalty forgets the prompt": ("for t in prompt.union(output) if", "for t in set(output) if"),
        "min_tokens holds for one token more":
            ("len(output) < params.min_tokens:", "len(output) <= params.min_tokens:"),
        "bad words are compared with the beginning":
            ("ends.get(tuple(recent))", "ends.get(tuple([*prompt, *output][:length]))"),
        "a bias reaches the first row only":
            ("x[:, torch.from_numpy(ids[:known])] +=", "x[:1, torch.from_numpy(ids[:known])] +="),
    },
    ("core.warp", (*WARP, *STEP)): {
        "the second request is not looked at": ("for s in seqs[1:]):", "for s in seqs[2:]):"),
        "histories without the draft tokens before":
            ("[*rows[draft.parents[i] + 1], draft.ids[i]]", "[*rows[0], draft.ids[i]]"),
    },
    # what is accepted
    ("core.rules", RULES): {
        "rare tokens of the residual are lost":
            ("(p - _take(draft.q, packed)).clamp_(min=0)",
             "torch.nn.functional.threshold(p - _take(draft.q, packed), 1e-3, 0.0)"),
        "after a rejection p itself": ("(p - _take(draft.q, packed)).clamp_(min=0)", "p.clone()"),
        "accepted a tenth too often": ("[p / q if q else", "[1.1 * p / q if q else"),
        "after an acceptance the row before":
            ("p[b] = probs[draft.splits[b] + b + 1 + node]", "p[b] = probs[draft.splits[b] + b + node]"),
        "q of the row before":
            ("_entries(draft.q, packed, x), strict", "_entries(draft.q, [max(0, i - 1) for i in packed], x), strict"),
        "a rejected point mass may come again":
            ("p.scatter(1, _take(draft.tokens, packed)[:, None], 0.0)", "p.clone()"),
        "siblings are tried against the first p":
            ("left = torch.stack([p[b] for b in again])", "left = probs[[draft.splits[b] + b for b in again]]"),
        "block: weights above 1":
            ("(w * P.gather(1, x)[:, 0] / q_x).clamp(max=1)", "w * P.gather(1, x)[:, 0] / q_x"),
    },
    ("core.rules", (*RULES, *STEP)): {
        "residuals of the neighbours":
            ("torch.stack([p[b] for b in rejected])", "torch.stack([p[b] for b in reversed(rejected)])"),
        "greedy rows of the first request":
            ("pick = picks[start + b + 1 + node]", "pick = picks[start + min(b, 1) + 1 + node]"),
    },
    # who gets which row
    ("core.step", (*STEP, "end_to_end/test_distribution.py")): {
        "the end of a text is half as likely after a draft token":
            ("probs, dead = distributions(logits, seqs, draft), set[int]()",
             "probs, dead = distributions(logits, seqs, draft), set[int]()\n"
             "        pending = {draft.splits[b] + b for b in range(len(seqs))}\n"
             "        for row in set(range(len(probs))) - pending:\n"
             "            probs[row, sorted(seqs[0].stop_ids)] /= 2\n"
             "            probs[row] /= probs[row].sum()"),
    },
    ("core.step", STEP): {
        "rows of kinds without the shift":
            ("for row in range(draft.splits[b] + b, draft.splits[b + 1] + b + 1)]",
             "for row in range(draft.splits[b] + min(b, 1), draft.splits[b + 1] + min(b, 1) + 1)]"),
        "random numbers of the prompt's end":
            ("[len(seq.tokens) for seq in seqs], counts)", "[seq.prompt for seq in seqs], counts)"),
        "log-probabilities of the neighbour":
            ("rows = [draft.splits[b] + b + 1 + node for node",
             "rows = [draft.splits[b] + min(b, 1) + 1 + node for node"),
    },
    # where a text ends
    ("core.stop", STOP): {
        "a stop id ends only the end of a step":
            ("if token in seq.stop_ids:", "if token in seq.stop_ids and i == len(run) - 1:"),
        "one token above max_tokens": ("len(seq.tokens) + i + 1 >= seq.limit", "len(seq.tokens) + i >= seq.limit"),
        "a stop string is looked for in the whole step":
            ("seq.stop_search.add(run[i])", "next(filter(None, map(seq.stop_search.add, run[i:])), None)"),
        "min_tokens counts steps for stop strings":
            ("seq.prompt + i + 1 >= seq.params.min_tokens", "seq.prompt + 1 >= seq.params.min_tokens"),
    },
    # random numbers
    ("core.dice", (*RULES, "core/test_random.py", *STEP)): {
        "verification draws the draft's numbers":
            ("stream.uniforms(VERIFY, position, 1 + count)", "stream.uniforms(DRAFT, position, 1 + count)"),
    },
    ("core.dice", ("core/test_random.py", *RULES)): {
        "one number accepts all draft tokens": ("self._column += 1", "self._column = 1"),
        "the number that rejected also chooses":
            ("torch.from_numpy(self._uniforms(0)).to(probs.device)",
             "torch.from_numpy(self._uniforms(min(1, self._column))).to(probs.device)"),
        "shared noise does not move":
            ("self._streams[b].gumbel(self._positions[b] + d, vocab)",
             "self._streams[b].gumbel(self._positions[b], vocab)"),
    },
    ("core.random", ("core/test_random.py", "test_llm.py")): {
        "seeds are lost": ("philox.key[:] = self.seed, purpose", "philox.key[:] = 0, purpose"),
    },
    ("core.plain", ("core/test_plain.py", "test_llm.py")): {
        "plain steps repeat a number":
            ("places = [[len(seq.tokens) + j for seq in seqs] for j in range(steps)]",
             "places = [[len(seq.tokens) for seq in seqs] for j in range(steps)]"),
    },
    # what q is
    ("core.draft", ("core/test_draft.py", *STEP)): {
        "q of the first requests":
            ("None if self.q is None or not nodes else self.q[index_rows(nodes)]",
             "None if self.q is None or not nodes else self.q[: len(nodes)]"),
    },
    ("drafters.chains", ("drafters/test_confidence.py",)): {
        "a draft ends where the drawn token is unlikely":
            ("seqs[b].params)\n                    if",
             "seqs[b].params)\n                    tops[b][-1] = float(probs[r, token])\n                    if"),
    },
    ("drafters.chains", DRAFTERS): {
        "all draft tokens share a number":
            ("len(seqs[b].tokens), depth + 1)[depth]", "len(seqs[b].tokens), depth + 1)[0]"),
        "q of the first request for all":
            ("drawn.probs[:most, r, : self.vocab_size]", "drawn.probs[:most, 0, : self.vocab_size]"),
        "q of the first request, token by token":
            ("distributions[b].append(probs[r])", "distributions[b].append(probs[0])"),
        "unlikely draft tokens are dropped":
            ("            chains[b] = Chain(chain[:most]",
             "            rare = [n for n in range(most) if probs is not None and float(probs[n, chain[n]]) < 0.05]\n"
             "            most = min([most, *rare])\n"
             "            chains[b] = Chain(chain[:most]"),
        "draft tokens of the first request's numbers":
            ("else seq.random.uniforms(DRAFT, len(seq.tokens), steps)",
             "else seqs[0].random.uniforms(DRAFT, len(seq.tokens), steps)"),
    },
    # requests side by side
    ("engine.engine", ENGINE): {
        "a preempted request keeps its count": ("seq.kv_len, seq.chunk_end = 0, None", "seq.chunk_end = None"),
    },
    ("engine.request_memory", ENGINE): {
        "one token more is kept for later":
            ("self._memory.keep(seq.id, seq.tokens[: seq.kv_len])",
             "self._memory.keep(seq.id, [*seq.tokens[: seq.kv_len], *seq.tokens[seq.kv_len :][:1]])"),
        "a prefix counts as read to its end":
            ("seq.kv_len = self._memory.begin(seq.id, seq.tokens, most)",
             "seq.kv_len = min(most, self._memory.begin(seq.id, seq.tokens, most) + 1)"),
    },
}  # fmt: skip
"""By (module, tests) and by name of the fault: the code, and the faulty code that replaces it."""

MUTANTS = tuple(
    Mutant(name, module, old, new, tests, VERIFY.get(name, {}))
    for (module, tests), faults in FAULTS.items()
    for name, (old, new) in faults.items()
)
