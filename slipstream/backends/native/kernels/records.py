"""The arguments of kernels: records whose fields are numbers and addresses.

All models have the same layout: a pass is compiled once, and models and weight formats differ only in data. Host code
fills the records (`packed_weights`, `paged`); the owner of the memory at an address keeps it alive. All fields are
int64 unless noted; an address of 0 means "none".

R rows, d width, H query heads, Hk key/value heads, D head size, I inner width, V vocabulary, L layers, B sequences.
"""

from typing import Any

import numpy as np


def _record(**fields: Any) -> np.dtype:
    return np.dtype(list(fields.items()), align=True)


_I, _F = np.int64, np.float32

MATRIX = _record(
    tile=_I,  # address of the code: see `tiles.matrix_tile`
    format=_I,  # index in `formats.FORMATS`
    most_rows=_I,  # largest number of rows of a tile
    weights=_I,
    scales=_I,  # float32 [outs], for integer weights
    bias=_I,  # float32 [outs]
    outs=_I,  # padded to a multiple of ALIGN
    width=_I,  # number of inputs
    columns=_I,  # number of inputs, padded for the format
    group=_I,  # number of columns that share a scale of activations; 0: all columns
    out_bytes=_I,  # bytes of the weights of one output
    row_bytes=_I,  # bytes of one packed row
    factors=_I,  # float32 [outs], multiply the outputs; 0: none
)
"""A linear layer [out, in]."""

EMBEDDING = _record(values=_I, format=_I, panelled=_I, width=_I, count=_I, group=_I, bits=_I, span=_I, minima=_I)
"""An embedding table [count, width], stored by rows or in the panels of a matrix. group, bits, span, minima: as in
`Format`."""

MODEL = _record(
    layers=_I,  # address of LAYER [count]
    count=_I,
    experts=_I,  # address of MATRIX [n, 2]: up and down of each expert
    expert_count=_I,
    width=_I,
    vocab=_I,
    layer_norm=_I,  # 1: LayerNorm, 0: RMS norm
    activation=_I,  # SILU, GELU, GELU_TANH, RELU, RELU_SQUARED or SWIGLU
    gated=_I,
    embed=EMBEDDING,
    positions=EMBEDDING,  # learned position embeddings; count 0 if there are none
    norm=_I,  # the final norm, float32 [d]; 0 in a Markov head, whose two tables are a model without layers
    norm_bias=_I,
    head=MATRIX,
    experts_per_token=_I,
    most_experts=_I,  # largest number of experts of a layer
    normed_experts=_I,  # whether the weights of the chosen experts are scaled to sum to 1
    sigmoid_experts=_I,  # whether scores become weights by the sigmoid instead of the softmax
    groups=_I,  # number of groups of experts; experts are chosen from the best `top_groups` groups
    top_groups=_I,
    group_best=_I,  # number of a group's best experts whose scores rank the group: 1 or 2
    experts_scale=_F,  # multiplies the weights of the chosen experts
    weighted_inputs=_I,  # whether weights multiply the inputs of experts instead of the outputs
    eps=_F,
    out_eps=_F,  # eps of the norms of outputs
    limit=_F,  # clamps the inputs of SWIGLU
    embed_norm=_I,  # float32 [d], ones: embeddings are normalised; 0: none
    embedding_scale=_F,
    residual_scale=_F,
    logits_scale=_F,
    logits_cap=_F,  # 0: none
    side_width=_I,  # width of each token's embedding for a layer; 0: none
    side_embed=EMBEDDING,  # [V, L * side_width]
    side_projection=MATRIX,  # projects the embedding, [L * side_width, d]
    side_norm=_I,  # float32 [side_width]
)

RECURRENT = _record(
    kind=_I,  # ATTENTION (no recurrent layer), CONVOLUTION, DELTA or STATE_SPACE
    taps=_I,  # number of taps of the convolution
    heads=_I,  # 1 in a convolution
    groups=_I,  # number of groups of heads with the same q and k
    tiled=_I,  # whether head h is in group h % groups; else heads of a group are neighbours
    key=_I,  # K; 0 in a convolution
    value=_I,  # V
    channels=_I,  # channels of the convolution
    kept=_I,  # how many numbers of a row later passes need
    gate=_I,  # index of the first gate in a row
    conv=_I,  # float32 [taps, channels]
    conv_bias=_I,  # float32 [channels]
    rate=_I,  # float32 [heads]: negative, how fast a state decays
    step_bias=_I,  # float32 [heads]
    step_scale=_F,  # multiplies beta
    skip=_I,  # float32 [heads]: factor by which v is added to the output
    norm=_I,  # float32 [norm_width], norm of the outputs
    norm_width=_I,
    normed=_I,  # how many outputs are normalised together
    gate_first=_I,  # whether the gate comes before the norm
    cells_before=_I,  # how many numbers the states of earlier layers have
    kept_before=_I,  # sum of `kept` over earlier layers
    tail_before=_I,  # sum of (taps - 1) * kept over earlier layers
    eps=_F,
)
"""A recurrent layer: see `recurrent`."""

