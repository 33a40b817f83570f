"""The faults. Each is a bug that somebody could write: a wrong row, a wrong neighbour, a random number used twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL: dict[str, Any] = {}
"""`slipstream verify` as it is, which checks the embedded draft model."""
SUFFIX: dict[str, Any] = {"draft": "suffix"}
TREE: dict[str, Any] = {"draft": "eagle3", "draft_options": {"shape": "tree"}}
BLOCK: dict[str, Any] = {"rule": "block"}


@dataclass(frozen=True)
class Mutant:
    """`new` in place of `old`, which stands once in `module`.

    tests   test files that are expected to find it, below `tests/`.
    verify  options of `LLM` under which `slipstream verify` uses the line at all.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    verify: Mapping[str, Any] = field(default_factory=dict)


WARP = ("core/test_warp.py", "core/test_sampling_parameters.py", "verify/test_reference.py")
RULES = ("core/test_rules_exact.py", "core/test_rules.py", "core/test_step.py")
STEP = ("core/test_step.py", "test_llm.py", "engine/test_engine.py")
STOP = ("core/test_stop.py", "core/test_step.py", "test_llm.py")
DRAFTERS = ("drafters/test_conformance.py", "drafters/test_model.py")
ENGINE = ("engine/test_engine.py", "kv")

