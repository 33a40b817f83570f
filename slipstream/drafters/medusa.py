"""Medusa: K heads on the target's last hidden state draft the next K positions at once (Cai et al. 2401.10774).

After a step, the token after the last accepted row is already known: the pending token. At that row, head 0 predicts
the first token after the pending token, head 1 the second, and so on, each independently of the others. Their
candidates form a tree of fixed shape (section 2.1.2): every node is "the candidate of rank r of head d", so a draft
takes one call of the heads.

The shape is the tree with the most expected tokens for the heads' measured accuracies (section 2.3.2). Its size gives
the most tokens per second at the target's costs. Nodes are chosen, not sampled: they are point masses, and verification
is lossless at every temperature.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.backends.table import backend_for_head
from slipstream.checkpoints.checkpoint import CheckpointName
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits, PrefixKeeper
from slipstream.core.params import Strict, check_integer, integer, number, option
from slipstream.core.sequence import Sequence
from slipstream.core.target import HEAD_HOST, Target, TargetOut, require
from slipstream.drafters.guard import MAX_NODES
from slipstream.errors import ParameterError
from slipstream.heads.medusa_format import fit, load_medusa
from slipstream.heads.medusa_heads import Accuracies, MedusaHeads, MedusaRuntime
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.trees import TreeShape, best_tree, optimal_tree
from slipstream.zoo import head_dir

_MOST_NODES = 64  # largest tree that is chosen here; the paper's trees have this size


@dataclass(frozen=True)
class MedusaDraftConfig(Strict):
    """tree      None: the optimal tree for the heads' accuracies, which the checkpoint names or which are assumed. Or a
    fixed tree: "4,2,1" or (4, 2, 1), the number of children at each depth ("1,1,1" is a chain), or a list of paths of
    ranks, [[0], [1], [0, 0]].
    nodes     largest number of draft tokens of an optimal tree; 0: the fastest number, at most 64.
    row_cost  with nodes=0: the cost of verifying each further row, as a share of a decode step.
    """

    tree: str | int | Seq[int] | Seq[Seq[int]] | None = None
    nodes: int = option(0, check=integer(0))
    row_cost: float = option(0.05, check=number(0.0, float("inf")))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes > MAX_NODES:
            raise ParameterError(f"nodes is {self.nodes}, but a step verifies at most {MAX_NODES}", fix="give fewer")
        if self.tree is not None and self.nodes:
            raise ParameterError("tree and nodes both set the shape of the draft", fix="give one of them")

    def read_tree(self) -> TreeShape | None:
        """Return the tree given by the option `tree`. Raises ParameterError."""
        if self.tree is None:
            return None
        try:
            wanted = [int(n) for n in self.tree.split(",")] if isinstance(self.tree, str) else self.tree
        except ValueError:
            raise ParameterError(
                f"tree is {self.tree!r}",
                fix="give the number of children at each depth, as in 4,2,1",
            ) from None
        if isinstance(wanted, int):
            wanted = (wanted,)
        if wanted and isinstance(wanted[0], int):
            for branches in wanted:
                check_integer("branches of a tree", branches, 1)
            return TreeShape.full(wanted)  # type: ignore[arg-type]
        return TreeShape.of_paths(wanted)  # type: ignore[arg-type]


def assume_accuracies(heads: int) -> Accuracies:
    """Return the accuracies that are assumed if none were measured: 0.6 for the first choice of head 0, 3/4 as much for
    each further head, and little for lower ranks."""
    return tuple(tuple(0.6 * 0.75**h * share for share in (1, 0.2, 0.1, 0.06, 0.04, 0.03)) for h in range(heads))


class MedusaDrafter(PrefixKeeper):
    """Drafts trees with Medusa heads, which are on `device`. vocab_size: width of the target's logits."""

    name = "medusa"
    traits = DrafterTraits(taps=(-1,), keeps_prefixes=True)

    def __init__(
        self,
        heads: MedusaRuntime,
        vocab_size: int,
        config: MedusaDraftConfig | None = None,
        device: torch.device | str = "cpu",
    ):
        self.heads, self.vocab_size, self.device = heads, vocab_size, torch.device(device)
        self.config = config or MedusaDraftConfig()
        self._fixed = self._check_tree(self.config.read_tree())
        c = heads.config
        # Heads that know few ids cannot have more ranks than ids.
        self._accuracies = tuple(row[: c.width] for row in (c.accuracies or assume_accuracies(c.heads))[: c.heads])
        self._top = 1 + max(self._fixed.ranks) if self._fixed else max(map(len, self._accuracies))
        self._shapes: dict[int, tuple[TreeShape, Tensor]] = {}  # by depth: see `_shape`
        self._states: dict[int, tuple[int, Tensor]] = {}  # sequence id -> (length, hidden state [d] of its last row)

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        depth = [0] * len(seqs)
        for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if seq.id in self._states and self._states[seq.id][0] == len(seq.tokens):  # state is current
                depth[b] = min(budget.depth, self.heads.config.heads)
        rows = [b for b in range(len(seqs)) if depth[b] > 0]
        if not rows:
            return Draft.empty(len(seqs), self.device)
        hidden = torch.stack([self._states[seqs[b].id][1] for b in rows])  # [R, d]
        logits = self.heads(hidden.to(self.heads.dtype))  # [R, K, draft_vocab]
        ids = self.heads.token_map[logits.topk(self._top, -1).indices].flatten(1)  # [R, K * top]
        parents: list[int] = []
        splits, tokens = [0], list[Tensor]()
        for most in depth:
            if most:
                tree, candidates = self._shape(most)
                tokens.append(ids[len(tokens), candidates])
                parents += tree.parents
            splits.append(len(parents))
        return Draft(torch.cat(tokens), parents, splits)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        """Copy the hidden state of each sequence's last accepted row, because the target overwrites it."""
        last = []
        for b, path in enumerate(verdict.path):
            pending = out.splits[b + 1] - (draft.splits[b + 1] - draft.splits[b]) - 1  # row of the last pending token
            last.append(pending + 1 + path[-1] if path else pending)
        kept = torch.stack([out.hidden[-1][row] for row in last])  # [B, d] a copy
        for b, seq in enumerate(seqs):
            self._states[seq.id] = len(seq.tokens), kept[b]

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _shape(self, depth: int) -> tuple[TreeShape, Tensor]:
        """Return the tree for drafts of at most this depth (the fixed tree, cut, or the optimal tree), and the index of
        each node among the [K * top] candidates of a row, int64 [n]."""
        if depth not in self._shapes:
            if self._fixed is not None:
                tree = self._fixed.cut(depth)
            elif self.config.nodes:
                tree = optimal_tree(self._accuracies, self.config.nodes, depth)
            else:
                tree = best_tree(self._accuracies, CostCurve.flat(self.config.row_cost), _MOST_NODES, depth)
            places = [(d - 1) * self._top + rank for d, rank in zip(tree.depths, tree.ranks, strict=True)]
            self._shapes[depth] = tree, torch.tensor(places, dtype=torch.int64, device=self.device)
        return self._shapes[depth]

    def _check_tree(self, tree: TreeShape | None) -> TreeShape | None:
        """Return `tree`. Raises ParameterError if these heads cannot fill the tree."""
        c = self.heads.config
        if tree is not None:
            ranks = max(tree.ranks, default=0)
            if not 0 < len(tree) <= MAX_NODES or tree.height > c.heads or ranks >= c.width:
                raise ParameterError(
                    f"the tree has {len(tree)} nodes, the depth {tree.height}, and {ranks} tokens of one head",
                    why=f"there are {c.heads} heads for {c.width} tokens, and a step verifies at most {MAX_NODES}",
                    fix="give a smaller tree",
                )
        return tree


def make(
    target: Target, *, head: CheckpointName | MedusaHeads | None = None, quantize: str | None = None, **options: Any
) -> MedusaDrafter:
    """Make the Medusa drafter, as `registry` requires. head: folder or hub id of the heads, or the heads themselves;
    None: the heads that ship for the embedded target. quantize: None or "none", "int8" (w8a8), "w8a16" or "w8a8" for
    the heads' weights on the native backend. options: as in `MedusaDraftConfig`. Raises LoadError, and PairError for
    heads of another target."""
    config = MedusaDraftConfig(**options)
    host = require(target.capabilities.head_host, target, HEAD_HOST, "drafter 'medusa'")
    if head is None:
        head = head_dir("medusa", host.runtime.checkpoint)
    fitted = fit(head if isinstance(head, MedusaHeads) else load_medusa(head), host)
    backend, settings = backend_for_head(None, host, quantize)
    heads: MedusaRuntime = backend.medusa(fitted, settings)
    return MedusaDrafter(heads, target.vocab_size, config, target.device)
