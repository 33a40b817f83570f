"""An EAGLE head on a CPU, as OpenVINO graphs around paged attention; parts, cache and buffers are the decoder's.

One graph for each kind of call: true rows, own rows, and a whole chain of K steps, whose first runs the pending true
rows. Rows that nobody asked about only leave their keys and values: behind the last attention, and in the output head,
only the selected rows go on.

M rows, d width of the head, W = taps * width of the target's states, R rows selected, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from slipstream.core.draws import GREEDY, Drawn, Draws
from slipstream.heads.eagle import EagleConfig, EagleHead
from slipstream.heads.eagle_runtime import target_ids
from slipstream.targets.decoder.executor import Batch, check_unrolled
from slipstream.targets.decoder.openvino_constants import Constants, Plan
from slipstream.targets.decoder.openvino_executor import cache_folder, properties
from slipstream.targets.decoder.openvino_graph import (
    Builder,
    Graph,
    Node,
    Picks,
    ints,
    one_longer,
    single_rows,
    take,
)
from slipstream.targets.decoder.openvino_paged import probe
from slipstream.targets.decoder.openvino_program import Program, core, kept, unrolled_kept
from slipstream.targets.decoder.paged_cache import Paged, PagedCache


class OpenVinoEagle(Paged):
    """head: with the target's weights borrowed; any float dtype, computed in float32. Not needed afterwards.
    threads, cache_dir, quantize: as in `OpenVinoExecutor`. See `EagleRuntime`. Raises UnsupportedModelError where this
    runtime cannot run the head, and LoadError."""

    name = "openvino"

    def __init__(
        self,
        head: EagleHead,
        threads: int | None = None,
        cache_dir: str | Path | None = None,
        quantize: str | None = None,
    ):
        c = head.config.decoder
        probe(core(), c.heads, c.kv_heads, c.head_dim)
        self.config, self.device = head.config, torch.device("cpu")
        self.ids = target_ids(head).cpu()
        self._constants = Constants(c, _weights(head), quantize, cache_folder(cache_dir), _plan(head, quantize))
        self._constants.evict()
        self._properties = properties(self._constants.matmul_bytes, threads)
        self._cache = PagedCache(c.layers, c.kv_heads, c.head_dim)
        self._rows: dict[bool, Program] = {}
        self._chains: dict[tuple[int, str], Program] = {}  # by steps and kind of `Draws`

    def extend(self, batch: Batch, features: Tensor, own: bool = False) -> tuple[Tensor, Tensor]:
        program = self._rows.get(own)
        if program is None:
            program = self._rows[own] = self._compile(_rows_graph(self.config, self._constants, own))
        self._feed(program, batch, features, 0)
        rows = len(batch.select)
        hidden = program.bind("hidden", (rows, self.config.hidden_size))
        logits = program.bind("logits", (rows, self.config.draft_vocab))
        program.infer()
        return hidden, logits

    def chains(
        self,
        batch: Batch,
        features: Tensor,
        steps: int,
        draws: Draws = GREEDY,
    ) -> Drawn:
        check_unrolled(steps)
        program = kept(
            self._chains,
            (steps, draws.kind),
            unrolled_kept(self._constants.matmul_bytes),
            lambda: self._compile(_chain_graph(self.config, self._constants, self.ids, steps, draws.kind)),
        )
        count, vocab = len(batch.seq_ids), self.config.draft_vocab
        self._feed(program, batch, features, steps - 1)
        program.feed_draws(count, draws)
        tokens, logits = program.bind("tokens", (steps, count)), program.bind("logits", (steps, count, vocab))
        program.infer()
        return Drawn(tokens, logits)

    def _feed(self, program: Program, batch: Batch, features: Tensor, extra: int) -> None:
        program.feed_batch(self._cache, batch, extra)
        program.bind("ids", (batch.splits[-1],)).copy_(batch.tokens)
        program.bind("features", tuple(features.shape)).copy_(features)
        program.feed("select", batch.select)

    def _compile(self, graph: Graph) -> Program:
        self._constants.forget()
        return Program(graph, self._properties, self._constants)


# --- weights -------------------------------------------------------------------------------------------------------


def _weights(head: EagleHead) -> dict[str, Tensor]:
    lent = {"embedding": "embed_tokens.weight", "lm_head": "lm_head.weight"}
    borrowed = {lent[name]: tensor for name, tensor in head.borrowed.items()}
    return borrowed | {n: t for n, t in head.state_dict().items() if t.is_floating_point()}


def _plan(head: EagleHead, quantize: str | None) -> Plan:
    """The head's constants, under the names by which `Builder` asks for a decoder's."""
    c, d = head.config, head.config.decoder
    plan: Plan = [("embed", ["embed_tokens.weight"], "lookup"), ("fc", ["fc.weight"], "matrix")]
    if c.fc_bias:
        plan.append(("fc.bias", ["fc.bias"], "vector"))
    if c.fc_norm:
        plan += [(f"fc_norm.{i}", [f"fc_norm.{i}.weight"], "vector") for i in range(len(c.taps))]
    if c.norm_before_fc:
        plan.append(("input_norm", ["input_norm.weight"], "vector"))

    def linear(name: str, sources: list[str], bias: bool) -> None:
        plan.append((name, [s + ".weight" for s in sources], "matrix"))
        if bias:
            plan.append((name + ".bias", [s + ".bias" for s in sources], "vector"))

    for i in range(d.layers):
        source, name = ("midlayer." if c.version == 3 else f"layers.{i}."), f"{i}."
        if c.version == 3:
            plan.append((name + "hidden_norm", [source + "hidden_norm.weight"], "vector"))
        if c.version == 3 or i:
            plan.append((name + "norm1", [source + "input_layernorm.weight"], "vector"))
        linear(name + "qkv", [f"{source}self_attn.{p}_proj" for p in "qkv"], d.qkv_bias)
        linear(name + "o", [source + "self_attn.o_proj"], d.o_bias)
        plan.append((name + "norm2", [source + "post_attention_layernorm.weight"], "vector"))
        for part in ("gate", "up", "down"):
            linear(name + part, [f"{source}mlp.{part}_proj"], d.mlp_bias)
    if c.version == 3:
        plan.append(("norm", ["norm.weight"], "vector"))
    lent = head.borrowed
    if c.version == 3 or lent["lm_head"] is not lent.get("embedding"):  # else the embedding makes the logits
        plan.append(("head", ["lm_head.weight"], "matrix"))
    elif quantize:
        plan.append(("head", ["embed_tokens.weight"], "matrix"))
    return plan


# --- graphs --------------------------------------------------------------------------------------------------------


class _Builder(Builder):
    def __init__(self, config: EagleConfig, constants: Constants):
        super().__init__(config.decoder, constants)
        self.eagle = config

    def features(self, own: bool) -> Node:
        """The input of that name as features of the head: true rows [M, W] go through fc, own ones [M, d] do not."""
        c = self.eagle
        width = c.hidden_size if own else len(c.taps) * c.target_hidden
        node = self.parameter("features", 2, np.float32)
        node.set_partial_shape(ov.PartialShape([-1, width]))
        node.validate_and_infer_types()
        if own or c.version == 1:
            return node
        if c.fc_norm:
            taps = op.split(node, ints(1), len(c.taps)).outputs()
            node = op.concat([self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)], 1)
        if c.norm_before_fc:
            node = self.norm(node, "input_norm")
        return self.linear(node, "fc")

    def step(
        self, ids: Node, hidden: Node, positions: Node, meta: Mapping[str, Node], select: Node | None = None
    ) -> tuple[Node, Node]:
        """`EagleHead.forward` of packed rows, and of the selected ones behind the last attention: [R, d] each."""
        c, embedded = self.eagle, self.embed(ids, positions)
        turns = self.turns(positions)
        if c.version == 1:
            h = self.linear(op.concat([embedded, hidden], 1), "fc")
            for i in range(c.decoder.layers):
                x = h if i == 0 else self.norm(h, f"{i}.norm1")
                chosen = select if i == c.decoder.layers - 1 else None
                h = self._rest(h, self.attend(x, i, turns, meta), i, chosen)
            return h, h
        normed = self.norm(hidden, "0.hidden_norm")
        x = op.concat([self.norm(embedded, "0.norm1"), normed], 1)  # [M, 2 d]
        h = self._rest(normed if c.norm_before_residual else hidden, self.attend(x, 0, turns, meta), 0, select)
        out = self.norm(h, "norm")
        return (out if c.norm_output else h), out

    def _rest(self, h: Node, attended: Node, layer: int, select: Node | None) -> Node:
        if select is not None:
            h, attended = take(h, select), take(attended, select)
        h = op.add(h, attended)
        return op.add(h, self.mlp(self.norm(h, f"{layer}.norm2"), layer))


def _rows_graph(config: EagleConfig, constants: Constants, own: bool) -> Graph:
    """One pass over packed rows of one kind. Outputs of the selected ones: hidden [R, d], logits [R, draft_vocab]."""
    b = _Builder(config, constants)
    ids, positions = b.parameter("ids", 1, np.int64), b.parameter("positions", 1, np.int64)
    select = b.parameter("select", 1, np.int64)
    hidden, x = b.step(ids, b.features(own), positions, b.meta(), select)
    return b.model({"hidden": hidden, "logits": b.logits(x)})


def _chain_graph(config: EagleConfig, constants: Constants, target: Tensor, steps: int, kind: str) -> Graph:
    """`steps` passes in one graph, the first over the pending true rows, tokens picked by `Draws` of this kind.
    target: id of each draft id. Outputs: tokens [K, B] (draft ids) and raw logits [K, B, draft_vocab]."""
    b = _Builder(config, constants)
    ids, positions = b.parameter("ids", 1, np.int64), b.parameter("positions", 1, np.int64)
    select = b.parameter("select", 1, np.int64)
    picks = Picks(b, kind, config.draft_vocab, None)
    meta = b.meta()
    later = single_rows(b, meta)
    table = op.constant(target.numpy())  # [draft_vocab]
    place = take(positions, select)  # [B]
    tokens: list[Node] = []
    scores: list[Node] = []
    token = hidden = None
    for j in range(steps):
        if j == 0:
            hidden, x = b.step(ids, b.features(False), positions, meta, select)  # [B, d] each
        else:
            place, later = op.add(place, ints(1)), one_longer(later)
            hidden, x = b.step(take(table, token), hidden, place, later)
        logits = b.logits(x)  # [B, draft_vocab]
        token = picks.tokens(logits, j)  # [B]
        tokens.append(op.unsqueeze(token, ints([0])))
        scores.append(op.unsqueeze(logits, ints([0])))
    return b.model({"tokens": op.concat(tokens, 0), "logits": op.concat(scores, 0)})