MUTANTS = (
    # --- core.warp: what the distribution is
    Mutant(
        "top-k keeps one more",
        "core.warp",
        "_keep_first(probs, params.top_k)",
        "_keep_first(probs, params.top_k + 1)",
        WARP,
    ),
    Mutant(
        "top-k is not renormalised",
        "core.warp",
        "probs.gather(-1, keep))\n    return kept / kept.sum(-1, keepdim=True)",
        "probs.gather(-1, keep))\n    return kept",
        WARP,
    ),
    Mutant(
        "the nucleus loses its last token",
        "core.warp",
        "value.masked_fill(before >= top_p, 0.0)",
        "value.masked_fill((before + value >= top_p) & (before > 0), 0.0)",
        WARP,
    ),
    Mutant(
        "min-p is absolute",
        "core.warp",
        "probs < params.min_p * probs.amax(-1, keepdim=True)",
        "probs < params.min_p * probs.amax(-1, keepdim=True).clamp(min=0.5)",
        WARP,
    ),
    Mutant("presence counts each occurrence", "core.warp", "count.clamp(max=1)", "count", WARP),
    Mutant(
        "repetition penalty forgets the prompt",
        "core.warp",
        "for t in (*prompt, *output) if",
        "for t in output if",
        WARP,
    ),
    Mutant(
        "min_tokens holds for one token more",
        "core.warp",
        "len(output) < params.min_tokens:",
        "len(output) <= params.min_tokens:",
        WARP,
    ),
    Mutant(
        "bad words are compared with the beginning",
        "core.warp",
        "list(recent[len(recent) - len(head) :]) == head",
        "list(recent[: len(head)]) == head",
        WARP,
    ),
    Mutant("a bias reaches the first row only", "core.warp", "x[:, ids[:known]] +=", "x[:1, ids[:known]] +=", WARP),
    Mutant(
        "the second request is not looked at", "core.warp", "for s in seqs[1:]):", "for s in seqs[2:]):", (*WARP, *STEP)
    ),
    Mutant(
        "histories without the draft tokens before",
        "core.warp",
        "[*rows[draft.parents[i] + 1], draft.ids[i]]",
        "[*rows[0], draft.ids[i]]",
        (*WARP, *STEP),
    ),
    # --- core.rules: what is accepted
    Mutant(
        "rare tokens of the residual are lost",
        "core.rules",
        "(p - _taken(draft.q, packed)).clamp_(min=0)",
        "torch.nn.functional.threshold(p - _taken(draft.q, packed), 1e-3, 0.0)",
        RULES,
    ),
    Mutant(
        "after a rejection p itself", "core.rules", "(p - _taken(draft.q, packed)).clamp_(min=0)", "p.clone()", RULES
    ),
    Mutant("accepted a tenth too often", "core.rules", "[p / q if q else", "[1.1 * p / q if q else", RULES),
    Mutant(
        "after an acceptance the row before",
        "core.rules",
        "p[b] = probs[draft.splits[b] + b + 1 + node]",
        "p[b] = probs[draft.splits[b] + b + node]",
        RULES,
    ),
    Mutant(
        "residuals of the neighbours",
        "core.rules",
        "torch.stack([p[b] for b in rejected])",
        "torch.stack([p[b] for b in reversed(rejected)])",
        (*RULES, *STEP),
    ),
    Mutant(
        "q of the row before",
        "core.rules",
        "_entries(draft.q, packed, x), strict",
        "_entries(draft.q, [max(0, i - 1) for i in packed], x), strict",
        RULES,
    ),
    Mutant(
        "a rejected point mass may come again",
        "core.rules",
        "p.scatter(1, _taken(draft.tokens, packed)[:, None], 0.0)",
        "p.clone()",
        RULES,
        SUFFIX,
    ),
    Mutant(
        "siblings are tried against the first p",
        "core.rules",
        "left = torch.stack([p[b] for b in again])",
        "left = probs[[draft.splits[b] + b for b in again]]",
        RULES,
        TREE,
    ),
    Mutant(
        "block: weights above 1",
        "core.rules",
        "(w * P.gather(1, x)[:, 0] / q_x).clamp(max=1)",
        "w * P.gather(1, x)[:, 0] / q_x",
        RULES,
        BLOCK,
    ),
    Mutant(
        "greedy rows of the first request",
        "core.rules",
        "pick = picks[start + b + 1 + node]",
        "pick = picks[start + min(b, 1) + 1 + node]",
        (*RULES, *STEP),
    ),
    # --- core.step: who gets which row
    Mutant(
        "the end of a text is half as likely after a draft token",
        "core.step",
        "probs, dead = distributions(logits, seqs, draft), set[int]()",
        "probs, dead = distributions(logits, seqs, draft), set[int]()\n"
        "        pending = {draft.splits[b] + b for b in range(len(seqs))}\n"
        "        for row in set(range(len(probs))) - pending:\n"
        "            probs[row, sorted(seqs[0].stop_ids)] /= 2\n"
        "            probs[row] /= probs[row].sum()",
        (*STEP, "end_to_end/test_distribution.py"),
    ),
    Mutant(
        "rows of kinds without the shift",
        "core.step",
        "for row in range(draft.splits[b] + b, draft.splits[b + 1] + b + 1)]",
        "for row in range(draft.splits[b] + min(b, 1), draft.splits[b + 1] + min(b, 1) + 1)]",
        STEP,
    ),
    Mutant(
        "random numbers of the prompt's end",
        "core.step",
        "[len(seq.tokens) for seq in seqs], counts)",
        "[seq.prompt for seq in seqs], counts)",
        STEP,
    ),
    Mutant(
        "log-probabilities of the neighbour",
        "core.step",
        "rows = [draft.splits[b] + b + 1 + node for node",
        "rows = [draft.splits[b] + min(b, 1) + 1 + node for node",
        STEP,
    ),
    # --- core.stop: where a text ends
    Mutant(
        "a stop id ends only the end of a step",
        "core.stop",
        "if token in seq.stop_ids:",
        "if token in seq.stop_ids and i == len(run) - 1:",
        STOP,
    ),
    Mutant(
        "one token above max_tokens",
        "core.stop",
        "len(seq.tokens) + i + 1 >= seq.limit",
        "len(seq.tokens) + i >= seq.limit",
        STOP,
    ),
    Mutant(
        "a stop string is looked for in the whole step",
        "core.stop",
        "[*seq.output, *run[: i + 1]]",
        "[*seq.output, *run]",
        STOP,
    ),
    Mutant(
        "min_tokens counts steps for stop strings",
        "core.stop",
        "len(seq.output) + i + 1 >= seq.params.min_tokens",
        "len(seq.output) + 1 >= seq.params.min_tokens",
        STOP,
    ),
    # --- core.dice and core.random: random numbers
    Mutant(
        "verification draws the draft's numbers",
        "core.dice",
        "stream.uniforms(VERIFY, position, 1 + count)",
        "stream.uniforms(DRAFT, position, 1 + count)",
        (*RULES, "core/test_dice.py", "core/test_random.py", *STEP),
    ),
    Mutant(
        "one number accepts all draft tokens",
        "core.dice",
        "self._column += 1",
        "self._column = 1",
        ("core/test_dice.py", *RULES),
    ),
    Mutant(
        "the number that rejected also chooses",
        "core.dice",
        "torch.from_numpy(self._uniforms(0)).to(probs.device)",
        "torch.from_numpy(self._uniforms(min(1, self._column))).to(probs.device)",
        ("core/test_dice.py", *RULES),
    ),
    Mutant(
        "all draft tokens share a number",
        "drafters.chains",
        "len(seqs[b].tokens), depth + 1)[depth]",
        "len(seqs[b].tokens), depth + 1)[0]",
        DRAFTERS,
    ),
    Mutant(
        "shared noise does not move",
        "core.dice",
        "self._streams[b].gumbel(self._positions[b] + d, vocab)",
        "self._streams[b].gumbel(self._positions[b], vocab)",
        ("core/test_dice.py", *RULES),
    ),
    Mutant(
        "seeds are lost",
        "core.random",
        "philox.key[:] = self.seed, purpose",
        "philox.key[:] = 0, purpose",
        ("core/test_random.py", "test_llm.py"),
    ),
    Mutant(
        "plain steps repeat a number",
        "core.plain",
        "places = [[len(seq.tokens) + j for seq in seqs] for j in range(steps)]",
        "places = [[len(seq.tokens) for seq in seqs] for j in range(steps)]",
        ("core/test_plain.py", "test_llm.py"),
    ),
    # --- core.draft and drafters.chains: what q is
    Mutant(
        "q of the first requests",
        "core.draft",
        "None if self.q is None or not nodes else self.q[consecutive(nodes)]",
        "None if self.q is None or not nodes else self.q[: len(nodes)]",
        ("core/test_draft.py", *STEP),
    ),
    Mutant(
        "q of the first request for all",
        "drafters.chains",
        "drawn.probs[:most, r, : self.vocab_size]",
        "drawn.probs[:most, 0, : self.vocab_size]",
        DRAFTERS,
    ),
    Mutant(
        "q of the first request, token by token",
        "drafters.chains",
        "distributions[b].append(probs[r])",
        "distributions[b].append(probs[0])",
        DRAFTERS,
    ),
    Mutant(
        "unlikely draft tokens are dropped",
        "drafters.chains",
        "            chains[b] = Chain(chain[:most]",
        "            rare = [n for n in range(most) if probs is not None and float(probs[n, chain[n]]) < 0.05]\n"
        "            most = min([most, *rare])\n"
        "            chains[b] = Chain(chain[:most]",
        DRAFTERS,
    ),
    Mutant(
        "draft tokens of the first request's numbers",
        "drafters.chains",
        "else seq.random.uniforms(DRAFT, len(seq.tokens), steps)",
        "else seqs[0].random.uniforms(DRAFT, len(seq.tokens), steps)",
        DRAFTERS,
    ),
    # --- engine: requests side by side
    Mutant(
        "a preempted request keeps its count",
        "engine.engine",
        "seq.kv_len, seq.chunk_end = 0, None",
        "seq.chunk_end = None",
        ENGINE,
    ),
    Mutant(
        "one token more is kept for later",
        "engine.request_memory",
        "self._memory.keep(seq.id, seq.tokens[: seq.kv_len])",
        "self._memory.keep(seq.id, [*seq.tokens[: seq.kv_len], *seq.tokens[seq.kv_len :][:1]])",
        ENGINE,
    ),
    Mutant(
        "a prefix counts as read to its end",
        "engine.request_memory",
        "seq.kv_len = self._memory.begin(seq.id, seq.tokens, most)",
        "seq.kv_len = min(most, self._memory.begin(seq.id, seq.tokens, most) + 1)",
        ENGINE,
    ),
)
