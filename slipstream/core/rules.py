"""`verify` decides which draft tokens are accepted, and which token follows. It is a pure function of the draft, the
target's distributions, a rule and a source of random choices.

Every rule emits tokens with exactly the distribution of the target alone:

    greedy      temperature 0 only: the longest path that follows the target's argmax
    rejection   accept x with probability min(1, p(x)/q(x)); on rejection p becomes norm((p - q)+) and the next
                sibling is tried (Leviathan et al. 2211.17192, appendix A.1; Chen et al. 2302.01318, theorem 1;
                trees: SpecInfer 2305.09781, section 4.3, with each sibling's own conditional q as in Sequoia
                2402.12374, section 3.2). Without q a draft token x is accepted with p(x), else x is removed from p
    block       decide on whole prefixes of a chain jointly (Sun et al. 2403.10444, algorithm 2)
    coupled     the target picks a token at every node with noise keyed by (seed, position), and draft tokens that equal
                it are accepted; target and seed alone determine the text (Gumbel coupling: Daliri et al. 2408.07978)

Distributions are float64 [B + N, V], packed like `TargetOut.logits`: sequence b has the row of its last pending token
at `splits[b] + b`, and the row of packed node i at `i + b + 1`.
"""

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.core.dice import Dice
from slipstream.core.draft import Decision, Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.errors import RuleError, did_you_mean

Decide = Callable[[Draft, Tensor, Dice], Decision]


@dataclass(frozen=True)
class Rule:
    """A way to decide on draft tokens, with its properties.

    tokenwise    True if the token at a node has the target's distribution, given that the node was reached. False for
                 `block`, which decides on a chain as a whole. `slipstream verify` tests single positions of a step only
                 under tokenwise rules.
    coupled      True if the target picks tokens with noise keyed by (seed, position), which drafters share. Drafts then
                 do not change the text.
    greedy_only  True if the rule is for temperature 0 only.
    """

    name: str
    decide: Decide
    tokenwise: bool = False
    coupled: bool = False
    greedy_only: bool = False


RULES: dict[str, Rule] = {}
"""Every rule by name; the tests of exactness run over all of them."""


def _rule(decide: Decide, tokenwise: bool = True, **traits: bool) -> Decide:
    """Register the function as the rule of its name. `settings.RULES` lists the names without importing torch."""
    RULES[decide.__name__] = Rule(decide.__name__, decide, tokenwise, **traits)
    return decide


def verify(draft: Draft, probs: Tensor, rule: Rule, dice: Dice) -> Verdict:
    """Return the verdict for every sequence of the batch. Stop conditions are applied later: see `stop`."""
    return _verdict(draft, rule.decide(draft, probs, dice))


def follow(draft: Draft, picks: Seq[int]) -> Verdict:
    """Return the verdict of every rule at temperature 0. picks: the target's own token at each packed row."""
    return _verdict(draft, _follow(draft, picks))


def _verdict(draft: Draft, decision: Decision) -> Verdict:
    path, following = decision
    return Verdict(path, following, finish=[None] * draft.batch, cut=[False] * draft.batch)


def check_params(rule: Rule, params: SamplingParams) -> None:
    """Raise RuleError if the rule cannot verify a request with these parameters."""
    if rule.greedy_only and not params.greedy and params.top_k != 1:
        raise _not_greedy()


def _not_greedy() -> RuleError:
    return RuleError(
        "rule 'greedy' was given a distribution that is not a point mass",
        why="it follows the most likely token and would never sample another",
        fix="set temperature=0, or use rule='rejection'",
    )


