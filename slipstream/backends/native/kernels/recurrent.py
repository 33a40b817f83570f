"""Recurrent layers: short convolutions, Gated DeltaNet (Yang et al., 2412.06464) and Mamba-2 (Dao and Gu, 2405.21060).

Each head has a state S [K, V], which every token changes. With q, k [K] and v [V], the token's inputs after a causal
convolution over channels, and its decay g:

    Gated DeltaNet   S = g S + k (beta (v - k' g S))'      Mamba-2   S = g S + k (dt v)'      output: q' S

States are committed lazily. A state contains the tokens that were accepted when it was written. The *inputs* of later
tokens, which are the values that the layer computes before the recurrence, are kept in a ring buffer. A pass reads the
state once, applies the inputs of the tokens that were accepted meanwhile, writes the state back, and runs its own rows
on a copy that is thrown away. So a rejected token leaves no trace, and no state has to be restored. Every state is
bitwise the state of plain decoding, because tokens are applied one by one in the same order.

A row of inputs has the channels of the convolution (all q, then k, then v), then the numbers of each head (Gated
DeltaNet: all beta, then all decays; Mamba-2: all time steps), then the gates of the output, which the ring does not
keep.
"""

import math

import numpy as np
from numba import carray

from slipstream.backends.native.kernels.arithmetic import rms_norm, silu
from slipstream.backends.native.kernels.attention import rows_at
from slipstream.backends.native.kernels.compiled import EXACT, kernel
from slipstream.backends.native.kernels.memory import address_of, call, floats, integers, pointer
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.records import CONVOLUTION, DELTA, RECURRENT, SNAPSHOT, STATE
from slipstream.backends.native.kernels.state_tiles import change_and_recall_tile, change_tile, recall_tile
from slipstream.backends.native.kernels.tiles import sum_of_squares

SAME_LENGTH = np.float32(1e-6)
"""Added to the squared length of q and k in Gated DeltaNet before q and k are divided by their length."""


@kernel()
def states_at(address, count):
    """The array STATE [count] at an address."""
    return carray(pointer(address), (count,), STATE)


@kernel()
def snapshot_of(state, number):
    """SNAPSHOT record `number` of a sequence."""
    return carray(pointer(state.snapshots), (state.snapshot_count,), SNAPSHOT)[number]


@kernel()
def scratch_of(part):
    """Scratch bytes of a unit: a copy of the state, three vectors of K, four of V, and the decay."""
    return 4 * (part.key * part.value + 3 * part.key + 4 * part.value + PANEL)


@kernel()
def _part(job):
    return carray(pointer(job.part), (1,), RECURRENT)[0]


@kernel()
def _inputs(job, part, state, token):
    """Address of the inputs of a token, which are a row of this pass or of the ring."""
    if token >= state.past:
        return job.rows + 4 * job.stride * (state.first + token - state.past)
    return state.ring + 4 * (job.ring * part.kept_before + token % job.ring * part.kept)


@kernel(fastmath=EXACT)
def _convolve(job, part, state, token, first, out):
    """out = the convolution of the channels from `first` on, at a token. Taps are added from the oldest token on."""
    count = out.shape[0]
    if part.conv_bias:
        bias = floats(part.conv_bias + 4 * first, count)
        for i in range(count):
            out[i] = bias[i]
    else:
        for i in range(count):
            out[i] = 0
    for j in range(max(part.taps - 1 - token, 0), part.taps):
        x = floats(_inputs(job, part, state, token - part.taps + 1 + j) + 4 * first, count)
        weight = floats(part.conv + 4 * (j * part.channels + first), count)
        for i in range(count):
            out[i] += weight[i] * x[i]


@kernel(fastmath=EXACT)
def _activate(job, part, state, token, first, out):
    """`_convolve`, then SiLU."""
    _convolve(job, part, state, token, first, out)
    for i in range(out.shape[0]):
        out[i] = silu(out[i])