ATTENTION, CONVOLUTION, DELTA, STATE_SPACE = range(4)

LATENT = _record(
    rank=_I,  # width of the latent vector; 0: keys and values are computed from the input
    query_rank=_I,  # width of the latent vector of queries; 0: queries are computed from the input
    rotated=_I,  # rotated dimensions of a query, followed by `plain` dimensions that are not rotated
    plain=_I,
    norm=_I,  # float32 [rank]
    q_norm=_I,  # float32 [query_rank]
    eps=_F,
    q_b=MATRIX,  # [H * (rotated + plain), query_rank]
    k_up=_I,  # addresses of MATRIX [H]: [rank, plain], [value, rank]
    v_up=_I,
)
"""Latent attention: see `latent`."""

LAYER = _record(
    heads=_I,
    kv_heads=_I,
    size=_I,
    kv=_I,  # the layer of the cache that is read
    writes=_I,  # whether keys and values are computed and written; else an earlier layer's are read
    norm=_I,  # 0: none
    norm_bias=_I,
    out_norm=_I,  # norm of attention's output; 0: none
    mlp_norm=_I,
    mlp_norm_bias=_I,
    mlp_out_norm=_I,
    q_norm=_I,  # float32 [D], of each head, or of all heads together; 0: none
    k_norm=_I,
    wide_norm=_I,  # whether q_norm and k_norm normalise all heads together
    late_norm=_I,  # whether q_norm and k_norm come after the rotary embedding
    value_norm=_I,  # float32 [D], ones; 0: none
    key_is_value=_I,
    rotary=_I,  # 1 + the number of the table of cos and sin; 0: none
    rotated=_I,  # how many dimensions of a head are rotated
    growth=_I,  # 1 + the number of the table of factors that multiply queries; 0: none
    sinks=_I,  # float32 [H]; 0: none
    gate=_I,  # number of attention outputs that are multiplied by the same gate, see the end of `qkv`; 0: no gates
    parallel=_I,  # whether the MLP reads the same x as attention
    window=_I,  # a row sees positions that are nearer than this; 0: all; -C: positions of its chunk of C positions
    causal=_I,  # no row sees a later row, even if the rows of the pass allow it
    scale=_F,  # multiplies scores
    cap=_F,  # soft cap of scores; 0: none
    correction=_I,  # float32 [experts], added to scores when experts are chosen; 0: none
    router_norm=_I,  # norm of the router's input
    experts_norm=_I,  # norm of the experts' input
    experts_out_norm=_I,  # norm of the sum of the experts' outputs; 0: none
    shared_out_norm=_I,  # norm of the shared expert's output; 0: none
    expert_scales=_I,  # float32 [experts], multiply the weights of chosen experts; 0: none
    factor=_F,  # multiplies the output
    side_gate=MATRIX,
    side_out=MATRIX,
    side_out_norm=_I,
    shared_gate=_I,  # whether there is `shared_router`
    shared_router=MATRIX,
    qkv=MATRIX,
    second=MATRIX,  # further outputs of the first product, stored in another format than `qkv`
    second_at=_I,  # index of these outputs in a row
    third=MATRIX,
    third_at=_I,
    o=MATRIX,
    out_scale=_F,  # multiplies the outputs of `o`
    beside=MATRIX,  # `qkv` and `o` of attention beside a recurrence
    beside_o=MATRIX,
    up=MATRIX,  # gate and up, stacked, if the MLP is gated
    down=MATRIX,
    router=MATRIX,
    experts=_I,  # number of experts; 0: the MLP is `up` and `down`; otherwise `up` and `down` are the shared expert
    first_expert=_I,  # index of the first expert in `MODEL.experts`
    recurrent=RECURRENT,
    latent=LATENT,
)

SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, SWIGLU = range(6)

