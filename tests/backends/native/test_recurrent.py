"""Recurrent layers: their outputs against float64, and that nothing but the accepted tokens decides a state."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numba import njit

from slipstream.backends.native.kernels import matrices, records, recurrent
from slipstream.backends.native.kernels.records import CACHE, RECURRENT, ROW, ROWS
from slipstream.backends.native.states import FEW, NativeStates
from slipstream.backends.native.threads import kernel_lock, pool
from slipstream.checkpoints.recurrence import CONVOLUTION, DELTA, STATE_SPACE, Recurrence
from slipstream.errors import TargetError

KINDS = {CONVOLUTION: records.CONVOLUTION, DELTA: records.DELTA, STATE_SPACE: records.STATE_SPACE}


@njit
def _recur(boards, parts, caches, rows, inputs, out, scratch, threads):  # type: ignore[no-untyped-def]
    board, cache = boards[0], caches[0]
    board.threads = threads
    board.prepare.scratch, board.prepare.scratch_bytes = scratch.ctypes.data, scratch.nbytes // board.size
    matrices.recur(board, parts[0], cache, rows[0], inputs.ctypes.data, inputs.shape[1], out.ctypes.data, out.shape[1])
    recurrent.advance(cache.states, cache.sequences, cache.lag)


@dataclass
class Layer:
    """A recurrent layer with random weights, driven pass by pass."""

    kind: str
    lag: int = 0
    threads: int = 1
    heads: int = 4
    groups: int = 2
    key: int = 16
    value: int = 83  # columns of a tile of 64, of one panel, and three more
    taps: int = 4
    arrays: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(7)
        part = np.zeros(1, RECURRENT)
        if self.kind == "convolution":
            self.heads, self.groups, self.key, self.value = 1, 1, 0, 48
        wide = self.heads * self.value
        self.channels = 2 * self.groups * self.key + wide
        each = {"convolution": 0, "delta": 2, "state space": 1}[self.kind]
        self.kept = self.channels + each * self.heads
        self.gate = 2 * wide if self.kind == "convolution" else self.kept
        self.width = self.gate + wide

        def weight(name: str, *shape: int, low: float = -1, high: float = 1) -> np.ndarray:
            values = generator.uniform(low, high, shape).astype(np.float32)
            self.arrays.append(values)
            part[name] = values.ctypes.data
            return values

        self.conv = weight("conv", self.taps, self.channels)
        self.bias = weight("conv_bias", self.channels)
        if each:
            self.rate, self.step_bias = weight("rate", self.heads, low=-2, high=-0.1), weight("step_bias", self.heads)
            self.norm = weight("norm", self.value if self.kind == "delta" else wide)
            part["norm_width"], part["normed"] = len(self.norm), self.value if self.kind == "delta" else wide // 2
            part["gate_first"] = self.kind == "state space"
        if self.kind == "state space":
            self.skip = weight("skip", self.heads)
        for name in ("taps", "heads", "groups", "key", "value", "channels", "kept", "gate"):
            part[name] = getattr(self, name)
        part["kind"], part["eps"], part["step_scale"] = KINDS[self.kind], 1e-5, 1
        self.part = part
        described = Recurrence(
            kind=self.kind, taps=self.taps, heads=self.heads, groups=self.groups, key=self.key, value=self.value
        )
        assert (described.kept, described.channels) == (self.kept, self.channels)
        self.states = NativeStates([described], self.lag)

    def inputs(self, count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=(count, self.width)).astype(np.float32)

    def run(self, passes: list[tuple[int, int, np.ndarray, int]]) -> list[np.ndarray]:
        """(sequence, past, inputs, how many of them are certain) of each sequence -> outputs."""
        inputs = np.concatenate([given for _, _, given, _ in passes]).copy()
        at = [(b, 0, 0, 0, 0) for b, (_, _, given, _) in enumerate(passes) for _ in given]
        rows = np.array(at, np.int64).view(ROW)[:, 0].copy()
        record = np.zeros(1, ROWS)
        record["at"], record["count"] = rows.ctypes.data, len(rows)
        states = self.states.prepare([(i, past, len(x), sure) for i, past, x, sure in passes])
        cache, out = np.zeros(1, CACHE), np.empty((len(inputs), self.heads * self.value), np.float32)
        cache["states"], cache["sequences"] = states.ctypes.data, len(states)
        cache["ring"], cache["lag"] = self.states.ring, self.lag
        with kernel_lock():
            workers = pool(self.threads)
            workers.run(
                _recur, self.part, cache, record, inputs, out, np.empty(1 << 18, np.uint8), threads=self.threads
            )
        return np.split(out, np.cumsum([len(x) for _, _, x, _ in passes])[:-1])

    def plain(self, inputs: np.ndarray, seq_id: int = 99) -> np.ndarray:
        """Token by token."""
        outputs = [self.run([(seq_id, i, inputs[i : i + 1], 1)])[0] for i in range(len(inputs))]
        self.states.release(seq_id)
        return np.concatenate(outputs)


def reference(layer: Layer, inputs: np.ndarray) -> np.ndarray:
    """The outputs in float64, by the formulas of the papers."""
    x = inputs.astype(np.float64)
    sigmoid: Callable[[np.ndarray], np.ndarray] = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    wide, gates = layer.heads * layer.value, x[:, layer.gate :]
    convolved = x[:, : layer.channels].copy()
    if layer.kind == "convolution":
        convolved *= x[:, layer.channels : 2 * layer.channels]
    padded = np.concatenate([np.zeros((layer.taps - 1, layer.channels)), convolved])
    convolved = layer.bias + sum(layer.conv[j] * padded[j : j + len(x)] for j in range(layer.taps))
    if layer.kind == "convolution":
        return convolved * gates
    convolved *= sigmoid(convolved)
    size = layer.groups * layer.key
    q, k = (convolved[:, i * size : (i + 1) * size].reshape(-1, layer.groups, layer.key) for i in (0, 1))
    v = convolved[:, 2 * size :].reshape(-1, layer.heads, layer.value)
    q, k = (np.repeat(part, layer.heads // layer.groups, 1) for part in (q, k))
    raw = x[:, layer.channels : layer.kept]
    step = np.log1p(np.exp(raw[:, -layer.heads :] + layer.step_bias))
    if layer.kind == "delta":
        beta, decay = sigmoid(raw[:, : layer.heads]), np.exp(layer.rate * step)
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q = q / np.sqrt(layer.key)
    else:
        decay = np.exp(layer.rate * step)
    state, out = np.zeros((layer.heads, layer.key, layer.value)), np.empty((len(x), layer.heads, layer.value))
    for t in range(len(x)):
        state *= decay[t][:, None, None]
        if layer.kind == "delta":
            change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        else:
            change = step[t][:, None] * v[t]
        state += np.einsum("hk,hv->hkv", k[t], change)
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
        if layer.kind == "state space":
            out[t] += layer.skip[:, None] * v[t]
    flat, gated = out.reshape(len(x), wide), gates * sigmoid(gates)
    flat = flat * gated if layer.kind == "state space" else flat
    groups = flat.reshape(len(x), -1, int(layer.part["normed"][0]))
    groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)
    flat = groups.reshape(len(x), wide) * np.tile(layer.norm, wide // len(layer.norm))
    return flat if layer.kind == "state space" else flat * gated


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_formulas_in_float64(kind: str) -> None:
    layer = Layer(kind)
    inputs = layer.inputs(70)
    expected = reference(layer, inputs)
    for got in (layer.plain(inputs), layer.run([(0, 0, inputs, len(inputs))])[0]):
        assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("lag", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_any_drafts_batches_and_rejections_give_bitwise_the_outputs_of_plain_decoding(kind: str, lag: int) -> None:
    """Four texts, in batches of random members, with drafts of random lengths whose ends are rejected at random."""
    expected_of, layer = Layer(kind), Layer(kind, lag=lag, threads=2)
    texts = [layer.inputs(150, seed) for seed in range(4)]
    expected = [expected_of.plain(text) for text in texts]
    at, chance = dict.fromkeys(range(4), 0), random.Random(3)
    while left := [b for b in at if at[b] < 100]:
        passes, right = [], {}
        for b in chance.sample(left, chance.randint(1, len(left))):
            pending, draft = chance.choice([1, 1, 1, 2, FEW, FEW + 1, 40]), chance.randint(0, 5)
            right[b] = pending + chance.randint(0, draft)
            wrong = layer.inputs(pending + draft - right[b], 1000 + at[b])
            passes.append((b, at[b], np.concatenate([texts[b][at[b] : at[b] + right[b]], wrong]), pending))
        for (b, past, _, _), out in zip(passes, layer.run(passes), strict=True):
            assert np.array_equal(out[: right[b]], expected[b][past : past + right[b]])
            at[b] += right[b] - chance.randint(0, min(lag, right[b] - 1))  # a draft model takes some back


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_begins_with_a_snapshot_goes_on_bitwise_as_the_one_that_it_was_taken_of(kind: str) -> None:
    layer = Layer(kind)
    text = layer.inputs(90)
    expected = layer.plain(text)
    layer.run([(0, 0, text[:80], 80)])
    keys = [b"first", b"second"]
    layer.states.keep(0, keys)
    assert layer.states.longest([*keys, b"third"]) == 2
    assert layer.states.longest([b"first"]) == 0
    layer.states.begin(1, b"second")
    for start, stop in ((64, 70), (64, 84), (84, 90)):  # the first pass is run again
        assert np.array_equal(layer.run([(1, start, text[start:stop], stop - start)])[0], expected[start:stop])
    layer.states.drop(b"second")
    assert layer.states.longest(keys) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_takes_snapshots_where_texts_part_and_at_its_end(kind: str) -> None:
    layer = Layer(kind)
    text = layer.inputs(140)
    expected = layer.plain(text)
    layer.states.begin(0, None, 32)
    layer.run([(0, 0, text[:129], 129)])
    keys = [b"a", b"b", b"c", b"d"]
    layer.states.keep(0, keys)
    assert [layer.states.longest(keys[:count]) for count in (1, 3, 4)] == [1, 1, 4]
    for seq_id, (key, past) in enumerate([(b"a", 32), (b"d", 128)], 1):
        layer.states.begin(seq_id, key)
        assert np.array_equal(layer.run([(seq_id, past, text[past:], 1)])[0], expected[past:])


def test_snapshots_make_way_for_states_and_never_exceed_their_share() -> None:
    layer = Layer("delta")
    snapshot, each = layer.states.snapshot_bytes, layer.states.bytes_each
    layer.states = NativeStates(layer.states.layers, room=2 * each + snapshot, beside=3 * snapshot)
    text = layer.inputs(64)
    for seq_id in range(4):
        layer.run([(seq_id, 0, text, 64)])
        layer.states.keep(seq_id, [bytes([seq_id, block]) for block in range(2)])
        layer.states.release(seq_id)
        assert layer.states.nbytes <= min(3 * snapshot, layer.states.room)
    assert layer.states.missing([7, 8]) == 0
    assert layer.states.missing([7, 8, 9]) == 1
    layer.run([(7, 0, text, 64), (8, 0, text, 64)])
    assert layer.states.nbytes <= layer.states.room
    with pytest.raises(TargetError, match="no memory for the recurrent states of sequence 9"):
        layer.run([(9, 0, text, 64)])
    layer.states.release(7)
    layer.run([(9, 0, text, 64)])


def test_a_fork_goes_on_by_itself_and_one_that_comes_too_late_is_refused() -> None:
    layer = Layer("delta")
    text, other = layer.inputs(40), layer.inputs(40, 5)
    mixed = np.concatenate([text[:30], other[30:]])
    expected, expected_other = layer.plain(text), layer.plain(mixed)
    layer.run([(0, 0, text[:30], 30)])
    layer.states.fork(0, 1, 30)
    for i in range(30, 40):
        a, b = layer.run([(0, i, text[i : i + 1], 1), (1, i, mixed[i : i + 1], 1)])
        assert np.array_equal(a[0], expected[i])
        assert np.array_equal(b[0], expected_other[i])
    with pytest.raises(TargetError, match="cannot begin with 20 tokens"):
        layer.states.fork(0, 2, 20)
    with pytest.raises(TargetError, match="cannot be rolled back to 20 tokens"):
        layer.run([(0, 20, text[20:21], 1)])


def test_a_step_with_a_draft_writes_a_state_once_as_a_plain_step_does() -> None:
    layer = Layer("delta")
    text = layer.inputs(40)
    layer.run([(0, 0, text[:9], 9)])
    held = layer.states._held[0]
    before = held.cells.copy()
    layer.run([(0, 9, text[9:18], 1)])  # commits the 9 tokens before; its own rows leave no trace
    once = held.cells.copy()
    assert not np.array_equal(once, before)
    assert held.committed[0] == 9
    layer.run([(0, 9, layer.inputs(8, 4), 1)])
    assert np.array_equal(held.cells, once)