@kernel(fastmath=EXACT)
def _to_length(x, scale):
    """Divide x by its length, and multiply it by `scale`."""
    factor = scale / np.sqrt(sum_of_squares(address_of(x), x.shape[0]) + SAME_LENGTH)
    for i in range(x.shape[0]):
        x[i] *= factor


@kernel()
def _softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@kernel(fastmath=EXACT)
def _decay_and_step(part, inputs, head):
    """(decay g, step) of a head, float32: the step is beta in Gated DeltaNet, the time step in Mamba-2."""
    raw = floats(inputs + 4 * part.channels, 2 * part.heads)
    rate, bias = floats(part.rate, part.heads)[head], floats(part.step_bias, part.heads)[head]
    if part.kind == DELTA:
        step = np.float64(1) / (np.float64(1) + math.exp(-np.float64(raw[head])))
        decay = math.exp(rate * _softplus(np.float64(raw[part.heads + head] + bias)))
        return np.float32(decay), np.float32(step * part.step_scale)
    step = _softplus(np.float64(raw[head] + bias))
    return np.float32(math.exp(rate * step)), np.float32(step)


@kernel()
def _vector(address, number, count):
    """Vector `number` of several vectors [count] at an address."""
    return floats(address + 4 * number * count, count)


@kernel()
def _go_through(tile, cells, decay, k, q, change, out, following, recalled):
    """Call a function of `state_tiles`."""
    call(
        tile,
        (
            address_of(cells), address_of(decay), address_of(k), address_of(q), address_of(change), address_of(out),
            address_of(following), address_of(recalled), k.shape[0], change.shape[0],
        ),
    )  # fmt: skip


@kernel()
def _activate_key(job, part, state, token, first, scale, out):
    """`_activate`; in Gated DeltaNet the result then gets the length `scale`."""
    _activate(job, part, state, token, first, out)
    if part.kind == DELTA:
        _to_length(out, scale)


@kernel(fastmath=EXACT)
def _set_change(v, decay, step, recalled, change):
    for j in range(v.shape[0]):
        change[j] = step * (v[j] - decay * recalled[j])


@kernel()
def recur(job, unit, thread):
    """Unit of work: one head of one sequence. Afterwards the state contains `state.commit` tokens of earlier passes and
    `state.settled` tokens of this pass, and each snapshot has the state after its `at` tokens.

    In Gated DeltaNet, a token's change depends on recalled = k' S. The loop that applies the change of a token also
    computes this for the next token, so S is read and written once per token. In Mamba-2, recalled is 0."""
    part = _part(job)
    sequence, head = unit // part.heads, unit % part.heads
    state, size = states_at(job.states, sequence + 1)[sequence], part.key * part.value
    scratch = job.scratch + thread * job.scratch_bytes
    copy, keys = floats(scratch, size), scratch + 4 * size
    q, k, following = _vector(keys, 0, part.key), _vector(keys, 1, part.key), _vector(keys, 2, part.key)
    values = keys + 12 * part.key
    v, change, recalled = _vector(values, 0, part.value), _vector(values, 1, part.value), _vector(values, 2, part.value)
    unused, decay = _vector(values, 3, part.value), floats(values + 16 * part.value, 1)
    place = 4 * (part.cells_before + head * size)
    cells = floats(state.cells + place, size)
    group = head % part.groups if part.tiled else head * part.groups // part.heads
    first_key = (part.groups + group) * part.key
    first, certain, end = integers(state.committed, 1)[0], state.commit + state.settled, state.past + state.count
    for j in range(part.value):
        recalled[j] = 0
    for token in range(first, end):
        if token == first:
            _activate_key(job, part, state, token, first_key, np.float32(1), k)
            if part.kind == DELTA:
                _go_through(recall_tile(), cells, decay, k, q, change, unused, k, recalled)
        if token == certain:
            for i in range(size):
                copy[i] = cells[i]
            cells = copy
        _activate_key(job, part, state, token, group * part.key, np.float32(1) / np.sqrt(np.float32(part.key)), q)
        _activate(job, part, state, token, 2 * part.groups * part.key + head * part.value, v)
        decay[0], step = _decay_and_step(part, _inputs(job, part, state, token), head)
        _set_change(v, decay[0], step, recalled, change)
        out, row = unused, state.first + token - state.past
        if token >= state.past:
            out = floats(job.out + 4 * (job.out_stride * row + head * part.value), part.value)
        tile = change_tile()
        if token + 1 < end:
            _activate_key(job, part, state, token + 1, first_key, np.float32(1), following)
            if part.kind == DELTA:
                tile = change_and_recall_tile()
        _go_through(tile, cells, decay, k, q, change, out, following, recalled)
        k, following = following, k
        if part.skip:
            weight = floats(part.skip, part.heads)[head]
            for j in range(part.value):
                out[j] += weight * v[j]
        for number in range(state.snapshot_count):
            snapshot = snapshot_of(state, number)
            if token + 1 == snapshot.at:
                kept = floats(snapshot.cells + place, size)
                for i in range(size):
                    kept[i] = cells[i]