ROW = _record(
    sequence=_I,  # row of the block tables
    slot=_I,  # KV slot of the row's keys and values
    position=_I,
    length=_I,  # number of slots to attend to; the row's own slot is the last or, in a tree, among the last
    past=_I,  # number of slots of its sequence before this pass
)
"""The sequence, slot and position of a row."""


CACHE = _record(
    layers=_I,  # int64 [L, 2]: addresses of keys [blocks, Hk, D, slots] and values [blocks, Hk, slots, D] by `LAYER.kv`
    tables=_I,  # int64 [B, stride]: the blocks that a sequence owns
    stride=_I,
    slots=_I,  # slots of a block
    bytes=_I,  # bytes of a number: 4 float32, 2 float16, 1 int8 with scales
    scores=_I,  # scores, mix: addresses of the code, see `tiles.attention_tile`
    mix=_I,
    states=_I,  # STATE [B]; 0 for a model without recurrent layers
    sequences=_I,  # B
    ring=_I,  # number of tokens whose inputs a ring keeps
    lag=_I,  # how many of the last tokens, besides the rows of a pass, are not committed
)
"""The paged KV cache, and the states of recurrent layers."""

STATE = _record(
    cells=_I,  # float32: the states of all layers and heads
    ring=_I,  # float32: [ring, kept] of each layer
    committed=_I,  # address of an int64: how many tokens the state contains
    past=_I,  # number of tokens before this pass
    commit=_I,  # number of tokens of earlier passes that the state must contain after this pass
    settled=_I,  # number of rows of this pass that the state must contain, too
    first=_I,  # first row of the sequence in this pass
    count=_I,  # number of its rows
    snapshots=_I,  # SNAPSHOT [snapshot_count]
    snapshot_count=_I,
)
"""The states of a sequence in recurrent layers: see `recurrent`."""

SNAPSHOT = _record(at=_I, cells=_I, tails=_I)
"""cells receives the state after `at` tokens, tails the inputs of the last taps - 1 of these tokens."""

ROWS = _record(
    at=_I,  # ROW [count]
    count=_I,
    hidden=_I,  # bool [count, stride]: which rows of its sequence in this pass a row does not see
    stride=_I,  # 0 if each row sees all rows before it
    tables=_I,  # addresses of float32 tables: cos and sin [positions, 2, n / 2], and factors of queries [positions]
)
"""The rows of a pass."""


# --- the work of threads: one record for each kind -------------------------------------------------------------------

SECTION = _record(
    matrix=_I,  # address
    first=_I,
    rows=_I,
)
"""Neighbouring rows that are multiplied by the same matrix: all rows of a pass, or the rows that chose an expert."""

PREPARE = _record(
    model=_I, sections=_I, pieces=_I, inputs=_I, stride=_I, gather=_I, mode=_I, weight=_I, bias=_I, packed=_I,
    scratch=_I, scratch_bytes=_I,
)  # fmt: skip
"""Rows to transform (`mode`) and to pack for a product: see `products.prepare`. sections: address of SECTIONs. A
SECTION has `pieces` units of work."""

PRODUCT = _record(sections=_I, pieces=_I, packed=_I, y=_I, stride=_I, add=_I, share=_I, bands=_I, scale=_F, cap=_F)
"""Packed rows times the matrices of their SECTIONs: see `products.product`."""

MERGE = _record(x=_I, stride=_I, y=_I, y_stride=_I, width=_I, rows=_I, each=_I, norm=_I, scale=_F, factor=_F, eps=_F)
"""Outputs to normalise and to add to the residual stream: see `products.merge`."""

WRITE_KV = _record(
    layer=_I, qkv=_I, stride=_I, rows=_I, count=_I, positions=_I, keys=_I, values=_I, bytes=_I, tables=_I,
    table_stride=_I, slots=_I, each=_I, queries=_I, queries_stride=_I, up=_I, eps=_F,
)  # fmt: skip
"""Heads to normalise and rotate, keys and values to write: see `attention.write_kv`. queries, up: see `latent`."""

ATTEND = _record(
    q=_I, stride=_I, keys=_I, values=_I, bytes=_I, tables=_I, table_stride=_I, slots=_I, rows=_I, hidden=_I,
    hidden_stride=_I, active=_I, starts=_I, heads=_I, kv_heads=_I, size=_I, window=_I, causal=_I, out=_I,
    out_stride=_I, scratch=_I, scratch_bytes=_I, width=_I, scores=_I, mix=_I, pieces=_I, sinks=_I, gate=_I,
    gate_each=_I, scale=_F, cap=_F,
)  # fmt: skip
"""Attention: see `attention`."""

