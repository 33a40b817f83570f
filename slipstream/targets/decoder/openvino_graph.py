"""A decoder as an OpenVINO graph, operator by operator, in the shapes that the CPU plugin recognises and fuses.

What is written here becomes, in the runtime model (`compiled_model.get_runtime_model()`), RMS, RoPE,
PagedAttention and FullyConnected with packed weights. Query, key and value are one matrix, and rope turns query
and key heads in one operation: fewer operators, of which a small model is made more than of arithmetic. Gate and
up stay apart: as one matrix they are faster for one row, but slower for the several rows of a verification.

M new tokens, d width, H query heads, Hk key/value heads, D head size, V vocabulary, B sequences, R rows selected.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.openvino_constants import Constants
from slipstream.targets.decoder.openvino_paged import INPUTS, attention, caches, parameter

Node = Any
"""A graph node or one of its outputs; OpenVINO's Python operators take either."""


Graph = tuple[ov.Model, tuple[str, ...]]
"""A model and the names of its outputs, in order."""


def ints(values: int | Seq[int]) -> Node:
    return op.constant(np.array(values, np.int64))


def floats(values: Any) -> Node:
    return op.constant(np.asarray(values, np.float32))


def take(rows: Node, index: Node) -> Node:
    """rows[index]: [M, ...], [R] -> [R, ...]."""
    return op.gather(rows, index, ints(0))


def first_above(x: Node, u: Node, width: int) -> Node:
    """Index of the first place where the cumulated softmax of a row exceeds u: [B, width], [B, 1] -> [B]."""
    total = op.cum_sum(op.softmax(x, 1), ints(1))
    passed = op.reduce_sum(op.convert(op.less_equal(total, u), np.int32), ints([1]), False)
    return op.convert(op.minimum(passed, op.constant(np.array(width - 1, np.int32))), np.int64)


def first_maximum(x: Node, width: int) -> Node:
    """Index of the first maximum of each row: [B, width] -> [B]. Three passes over the row, a third of what a stable
    top-1 costs here (a tenth for a vocabulary of 32,000)."""
    places = op.constant(np.arange(width, dtype=np.int32)[None])
    last = op.constant(np.array(width - 1, np.int32))
    maximal = op.equal(x, op.reduce_max(x, ints([1]), True))
    return op.convert(op.reduce_min(op.select(maximal, places, last), ints([1]), False), np.int64)