@partial(_rule, greedy_only=True)
def greedy(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    top = probs.max(-1)
    if bool((top.values < 1).any()):
        raise _not_greedy()
    return _follow(draft, top.indices.tolist())


@partial(_rule, coupled=True)
def coupled(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    owner, depth = [], []  # sequence and depth of each packed row
    for b in range(draft.batch):
        below = draft.depths[draft.splits[b] : draft.splits[b + 1]]
        depth += [0, *below]
        owner += [b] * (1 + len(below))
    return _follow(draft, dice.pick(probs, owner, depth).tolist())


def _follow(draft: Draft, picks: Seq[int]) -> Decision:
    """Walk down each tree while some child is the token that the target picked at its parent.

    picks: the target's token at each packed row. Used by rules whose picks do not depend on the draft tokens.
    """
    paths, following = [], []
    for b in range(draft.batch):
        start, children = draft.splits[b], draft.children(b)
        node, path = -1, []
        while True:
            pick = picks[start + b + 1 + node]
            node = next((c for c in children.get(node, ()) if draft.ids[start + c] == pick), -1)
            if node < 0:
                break
            path.append(node)
        paths.append(path)
        following.append(pick)
    return paths, following


@_rule
def rejection(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    """All sequences walk down their trees together: each iteration tries one draft token of each sequence.

    If the token is accepted, the sequence continues with the distribution in its node's row, which is unchanged. So the
    acceptance probabilities of all first children are computed at once, and a distribution is changed only after a
    rejection: once for a chain of any length.
    """
    B = draft.batch
    trees = [draft.children(b) for b in range(B)]
    first = _chances(draft, probs, draft.parent_rows, range(len(draft))) if len(draft) else []  # [N]
    paths: list[list[int]] = [[] for _ in range(B)]
    p = [probs[draft.splits[b] + b] for b in range(B)]  # [V] each: at a sequence's node, after rejections there
    untried = [iter(tree.get(-1, ())) for tree in trees]  # children of that node
    trial = {b: node for b in range(B) if (node := next(untried[b], None)) is not None}
    chances = {b: first[draft.splits[b] + node] for b, node in trial.items()}
    while trial:
        accepted = dice.accept([chances.get(b, 0.0) for b in range(B)])
        rejected = {b: node for b, node in trial.items() if not accepted[b]}
        for b, node in trial.items():
            if accepted[b]:
                paths[b].append(node)
                p[b] = probs[draft.splits[b] + b + 1 + node]
                untried[b] = iter(trees[b].get(node, ()))
        if rejected:
            packed = [draft.splits[b] + node for b, node in rejected.items()]
            for b, rest in zip(rejected, _without(draft, torch.stack([p[b] for b in rejected]), packed), strict=True):
                p[b] = rest
        trial = {b: node for b in trial if (node := next(untried[b], None)) is not None}
        chances = {b: first[draft.splits[b] + node] for b, node in trial.items() if b not in rejected}
        again = [b for b in trial if b in rejected]
        if again:
            packed = [draft.splits[b] + trial[b] for b in again]
            left = torch.stack([p[b] for b in again])  # [F, V]
            chances |= zip(again, _chances(draft, left, range(len(again)), packed), strict=True)
    return paths, dice.choose(torch.stack(p) if len(draft) else probs).tolist()


def _chances(draft: Draft, probs: Tensor, rows: Seq[int], packed: Seq[int]) -> list[float]:
    """Return p/q of the packed nodes. rows: for each node, the row of `probs` that has its p."""
    x = [draft.ids[i] for i in packed]
    p_x = _entries(probs, rows, x)
    if draft.q is None:
        return p_x
    # A token that was drawn has q > 0. For a token with q = 0, return inf or NaN, as a division of tensors does.
    return [p / q if q else p * math.inf for p, q in zip(p_x, _entries(draft.q, packed, x), strict=True)]


def _entries(table: Tensor, rows: Seq[int], columns: Seq[int]) -> list[float]:
    """Return single entries of a [R, V] table."""
    if table.device.type == "cpu":  # numpy takes a third of the time
        return table.numpy()[rows, columns].tolist()  # type: ignore[no-any-return]
    index = torch.tensor([list(rows), list(columns)], device=table.device)
    return table[index[0], index[1]].tolist()  # type: ignore[no-any-return]


def _without(draft: Draft, p: Tensor, packed: Seq[int]) -> Tensor:
    """Return norm((p - q)+), [F, V], for the distributions p [F, V]. packed: the node that was rejected in each."""
    if draft.q is None:
        return _normalise(p.scatter(1, _take(draft.tokens, packed)[:, None], 0.0), p)
    return _normalise((p - _take(draft.q, packed)).clamp_(min=0), p)


def _take(table: Tensor, rows: Seq[int]) -> Tensor:
    """Return table[rows]; for one row, which is the usual case, without a copy."""
    return table[rows[0] : rows[0] + 1] if len(rows) == 1 else table[torch.tensor(rows, device=table.device)]


def _normalise(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Divide the rows of `mass` [B, V] by their sums. A row without mass means p == q up to rounding. Its rejection has
    probability 0, and the row of `otherwise` keeps the arithmetic finite."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, otherwise)


@partial(_rule, tokenwise=False)
def block(draft: Draft, probs: Tensor, dice: Dice) -> Decision:
    """Chains only. With P_i the target's distribution after i draft tokens, Q_i the draft's for token i and w_i =
    min(1, w_{i-1} * P_{i-1}(x_i) / Q_i(x_i)), the prefix of i draft tokens is accepted with probability

        h_i = Z_i / (Z_i + 1 - w_i),  Z_i = sum (w_i P_i - Q_{i+1})+        and h_gamma = w_gamma.

    The longest accepted prefix is kept, and the next token is drawn from norm((w_i P_i - Q_{i+1})+), or from P_gamma if
    the whole chain is accepted (2403.10444, algorithm 2)."""
    if not draft.is_chain or draft.acceptable is not None:
        raise RuleError(
            "rule 'block' was given a tree",
            why="it decides on whole prefixes of a chain; no proof covers branches",
            fix="use rule='rejection', or let the drafter propose chains",
        )
    B, device = draft.batch, probs.device
    start = torch.tensor(draft.splits[:B], device=device)  # [B]
    length = torch.tensor([draft.splits[b + 1] - draft.splits[b] for b in range(B)], device=device)  # [B]
    shift = torch.arange(B, device=device)  # [B] the distribution after i draft tokens is row start + shift + i
    w = torch.ones(B, dtype=probs.dtype, device=device)  # [B]
    P = probs[start + shift]  # [B, V]
    residual = _block_residual(draft, w, P, start, length > 0)  # [B, V]
    tau, rest = torch.zeros_like(start), residual
    for i in range(1, max(draft.splits[b + 1] - draft.splits[b] for b in range(B)) + 1):
        live = i <= length  # [B]
        node = torch.where(live, start + i - 1, 0)  # [B]
        x = draft.tokens[node][:, None]  # [B, 1]
        q_x = 1.0 if draft.q is None else draft.q[node].gather(1, x)[:, 0]
        w = torch.where(live, (w * P.gather(1, x)[:, 0] / q_x).clamp(max=1), w)
        P = torch.where(live[:, None], probs[node + shift + 1], P)
        more = i < length  # [B]
        residual = _block_residual(draft, w, P, start + i, more)
        Z = residual.sum(-1)  # [B]
        # Z + 1 - w is 0 only if w is 1 and P equals Q: then the next draft token is certainly accepted, too.
        h = torch.where(more, torch.where(Z + 1 - w > 0, Z / (Z + 1 - w), 1.0), w)
        accept = live & torch.tensor(dice.accept(h.tolist()), device=device)
        tau = torch.where(accept, i, tau)
        rest = torch.where(accept[:, None], residual, rest)
    following = dice.choose(_normalise(rest, P))
    columns = torch.stack([following, tau], 1).tolist()
    return [list(range(n)) for _, n in columns], [token for token, _ in columns]


def _block_residual(draft: Draft, w: Tensor, P: Tensor, node: Tensor, more: Tensor) -> Tensor:
    """Return [B, V]: (w P - Q)+ for sequences with `more` draft tokens, else P. Q: the distribution at packed node
    `node`."""
    if not len(draft):
        return P
    node = torch.where(more, node, 0)
    Q = torch.zeros_like(P).scatter_(1, draft.tokens[node][:, None], 1.0) if draft.q is None else draft.q[node]
    return torch.where(more[:, None], (w[:, None] * P - Q).clamp(min=0), P)


def find_rule(name: str) -> Rule:
    """Return the rule of that name. Raises RuleError, which suggests the nearest known name."""
    if not isinstance(name, str) or name not in RULES:
        raise RuleError(f"no rule is named {name!r}", fix=did_you_mean(name, RULES))
    return RULES[name]
