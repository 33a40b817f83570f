"""EAGLE (Li et al. 2401.15077): a head reads the target's last hidden states, predicts the next ones, and drafts from
them.

After every step the head receives the true hidden states ("features") of the accepted tokens (section 4.1; EAGLE-3,
2503.01840, taps three layers). They overwrite the features that the head predicted while drafting. Drafting starts from
the last token and the feature of the token before it, then from the head's own output:

    chain   one token per depth; greedy chains, and chains sampled with only a temperature, take one call (see `chains`)
    tree    grown level by level along the most likely paths (EAGLE-2, 2406.16858, section 4); see `tree_growth`

A parallel head (P-EAGLE, 2602.01469) drafts chains in one pass, which has a mask row for each draft token but the
first.

One row of the head's input is a pair (feature of token i, token i + 1), at rotary position i.
"""

import copy
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.table import backend_for_head
from slipstream.checkpoints.checkpoint import CheckpointName
from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits
from slipstream.core.params import Strict, integer, option
from slipstream.core.sequence import Sequence
from slipstream.core.target import HEAD_HOST, Target, TargetOut, require
from slipstream.drafters.chains import Chains, MaskedPass, end_early, find_possible
from slipstream.drafters.confidence import ConfidentDrafts
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.tree_growth import ROOT, Tree, add_level, forest
from slipstream.errors import ParameterError, did_you_mean
from slipstream.heads.eagle_format import fit, load_eagle
from slipstream.heads.eagle_head import EagleHead, scatter
from slipstream.heads.eagle_rows import EagleRuntime, HeadDrafter
from slipstream.zoo import head_dir

log = logging.getLogger("slipstream")

SHAPES = ("chain", "tree")