RECUR = _record(
    part=_I, rows=_I, stride=_I, at=_I, states=_I, ring=_I, out=_I, out_stride=_I, scratch=_I, scratch_bytes=_I,
)  # fmt: skip
"""A recurrent layer: see `recurrent`."""

PREPARED, PRODUCTS, KV_WRITTEN, ATTENDED, SCORED, SOFTMAX, MIXED, MERGED = map(np.int64, range(8))
INPUTS_GATED, RECURRED, FINISHED, REMEMBERED = map(np.int64, range(8, 12))
"""Kinds of work (`BOARD.op`)."""


NOTHING, ADD = np.int64(0), np.int64(1)
"""NOTHING: no address, or no flag. ADD: add a product to the output instead of replacing the output. Constants are
typed, because Numba compiles a kernel again for each literal number among its arguments."""

FINE, NOT_FINITE, NO_SUCH_TOKEN, NO_SUCH_POSITION = range(4)
"""Status of a pass. A negative status -n means that n bytes of scratch memory are needed."""


ROOM = _record(
    x=_I,  # float32 [R, stride]: the residual stream
    stride=_I,
    qkv=_I,
    qkv_stride=_I,
    mixed=_I,  # output of attention
    mixed_stride=_I,
    wide=_I,  # inside the MLP, before its activation function
    wide_stride=_I,
    packed=_I,  # rows packed for a product
    alone=_I,  # the input of a mixture, each row packed as a tile of its own
    chosen=_I,  # outputs of experts, [pairs, stride]
    pairs=_I,  # largest number of pairs of a row and an expert that are computed at a time
    side=_I,  # embeddings of all rows for all layers, `side_stride` apart
    side_stride=_I,
    up=_I,  # vectors of heads in latent attention
    up_stride=_I,
    bytes=_I,
)
"""Addresses of a pass's scratch memory; rows are padded to a multiple of ALIGN."""

BOARD = _record(
    op=_I,
    units=_I,
    threads=_I,  # threads used by this call
    size=_I,  # threads of the pool
    counters=_I,  # address: see `pool`
    address=_I,  # address of this record
    run=_I,  # address of `matrices.run_unit`
    run_layer=_I,  # address of `layer.one_layer`
    experts_read=_I,  # number of experts that a pass read, over all layers
    prepare=PREPARE,
    product=PRODUCT,
    whole=SECTION,  # all rows of a product with one matrix
    merge=MERGE,
    write_kv=WRITE_KV,
    attend=ATTEND,
    recur=RECUR,
    room=ROOM,
)
"""The work that threads share, one record for each kind."""


# --- draft heads -----------------------------------------------------------------------------------------------------

EAGLE = _record(
    decoder=MODEL,  # the head's layers, with the target's embedding; in EAGLE-3 the first norm is the embedding's
    fc=MATRIX,  # EAGLE-1, MTP: [d, d + W], reads embedding and feature; EAGLE-3, DFlash: [d, T * W], reads the taps
    taps=_I,
    target_width=_I,
    tap_norms=_I,  # float32 [T, W]
    joint_norm=_I,  # float32 [T * W]
    feature_norm=_I,  # float32 [d]; 0 in EAGLE-1 and MTP
    input_norms=_I,  # float32 [2, d]: norms of embedding and feature before `fc`, only in MTP; else 0
    ids=_I,  # int64: target id of each draft id
    id_count=_I,
    normed_start=_I,  # whether the residual stream begins with the normed feature
    normed_end=_I,  # whether the next feature is the input of the output head
)
"""An EAGLE or DFlash head, or an MTP layer: see `passes`."""

MEDUSA = _record(
    first=MATRIX,  # [K * d, d]: the first block of every head, since all read the same state
    later=_I,  # MATRIX [laters]: the second blocks of all heads, then the third blocks of all heads, ...
    laters=_I,
    out=_I,  # MATRIX [outs]: one for each head, or one for all heads
    outs=_I,
)
"""K Medusa heads over states of width d: see `passes`."""

STORED_PRODUCT = _record(
    next=_I,  # the unit that is taken next
    half=_I,  # 1: weights in bfloat16, 0: in float32
    weights=_I,  # [outs, columns]
    bias=_I,  # float32 [outs]; 0: none
    x=_I,  # float32 [rows, columns]
    y=_I,  # float32 [rows, outs]
    columns=_I,
    outs=_I,
    rows=_I,
    share=_I,  # number of outputs of a unit
)
"""A product with a matrix in torch's memory layout: see `stored_products`."""
