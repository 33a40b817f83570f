"""Triton kernels of a pass over few rows. A kernel reads each weight once for all rows. A row is computed in the same
way in any batch, so logits are batch-invariant up to `small_pass.MOST_ROWS` rows.

M = rows, d = columns of the residual stream (float32 between the layers), H query heads and Hk key/value heads of D
values, G = H / Hk. The inputs of the rows lie in one int64 table [fields, ROWS] (`small_pass.Inputs`): kernels advance
it on the device, so that several decoding steps need no host.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

ROWS = tl.constexpr(64)
"""Width of the table of inputs."""
BLOCK = tl.constexpr(32)
"""Slots in a block of the KV cache; the same as `kv.blocks.BLOCK`."""
(TOKEN, POSITION, SEQ, INDEX, BITS, TILE, COUNT, SELECT, PAST, NEXT, STEP, INVERSE, PASS) = map(tl.constexpr, range(13))
"""Fields of a row: TOKEN, POSITION, SEQ (its sequence; -1: padding), INDEX (among the new tokens of the sequence), BITS
(bit i is set if the row sees the new token with index i). Fields of a tile of attention: TILE (first row; -1: no tile)
and COUNT (number of rows, all of one sequence). SELECT: the row whose logits pick token p. Fields of a sequence: PAST
(number of slots that every row sees), NEXT (position of the next picked token), STEP (number of tokens picked so far),
INVERSE (1 / temperature, as a float64). PASS: the number of sequences, and the first id that may not be picked."""

TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def embed(inputs, table, x, vocab, width, BLOCK_WIDTH: tl.constexpr):
    """x [M, d] = the tokens' rows of `table` [V, d]; NaN for token ids outside of the table. Grid: M, pieces of d."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    token = tl.load(inputs + TOKEN * ROWS + row)
    known = tl.where((token >= 0) & (token < vocab), width, 0)
    values = tl.load(table + token * width + at, mask=at < known, other=float("nan"))
    tl.store(x + row * width + at, values.to(tl.float32), mask=at < width)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of an MLP, in float32."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return tl.maximum(x, 0.0)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x, norm, weight, bias, out, tops, sums, firsts, inputs, inverse, rows, outs, columns, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply x [M, columns] by the transpose of `weight` [outs, columns]. Grid: pieces of `outs`, tiles of BM rows.
    Tiles read the same weights at about the same time, so all tiles but the first find them in the GPU's cache.

    NORM  x is the residual stream, and its RMS norm is multiplied by the weights. The norm's weight scales the columns.
          The root mean square is known only at the end, so it divides the sums.
    KIND  "store": write to `out` [M, outs]. "add": add to the residual stream `out`. "gate": `weight` holds a gate and
          an up projection, [2 outs, columns]; out = activation(gate) * up. "head": write logits in float32. For each
          piece of the vocabulary also write the highest logit of an id that may be picked, the first id with this
          logit, and the sum of exp((logit - highest) / T).
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    known = tl.minimum(n, outs - 1).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(0, columns, BK):
        at = start + tl.arange(0, BK)
        inside = m[:, None] < rows
        if EVEN:
            w = tl.load(weight + known[:, None] * columns + at[None, :])
        else:
            inside = inside & (at[None, :] < columns)
            w = tl.load(weight + known[:, None] * columns + at[None, :], mask=at[None, :] < columns, other=0.0)
        values = tl.load(x + m[:, None] * columns + at[None, :], mask=inside, other=0.0)
        if NORM:
            squares += tl.sum(values * values, 1)
            values = values * tl.load(norm + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
        values = values.to(weight.dtype.element_ty)
        total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
        if KIND == "gate":
            second = weight + (known + outs)[:, None] * columns + at[None, :]
            if EVEN:
                w = tl.load(second)
            else:
                w = tl.load(second, mask=at[None, :] < columns, other=0.0)
            up = tl.dot(values, tl.trans(w), up, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / columns + eps)
        total = total * scale[:, None]
        up = up * scale[:, None]
    if BIAS:
        total += tl.load(bias + known).to(tl.float32)[None, :]
        if KIND == "gate":
            up += tl.load(bias + outs + known).to(tl.float32)[None, :]
    written = (m[:, None] < rows) & (n[None, :] < outs)
    place = out + m[:, None] * outs + n[None, :]
    if KIND == "add":
        total += tl.load(place, mask=written, other=0.0)
    if KIND == "gate":
        total = activate(total, ACTIVATION) * up
    tl.store(place, total.to(out.dtype.element_ty), mask=written)
    if KIND == "head":
        possible = (n < tl.minimum(outs, tl.load(inputs + PASS * ROWS + 1)))[None, :]
        values = tl.where(possible, total, float("-inf"))
        top = tl.max(values, 1)
        owner = tl.maximum(tl.load(inputs + SEQ * ROWS + m), 0)
        weights = tl.exp((values - top[:, None]) * tl.load(inverse + owner).to(tl.float32)[:, None])
        at = m * tl.num_programs(0) + tl.program_id(0)
        tl.store(tops + at, top, mask=m < rows)
        tl.store(sums + at, tl.sum(tl.where(possible, weights, 0.0), 1), mask=m < rows)
        first = tl.min(tl.where(values == top[:, None], n[None, :], outs), 1)
        tl.store(firsts + at, first, mask=m < rows)


@triton.jit
def rotate(
    qkv, q_norm, k_norm, frequencies, factor, inputs, tables, queries, cache, heads, kv_heads, places, table_width, eps,
    NORM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate queries and keys of `qkv` [M, H + 2 Hk, D]. Write queries to `queries` [M, H, D], keys and
    values to their slots in the layer's `cache` [2, Hk, places, D]. Grid: M, pieces of H + 2 Hk. frequencies: [D /
    2]."""
    row = tl.program_id(0)
    owner = tl.load(inputs + SEQ * ROWS + row)
    if owner < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < heads + 2 * kv_heads) & (i < HALF)
    at = qkv + (row * (heads + 2 * kv_heads) + head) * 2 * HALF + i
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_low, turned_high = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        weight = tl.where(head < heads, q_norm, k_norm) + i
        turned_low = low * scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        turned_high = high * scale * tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
    # Angles are computed in float64 and without full turns, so that they are accurate at large positions.
    turns = tl.load(inputs + POSITION * ROWS + row) * tl.load(frequencies + i, mask=i < HALF, other=0.0) / TWO_PI
    angle = ((turns - tl.floor(turns)) * TWO_PI).to(tl.float32)
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    turns_over = head < heads + kv_heads
    low = tl.where(turns_over, turned_low * cos - turned_high * sin, low)
    high = tl.where(turns_over, turned_high * cos + turned_low * sin, high)
    slot = tl.load(inputs + PAST * ROWS + owner) + tl.load(inputs + INDEX * ROWS + row)
    block = tl.load(tables + owner * table_width + slot // BLOCK).to(tl.int64)
    stored = cache + ((head - heads) * places.to(tl.int64) + block * BLOCK + slot % BLOCK) * 2 * HALF + i
    to = tl.where(head < heads, queries + (row * heads + head) * 2 * HALF + i, stored)
    tl.store(to, low.to(queries.dtype.element_ty), mask=inside)
    tl.store(to + HALF, high.to(queries.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    queries, cache, inputs, tables, out, parts, tops, sums, heads, kv_heads, places, table_width, scale, window,
    G: tl.constexpr, TILE_ROWS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute attention for tiles of at most TILE_ROWS rows of one sequence. The G query heads of a key/value head are
    rows of one product. Grid: tiles, Hk, SPLITS. Split s reads slots s * CHUNK to (s + 1) * CHUNK - 1, so a row's sums
    do not depend on the number of splits; `merge` joins the splits. The online softmax (FlashAttention-2, arXiv
    2307.08691) uses powers of 2, so `scale` includes log2(e)."""
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(inputs + TILE * ROWS + tile)
    if first < 0:
        return
    count = tl.load(inputs + COUNT * ROWS + tile)
    owner = tl.load(inputs + SEQ * ROWS + first)
    past = tl.load(inputs + PAST * ROWS + owner)
    r, d = tl.arange(0, PADDED), tl.arange(0, D_PADDED)
    inside = (r // G < count) & (r < TILE_ROWS * G)
    row = first + tl.minimum(r // G, count - 1)
    head = group * G + r % G
    q_at = (row * heads + head)[:, None] * D + d[None, :]
    q_inside = inside[:, None] & (d < D)[None, :]
    q = tl.load(queries + q_at, mask=q_inside, other=0.0)
    bits, position = tl.load(inputs + BITS * ROWS + row), tl.load(inputs + POSITION * ROWS + row)
    begin = split * CHUNK
    stop = tl.minimum(begin + CHUNK, past + tl.load(inputs + INDEX * ROWS + first + count - 1) + 1)
    if WINDOW:
        begin = tl.maximum(begin, (tl.maximum(tl.min(position) - window + 1, 0) // SLOTS) * SLOTS)
    top = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    seen = tl.zeros((PADDED, D_PADDED), tl.float32)
    for start in range(begin, stop, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        held = slot < stop
        block = tl.load(tables + owner * table_width + slot // BLOCK, mask=held, other=0).to(tl.int64)
        at = (group * places.to(tl.int64) + block * BLOCK + slot % BLOCK)[:, None] * D + d[None, :]
        kv_inside = held[:, None] & (d < D)[None, :]
        keys = tl.load(cache + at, mask=kv_inside, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        new = slot - past
        visible = (new < 0)[None, :] | (((bits[:, None] >> tl.maximum(new, 0)[None, :]) & 1) > 0)
        if WINDOW:
            beside = first - tl.load(inputs + INDEX * ROWS + first) + tl.maximum(new, 0)
            beside = tl.load(inputs + POSITION * ROWS + beside, mask=held, other=0)
            visible = visible & (position[:, None] - tl.where(new < 0, slot, beside)[None, :] < window)
        scores = tl.where(visible & held[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        values = tl.load(cache + kv_heads * places.to(tl.int64) * D + at, mask=kv_inside, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        seen = tl.dot(weights.to(values.dtype), values, seen * shrink[:, None], input_precision="ieee")
        top = higher
    if SPLITS == 1:
        tl.store(out + q_at, (seen / total[:, None]).to(out.dtype.element_ty), mask=q_inside)
    else:
        at = (row * heads + head) * SPLITS + split
        tl.store(tops + at, top, mask=inside)
        tl.store(sums + at, total, mask=inside)
        tl.store(parts + at[:, None] * D + d[None, :], seen, mask=q_inside)


@triton.jit
def merge(inputs, out, parts, tops, sums, heads, D: tl.constexpr, D_PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """Join the splits of `attend` one after another, and write them to `out` [M, H, D]. Grid: M, H."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(inputs + SEQ * ROWS + row) < 0:
        return
    d = tl.arange(0, D_PADDED)
    at = (row * heads + head) * SPLITS
    best = tl.max(tl.load(tops + at + tl.arange(0, SPLITS)))
    total, seen = 0.0, tl.zeros((D_PADDED,), tl.float32)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(tops + at + split) - best)
        total += weight * tl.load(sums + at + split)
        seen += weight * tl.load(parts + (at + split) * D + d, mask=d < D, other=0.0)
    tl.store(out + (row * heads + head) * D + d, (seen / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def choose(
    tops, sums, firsts, inputs, inverse, ids, confidences, pieces,
    PIECES: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """Write the argmax of the logits of row SELECT[p] to ids[STEP, p], and its probability at the sequence's
    temperature to confidences[STEP, p]. The probability is NaN if the logits have no distribution. A step takes 2 *
    ROWS numbers in `ids` and in `confidences`. ADVANCE: this token is the input of sequence p in the next pass. Grid:
    the rows of this pass."""
    p = tl.program_id(0)
    alive = p < tl.load(inputs + PASS * ROWS)
    step = tl.load(inputs + STEP * ROWS + p)
    row = tl.load(inputs + SELECT * ROWS + p)
    owner = tl.maximum(tl.load(inputs + SEQ * ROWS + row), 0)
    i = tl.arange(0, PIECES)
    inside = i < pieces
    top = tl.load(tops + row * pieces + i, mask=inside, other=float("-inf"))
    best = tl.max(top)
    total = tl.load(sums + row * pieces + i, mask=inside, other=0.0)
    shares = tl.exp((top - best) * tl.load(inverse + owner).to(tl.float32))
    total = tl.sum(total * tl.where(inside & (top != float("-inf")), shares, 0.0))
    first = tl.load(firsts + row * pieces + i, mask=inside & (top == best), other=2147483647)
    token = tl.min(first).to(tl.int64)
    tl.store(ids + step * 2 * ROWS + p, token)
    tl.store(confidences + step * 2 * ROWS + p, 1.0 / total.to(tl.float64))
    if ADVANCE:
        following = tl.load(inputs + NEXT * ROWS + p)
        tl.store(inputs + TOKEN * ROWS + p, tl.where(alive & (total == total), token, 0))
        tl.store(inputs + POSITION * ROWS + p, following)
        tl.store(inputs + SEQ * ROWS + p, tl.where(alive, p, -1))
        tl.store(inputs + INDEX * ROWS + p, 0)
        tl.store(inputs + BITS * ROWS + p, 1)
        tl.store(inputs + TILE * ROWS + p, tl.where(alive, p, -1))
        tl.store(inputs + COUNT * ROWS + p, 1)
        tl.store(inputs + SELECT * ROWS + p, p)
        tl.store(inputs + PAST * ROWS + p, following)
        tl.store(inputs + NEXT * ROWS + p, following + 1)
        tl.store(inputs + STEP * ROWS + p, step + 1)