@dataclass(frozen=True)
class EagleDraftConfig(Strict):
    """shape      "chain": one token for each depth; "tree": grown along the most likely paths (EAGLE-2).
    width      largest number of children of a node, and of nodes in a level that get children, in a tree.
    nodes      largest number of draft tokens in a tree.
    """

    shape: str = "chain"
    width: int = option(4, check=integer(1))
    nodes: int = option(12, check=integer(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in SHAPES:
            raise ParameterError(f"there is no draft shape {self.shape!r}", fix=did_you_mean(self.shape, SHAPES))
        if self.nodes > MAX_NODES:
            raise ParameterError(f"nodes is {self.nodes}, but a step verifies at most {MAX_NODES}", fix="give fewer")


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE head or MTP layers. runtime: the head. vocab_size: width of the target's logits. name:
    name in the registry, if `runtime` has other layers in place of an EAGLE head."""

    def __init__(self, runtime: EagleRuntime, vocab_size: int, config: EagleDraftConfig | None = None, name: str = ""):
        super().__init__(runtime)
        self.runtime, self.vocab_size = runtime, vocab_size
        self.config = config or EagleDraftConfig()
        self.name = name or ("eagle" if runtime.config.version == 1 else "eagle3")
        self.width, self.multi_step = vocab_size, True
        parallel = runtime.mask is not None
        self.traits = DrafterTraits(
            taps=runtime.config.taps, chains_only=self.config.shape == "chain", reads_prompts=True, keeps_prefixes=True,
            longest=runtime.config.depths if parallel else None,
            prices_rows=self.config.shape == "chain" and not parallel,  # one pass draws the whole chain
        )  # fmt: skip
        if parallel and self.config.shape == "tree":
            raise ParameterError(
                "shape is 'tree', but the head is a parallel head (P-EAGLE), which drafts only chains",
                why="a parallel head drafts all tokens in one pass, so no token can depend on the token before it",
                fix="leave shape out",
            )
        self._pass = MaskedPass(self, self._run_masked) if parallel else None
        self._confident = ConfidentDrafts()
        self._chains = Chains(self._pass, vocab_size) if self._pass else Chains(self, vocab_size, self._confident)
        self._state: tuple[list[int], Tensor] | None = None  # ids and outputs [R, d] of the last call of `extend`
        whole = torch.arange(vocab_size, device=runtime.device)
        reduced = runtime.config.reduced and not torch.equal(runtime.ids, whole)
        self._ids: Tensor | None = runtime.ids if reduced else None

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        bound = MAX_NODES if self.config.shape == "chain" else self.config.nodes
        bound = min(bound, self.traits.longest or bound)
        most = [
            replace(each, depth=self.depth(seq, min(each.depth, bound)))
            for seq, each in zip(seqs, budgets, strict=True)
        ]
        if self._pass is not None:
            self._pass.plan(seqs, most)
        if self.config.shape == "chain":
            return self._chains.draft(seqs, most)
        drafting = [b for b in range(len(seqs)) if most[b].depth > 0]
        if not drafting:
            return Draft.empty(len(seqs), self.device)
        c = self.config
        trees = [Tree(seqs[b], most[b].depth, c.width, c.nodes, not seqs[b].params.greedy) for b in drafting]
        self._grow(trees)
        return forest(len(seqs), dict(zip(drafting, trees, strict=True)), self.vocab_size, self.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        super().observe(seqs, draft, out, verdict)
        if self._confident.drawn:
            self._confident.learn(seqs, draft, verdict)

    # --- chains: see `chains.ChainModel` ---------------------------------------------------------------------------

    def extend(self, seqs: Seq[Sequence], chains: Seq[Seq[int]]) -> Tensor:
        """Return logits [R, V]. After the first draft token, the head continues from its own output."""
        drafted = len(chains[0])
        if drafted == 0:
            batch, features = self.collect_pending(seqs)
            hidden, logits = self.runtime.extend(batch, features)  # [R, d], [R, draft_vocab]
            self.note_run(seqs)
        else:
            assert self._state is not None
            place = {id: r for r, id in enumerate(self._state[0])}
            before = self._state[1][[place[seq.id] for seq in seqs]]  # [R, d], a copy
            batch = self.draft_rows(
                seqs,
                [[chain[-1]] for chain in chains],
                [[drafted]] * len(seqs),
                range(len(seqs)),
                cached=[drafted - 1] * len(seqs),
            )
            hidden, logits = self.runtime.extend(batch, before, from_head=True)
        self._state = [seq.id for seq in seqs], hidden
        return self._scatter(logits)

    def decode_steps(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        """Draw chains as in `chains.ChainModel`. Sampling with uniform numbers cumulates probabilities in the order of
        the draft ids. If target ids do not increase with draft ids, the host cumulates in another order: most chains
        then end early, and q is still exact."""
        batch, features = self.collect_pending(seqs)
        if sampling.noise is not None and self._ids is not None:
            sampling = replace(sampling, noise=sampling.noise[..., self._ids])  # [K, R, draft_vocab]
        drawn = self.runtime.decode_steps(batch, features, steps, sampling)
        self.note_run(seqs)
        probs = None if drawn.probs is None else self._scatter(drawn.probs, 0.0)
        tokens = drawn.tokens if self._ids is None else self._ids[drawn.tokens]
        # The logits are not read if tokens are maxima.
        logits = drawn.logits if sampling.kind == "maximum" else self._scatter(drawn.logits)
        return drawn._replace(tokens=tokens, logits=logits, probs=probs)

    def _run_masked(self, seqs: Seq[Sequence], depth: Seq[int]) -> list[Tensor]:
        batch, features = self.collect_pending(seqs, masks=[d - 1 for d in depth])
        _, logits = self.runtime.extend(batch, features)  # [sum of depths, draft_vocab]
        self.note_run(seqs)
        return list(self._scatter(logits).split(list(depth)))

    def _scatter(self, values: Tensor, elsewhere: float = -torch.inf) -> Tensor:
        return scatter(values, self._ids, self.vocab_size, elsewhere)

    def _grow(self, trees: Seq[Tree]) -> None:
        """Grow a tree for each sequence, with one call of the head per level. Cached rows are visible to all later
        rows, but a node must see only its ancestors, so each level runs the levels above it again, with a tree mask."""
        seqs = [tree.seq for tree in trees]
        batch, features = self.collect_pending(seqs)
        hidden, logits = self.runtime.extend(batch, features)  # [R, d], [R, draft_vocab]
        self.note_run(seqs)
        live, frontiers = list(trees), [[ROOT]] * len(trees)
        states = {(id(tree), ROOT): row for tree, row in zip(trees, hidden.clone(), strict=True)}  # outputs of nodes
        while live:
            add_level(live, frontiers, self._scores(logits, live, frontiers))
            grown = [(tree, front) for tree in live if (front := tree.frontier())]
            live, frontiers = [tree for tree, _ in grown], [front for _, front in grown]
            if not live:
                break
            rows = [[*tree.ran, *front] for tree, front in grown]
            splits = np.cumsum([0, *map(len, rows)]).tolist()
            batch = self.draft_rows(
                [tree.seq for tree in live],
                [[tree.tokens[node] for node in row] for tree, row in zip(live, rows, strict=True)],
                [[tree.depths[node] for node in row] for tree, row in zip(live, rows, strict=True)],
                [i for end, front in zip(splits[1:], frontiers, strict=True) for i in range(end - len(front), end)],
                [tree.visible(row) for tree, row in zip(live, rows, strict=True)],
            )
            parents = [states[id(t), t.parents[node]] for t, row in zip(live, rows, strict=True) for node in row]
            try:
                hidden, logits = self.runtime.extend(batch, torch.stack(parents), from_head=True)
            except Exception as fault:  # the fault may depend on the drawn nodes: keep them (see `chains`)
                end_early([tree.seq for tree in live], max(tree.level for tree in live), fault)
                break
            nodes = [(id(tree), node) for tree, front in grown for node in front]
            states |= dict(zip(nodes, hidden.clone(), strict=True))

    def _scores(self, logits: Tensor, trees: Seq[Tree], frontiers: Seq[Seq[int]]) -> Tensor:
        """Return the distributions that a level is grown from, float64 [F, V], at the request's temperature; greedy
        requests take temperature 1."""
        pairs = [(tree, node) for tree, front in zip(trees, frontiers, strict=True) for node in front]
        seqs = [tree.seq for tree, _ in pairs]
        # For greedy requests, the unfiltered softmax estimates how likely each token is accepted.
        scoring = {id(t): t.seq.params.unfiltered if t.seq.params.greedy else t.seq.params for t in trees}
        params = [scoring[id(tree)] for tree, _ in pairs]
        paths = [[tree.tokens[i] for i in tree.path(node)] for tree, node in pairs]
        return find_possible(self._scatter(logits), seqs, paths, self.vocab_size, params)[0]


def make(
    target: Target, *, head: CheckpointName | EagleHead | None = None, quantize: str | None = None, **options: object
) -> EagleDrafter:
    """Make the EAGLE drafter, as `registry` requires. head: folder or hub id of an EAGLE-1, -2 or -3 head, or a head in
    memory; None: the head that ships for this target. quantize: "none", "int8" (w8a8), "int4" or another weight format
    for the head on the native backend; None: about as many bits as the target's weights. Quantisation may change draft
    tokens, not the output distribution. options: as in `EagleDraftConfig`. Raises ParameterError and the families of
    LoadError and PairError."""
    return _make(target, head, quantize, "eagle", options)


def make_eagle3(
    target: Target, *, head: CheckpointName | EagleHead | None = None, quantize: str | None = None, **options: object
) -> EagleDrafter:
    """EAGLE-3 (Li et al. 2503.01840): as EAGLE, but the head reads three layers of the target and was trained on its
    own drafts; a head of P-EAGLE (2602.01469) drafts in one pass.

    Makes the drafter `eagle3`, with the arguments and errors of `make`."""
    return _make(target, head, quantize, "eagle3", options)


def _make(
    target: Target, head: CheckpointName | EagleHead | None, quantize: str | None, asked: str, options: dict[str, Any]
) -> EagleDrafter:
    config = EagleDraftConfig(**options)
    host = require(target.capabilities.head_host, target, HEAD_HOST, f"drafter {asked!r}")
    if head is None:
        head = head_dir(asked, host.runtime.checkpoint)
    if isinstance(head, EagleHead):  # a copy: the original may still be in training
        loaded = copy.deepcopy(head).eval().requires_grad_(False)
    else:
        loaded = load_eagle(head, host.layers)
    fitted = fit(loaded, host)
    backend, settings = backend_for_head(fitted.config.decoder, host, quantize)
    drafter = EagleDrafter(backend.eagle(fitted, host, settings), host.vocab_size, config)
    if drafter.name != asked:
        log.warning("the head %s is of the kind %r, not %r; it runs as %r", head, drafter.name, asked, drafter.name)
    return drafter