@kernel(fastmath=EXACT)
def finish(job, unit, thread):
    """Unit of work: one row. Normalise the outputs of its heads in groups, and gate them before or after the norm. If
    the layer is a convolution, compute and gate the convolution."""
    part = _part(job)
    out, inputs = floats(job.out + 4 * job.out_stride * unit, part.heads * part.value), job.rows + 4 * job.stride * unit
    gates = floats(inputs + 4 * part.gate, out.shape[0])
    if part.kind == CONVOLUTION:
        sequence = rows_at(job.at, unit + 1)[unit].sequence
        state = states_at(job.states, sequence + 1)[sequence]
        _convolve(job, part, state, state.past + unit - state.first, 0, out)
        for i in range(out.shape[0]):
            out[i] *= gates[i]
        return
    if part.gate_first or not part.norm:
        for i in range(out.shape[0]):
            out[i] *= silu(gates[i])
    if part.norm:
        for start in range(0, out.shape[0], part.normed):
            group = out[start : start + part.normed]
            rms_norm(group, floats(part.norm + 4 * (start % part.norm_width), part.normed), part.eps, group)
    if part.norm and not part.gate_first:
        for i in range(out.shape[0]):
            out[i] *= silu(gates[i])


@kernel()
def gate_inputs(job, unit, thread):
    """Unit of work: one row of a convolution, whose input is the product of two parts of the row."""
    part = _part(job)
    row = floats(job.rows + 4 * job.stride * unit, 2 * part.channels)
    for i in range(part.channels):
        row[i] *= row[part.channels + i]


@kernel()
def _keep(job, part, state, token, address):
    """Copy the inputs of a token to an address."""
    x, kept = floats(_inputs(job, part, state, token), part.kept), floats(address, part.kept)
    for i in range(part.kept):
        kept[i] = x[i]


@kernel()
def remember(job, unit, thread):
    """Unit of work: one sequence. Copy the inputs that a later pass may need to the ring. Copy the last taps - 1 inputs
    before each snapshot to the snapshot; a convolution that starts from the snapshot reads them."""
    part, state = _part(job), states_at(job.states, unit + 1)[unit]
    for number in range(state.snapshot_count):
        snapshot = snapshot_of(state, number)
        for j in range(part.taps - 1):
            token = snapshot.at - part.taps + 1 + j
            if token >= 0:
                _keep(job, part, state, token, snapshot.tails + 4 * (part.tail_before + j * part.kept))
    for token in range(max(state.past, state.commit + state.settled - part.taps + 1), state.past + state.count):
        place = job.ring * part.kept_before + token % job.ring * part.kept
        _keep(job, part, state, token, state.ring + 4 * place)


@kernel()
def advance(states, count, lag):
    """Update the states after a pass, for a next pass with one row of each sequence."""
    at = states_at(states, count)
    for b in range(count):
        state = at[b]
        integers(state.committed, 1)[0] = state.commit + state.settled
        state.past += state.count
        state.commit = max(state.commit + state.settled, state.past - lag)
        state.settled, state.first, state.count, state.snapshot_count = 0, b, 1, 0