class Builder:
    """Builds graphs over one set of constants. One builder makes one graph: it owns that graph's cache inputs."""

    def __init__(self, config: DecoderConfig, constants: Constants):
        self.config = config
        self.constants = constants
        self.parameters: list[ov.Node] = []
        self._caches: dict[int, tuple[ov.Node, ov.Node]] = {}

    def parameter(self, name: str, rank: int, dtype: Any) -> Node:
        node = parameter(name, rank, dtype)
        self.parameters.append(node)
        return node

    def meta(self) -> dict[str, Node]:
        """The inputs of paged attention that every layer shares."""
        return {name: self.parameter(name, rank, dtype) for name, (rank, dtype) in INPUTS.items()}

    def model(self, outputs: Mapping[str, Node]) -> Graph:
        # Names live beside the model: those on its tensors are shared by outputs that are the same node.
        return ov.Model([op.result(node) for node in outputs.values()], self.parameters, "decoder"), tuple(outputs)

    # --- the parts of a decoder ---------------------------------------------------------------------------------

    def embed(self, ids: Node, positions: Node) -> Node:
        """[M] ids, [M] positions -> [M, d]."""
        h = take(self.constants.vector("embed"), ids)
        if self.config.position == "learned":
            h = op.add(h, take(self.constants.vector("positions"), positions))
        return h

    def turns(self, positions: Node) -> tuple[Node, Node] | None:
        """cos and sin [M, 1, 1, D/2] for rotary positions [M]; None for learned ones."""
        if self.config.position != "rope":
            return None
        inv_freq, scale = self.config.rope()
        column = op.unsqueeze(op.convert(positions, np.float32), ints([1]))  # [M, 1]
        angles = op.multiply(column, floats(inv_freq.numpy()[None]))  # [M, D/2]
        shape = ints([-1, 1, 1, self.config.head_dim // 2])
        cos, sin = (op.reshape(f(angles), shape, False) for f in (op.cos, op.sin))
        if scale != 1.0:
            cos, sin = op.multiply(cos, floats(scale)), op.multiply(sin, floats(scale))
        return cos, sin

    def norm(self, x: Node, name: str) -> Node:
        """Norm over the last dimension."""
        weight, eps = self.constants.vector(name), self.config.norm_eps
        if self.config.norm == "layer" and name + ".bias" in self.constants:
            flat = op.mvn(x, ints([-1]), True, eps, "inside_sqrt")
            return op.add(op.multiply(flat, weight), self.constants.vector(name + ".bias"))
        mean = op.reduce_mean(op.power(x, floats(2.0)), ints([-1]), True)
        return op.multiply(weight, op.multiply(x, op.divide(floats(1.0), op.sqrt(op.add(mean, floats(eps))))))

    def linear(self, x: Node, name: str) -> Node:
        """[..., in] -> [..., out], with its bias if it has one."""
        y = op.matmul(x, self.constants.matrix(name), False, True)
        return op.add(y, self.constants.vector(name + ".bias")) if name + ".bias" in self.constants else y

    def rope(self, x: Node, turns: tuple[Node, Node]) -> Node:
        """Rotate pairs (j, j + D/2) of x [M, heads, 1, D]."""
        cos, sin = turns
        half = self.config.head_dim // 2
        a, b = op.variadic_split(x, ints(-1), ints([half, half])).outputs()
        first = op.subtract(op.multiply(a, cos), op.multiply(b, sin))
        second = op.add(op.multiply(b, cos), op.multiply(a, sin))
        return op.concat([first, second], -1)

    def attend(
        self,
        x: Node,
        layer: int,
        turns: tuple[Node, Node] | None,
        meta: Mapping[str, Node],
        select: Node | None = None,
    ) -> Node:
        """Attention of layer `layer` over its normed input: [M, d] -> [M, d], or [R, d] for the rows `select` [R]."""
        c, name = self.config, f"{layer}."
        heads, kv, size = c.heads, c.kv_heads, c.head_dim
        qkv = self.linear(x, name + "qkv")  # [M, (H + 2 Hk) D]

        def split(y: Node, *widths: int) -> list[Node]:
            return op.variadic_split(y, ints(1), ints([w * size for w in widths])).outputs()  # type: ignore[no-any-return]

        def flat(y: Node, n: int) -> Node:
            return op.reshape(y, ints([-1, n * size]), False)

        def tall(y: Node, n: int) -> Node:
            return op.reshape(y, ints([-1, n, 1, size]), False)

        if turns is None:
            q, k, v = split(qkv, heads, kv, kv)
        elif c.qk_norm:
            q, k, v = split(qkv, heads, kv, kv)
            q = flat(self.rope(self.norm(tall(q, heads), name + "q_norm"), turns), heads)
            k = flat(self.rope(self.norm(tall(k, kv), name + "k_norm"), turns), kv)
        else:
            both, v = split(qkv, heads + kv, kv)
            q, k = split(flat(self.rope(tall(both, heads + kv), turns), heads + kv), heads, kv)
        if layer not in self._caches:
            self._caches[layer] = caches(layer)
            self.parameters.extend(self._caches[layer])
        y = attention(q, k, v, self._caches[layer], meta, kv, size, c.windows[layer] or 0)  # [M, H D]
        return self.linear(y if select is None else take(y, select), name + "o")

    def activate(self, x: Node) -> Node:
        kind = self.config.activation
        if kind == "silu":
            return op.swish(x)
        if kind == "relu":
            return op.relu(x)
        return op.gelu(x, "tanh" if kind == "gelu_tanh" else "erf")

    def mlp(self, x: Node, layer: int) -> Node:
        """[M, d] -> [M, d]."""
        return self.experts(x, layer) if self.config.sparse(layer) else self.dense(x, f"{layer}.")

    def dense(self, x: Node, name: str) -> Node:
        """One MLP, [M, d] -> [M, d]."""
        up = self.linear(x, name + "up")  # [M, width]
        if not self.config.gated:
            return self.linear(self.activate(up), name + "down")
        return self.linear(op.multiply(self.activate(self.linear(x, name + "gate")), up), name + "down")

    def experts(self, x: Node, layer: int) -> Node:
        """Mixture of experts [M, d] -> [M, d]. Every expert runs on every token, and the router's weights, zero for
        those not picked, choose: exact, and as slow as a dense model of the full size. (Skipping idle experts with
        this runtime's If operator returned wrong numbers now and then, and its batched matmul refuses broadcasting.)
        """
        experts = self.config.experts
        assert experts is not None
        law = op.softmax(op.matmul(x, self.constants.vector(f"{layer}.router"), False, True), 1)  # [M, E]
        best, index = op.topk(law, ints(experts.per_token), 1, "max", "value").outputs()  # [M, k]
        if experts.norm_topk:
            best = op.divide(best, op.reduce_sum(best, ints([1]), True))
        weights = op.scatter_elements_update(op.multiply(law, floats(0.0)), index, best, ints(1))  # [M, E]
        parts = [
            op.multiply(self.dense(x, f"{layer}.{e}."), column)
            for e, column in enumerate(op.split(weights, ints(1), experts.count).outputs())
        ]
        return functools.reduce(op.add, parts)

    def layers(
        self,
        h: Node,
        first: int,
        last: int,
        positions: Node,
        meta: Mapping[str, Node],
        stream: dict[int, Node] | None = None,
        select: Node | None = None,
    ) -> Node:
        """Layers first..last-1 on the residual stream [M, d]; `stream` gains it as it is after each layer. With
        `select` [R] the last layer makes every row's keys and values and goes on with these rows alone: [R, d]."""
        turns = self.turns(positions)
        for i in range(first, last):
            rows = select if i == last - 1 else None
            y = self.attend(self.norm(h, f"{i}.norm1"), i, turns, meta, rows)
            h = op.add(h if rows is None else take(h, rows), y)
            h = op.add(h, self.mlp(self.norm(h, f"{i}.norm2"), i))
            if stream is not None:
                stream[i + 1] = h
        return h

    def logits(self, normed: Node) -> Node:
        """[R, d] after the final norm -> [R, V]."""
        return self.linear(normed, self.constants.head)


class Picks:
    """`Draws` of one kind in a graph, over rows of `width` logits: its inputs, and the tokens of each step."""

    def __init__(self, b: Builder, kind: str, width: int, vocab: int | None):
        self.width, self.vocab = width, width if vocab is None else min(vocab, width)
        if kind != "maximum":
            self.heat = op.unsqueeze(b.parameter("inv_temperature", 1, np.float32), ints([1]))  # [B, 1]
        self.uniforms = b.parameter("uniforms", 2, np.float32) if kind == "uniforms" else None  # [K, B]
        self.noise = b.parameter("noise", 3, np.float32) if kind == "noise" else None  # [K, B, width]

    def tokens(self, logits: Node, j: int) -> Node:
        """[B, width] -> [B]."""
        if self.noise is not None:
            logits = op.add(op.multiply(logits, self.heat), take(self.noise, ints(j)))
        if self.vocab < self.width:
            logits = op.slice(logits, ints([0]), ints([self.vocab]), ints([1]), ints([1]))
        if self.uniforms is not None:
            u = op.unsqueeze(take(self.uniforms, ints(j)), ints([1]))  # [B, 1]
            return first_above(op.multiply(logits, self.heat), u, self.vocab)
        return first_maximum(logits, self.vocab)


def forward_graph(config: DecoderConfig, constants: Constants, first: int, last: int, taps: Seq[int]) -> ov.Model:
    """One pass through layers first..last-1, from token ids if first is 0, else from `hidden` [M, d].

    Outputs: logits [R, V] of the selected rows, tap.{i} [M, d] for each tap, and, unless all layers run, hidden
    [M, d], the residual stream at the end of the slice.
    """
    b = Builder(config, constants)
    positions = b.parameter("positions", 1, np.int64)
    if first == 0:
        h = b.embed(b.parameter("ids", 1, np.int64), positions)
    else:
        h = b.parameter("hidden_in", 2, np.float32)
        h.set_partial_shape(ov.PartialShape([-1, config.hidden_size]))
        h.validate_and_infer_types()
    select = b.parameter("select", 1, np.int64)
    stream = {first: h}
    if (first, last) == (0, config.layers) and not {-1, last} & set(taps):  # of a prompt, one row in hundreds is wanted
        normed = b.norm(b.layers(h, first, last, positions, b.meta(), stream, select), "norm")
    else:
        h = b.layers(h, first, last, positions, b.meta(), stream)
        stream[-1] = b.norm(h, "norm")
        normed = take(stream[-1], select)
    outputs = {"logits": b.logits(normed)} | {f"tap.{t}": stream[t] for t in taps}
    if (first, last) != (0, config.layers):
        outputs["hidden"] = h
    return b.model(outputs)


def single_rows(b: Builder, meta: Mapping[str, Node]) -> dict[str, Node]:
    """The inputs of attention for the last of the packed rows of each sequence, alone: made longer by one
    (`one_longer`), for a row behind it."""
    begins = meta["subsequence_begins"]
    single = b.parameter("single_begins", 1, np.int32)  # [B+1] = 0, 1, .., B
    end = op.constant(np.array([np.iinfo(np.int64).max]))
    after = op.slice(begins, ints([1]), end, ints([1]))  # [B]
    before = op.slice(begins, ints([0]), ints([-1]), ints([1]))  # [B]
    rows = op.subtract(after, before)  # [B]
    return dict(meta) | {
        "past_lens": op.add(meta["past_lens"], op.subtract(rows, _one())),  # [B]
        "subsequence_begins": single,
        "qq_bias": op.constant(np.zeros(0, np.uint8)),
        "qq_bias_begins": op.constant(np.zeros(0, np.int32)),
    }


def one_longer(meta: Mapping[str, Node]) -> dict[str, Node]:
    """The inputs of attention for the next single row of each sequence."""
    return dict(meta) | {name: op.add(meta[name], _one()) for name in ("past_lens", "max_context_len")}


def _one() -> Node:
    return op.constant(np.array(1, np.int32))


def unrolled_graph(
    config: DecoderConfig,
    constants: Constants,
    steps: int,
    exit: int | None = None,
    kind: str = "maximum",
    vocab: int | None = None,
) -> Graph:
    """`steps` forwards in one graph, each feeding the next with tokens picked by `Draws` of this kind and vocabulary.

    The first step runs the packed pending tokens [M]; `select` [B] names the last row of each sequence, whose
    logits count. Later steps run one token a sequence, on the same cache, whose order the tokens themselves impose.
    Outputs: tokens [K, B] and logits [K, B, V] (raw, before the temperature).

    exit  run the first `exit` layers only, and the last token through them too; two more outputs then hold the
          residual stream there: hidden [M, d] of the pending tokens and later [K, B, d] of the new ones.
    """
    depth = config.layers if exit is None else exit
    b = Builder(config, constants)
    ids, positions = b.parameter("ids", 1, np.int64), b.parameter("positions", 1, np.int64)
    select = b.parameter("select", 1, np.int64)
    picks = Picks(b, kind, config.vocab_size, vocab)
    meta = b.meta()
    later = single_rows(b, meta)
    place = take(positions, select)  # [B]
    tokens: list[Node] = []
    scores: list[Node] = []
    stream: list[Node] = []  # [M, d], then [B, d] a step
    token: Node = None
    for j in range(steps if exit is None else steps + 1):
        if j == 0:
            h = b.layers(b.embed(ids, positions), 0, depth, positions, meta, select=select if exit is None else None)
            if exit is not None:
                stream.append(h)
                h = take(h, select)
        else:
            place = op.add(place, ints(1))
            later = one_longer(later)
            h = b.layers(b.embed(token, place), 0, depth, place, later)
            if exit is not None:
                stream.append(op.unsqueeze(h, ints([0])))
        if j == steps:
            break
        logits = b.logits(b.norm(h, "norm"))  # [B, V]
        token = picks.tokens(logits, j)  # [B]
        tokens.append(op.unsqueeze(token, ints([0])))
        scores.append(op.unsqueeze(logits, ints([0])))
    outputs = {"tokens": op.concat(tokens, 0), "logits": op.concat(scores, 0)}
    if exit is not None:
        outputs |= {"hidden": stream[0], "later": op.concat(stream[1:], 0)}
    return b.model(outputs)


def for_one_sequence(graph: Graph, rows: int, steps: int, width: int) -> Graph:
    """An unrolled graph of so many steps, and logits of that width, made to take one sequence with `rows` pending
    tokens alone.

    Where shapes are known beforehand the runtime need not derive them, nor ready its kernels, in every call. A small
    draft is made of operators more than of arithmetic, so its calls take a quarter less (measured). What grows with the
    text, the cache and its block tables, stays as it was.
    """
    lengths = {"ids": rows, "positions": rows, "select": 1, "inv_temperature": 1, "past_lens": 1, "qq_bias": 0}
    begins = ("subsequence_begins", "single_begins", "block_indices_begins", "qq_bias_begins")
    shapes = {name: [length] for name, length in lengths.items()} | {name: [2] for name in begins}
    shapes |= {"uniforms": [steps, 1], "noise": [steps, 1, width]}
    there = {i.get_any_name() for i in graph[0].inputs}
    graph[0].reshape({name: shape for name, shape in shapes.items() if name in there})
    return graph
