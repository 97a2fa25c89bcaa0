"""Column sums of the softmax matrix in Triton, from FlashAttention's log-sum-exp.

A program owns a block of keys of one image and head and walks over that image's queries in order.
A probability exists only in registers; each column sum is written once. No atomics and no order
that depends on timing, so that the same input gives the same bits. An image's bits depend on its
own queries, keys and log-sum-exp and on the `Tuning` alone: not on other images of the batch, nor
on other heads up to the sum over heads (`mean_heads`).

Queries are the rows of each product: a thread of Hopper's matrix unit then holds few of them, needs
few log-sum-exps, and adds up its columns without a word to other threads until the end. (Keys as
rows compile to 9 instructions a probability instead of 4.3, for compute capability 9.0.)

Inputs may be views with strides. Where rows are not 16-byte aligned, a copy is made first.

Log-sum-exp as in FlashAttention-2 (arXiv 2307.08691, section 3.1). Column sums from it without the
matrix: also github.com/z-lab/flash-colsum, which has no images of mixed length, and no fixed order.
"""

# Triton gives the arguments of a kernel their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.visionzip.tuning import DEFAULT, WIDTHS, Tuning

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

# 2^f on [-0.5, 0.5] to a relative 3e-6: the polynomial of degree 4 with the least such error among
# those that are 1 at 0, so that what is clamped becomes exactly 0.
P0 = tl.constexpr(1.0)
P1 = tl.constexpr(0.6931241933669248)
P2 = tl.constexpr(0.2402409861162016)
P3 = tl.constexpr(0.05590642503615)
P4 = tl.constexpr(0.009582853150231788)
# Adding it leaves the nearest integer in the low bits: 1.5 · 2^23.
ROUND = tl.constexpr(12582912.0)

# Triton's interpreter multiplies the bits of bfloat16 as integers; it gets float32 instead.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Queries, keys, warps and stages of the pass that computes a missing log-sum-exp.
LSE_BLOCK_Q, LSE_BLOCK_K, LSE_WARPS, LSE_STAGES = 64, 128, 4, 2


# Counts and strides that change from batch to batch, and pointers that are read word by word. Left to
# itself the compiler makes another kernel for each that is 1 or a multiple of 16: a pause of a second
# in the middle of serving, and no promise of the same bits.
PLAIN: Any = {
    "do_not_specialize": (
        "images", "tokens", "slots", "programs", "heads", "stride", "query_token", "query_head",
        "key_token", "key_head", "lse_head", "out_head",
    ),
    "do_not_specialize_on_alignment": ("cu_seqlens", "lse", "parts", "out"),
}  # fmt: skip


# -- which program does what ---------------------------------------------------------------------


@triton.jit(**PLAIN)
def _table_kernel(
    cu_seqlens, table, images, tokens, slots, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Writes an image's start, length and first slot into each of its slots, one a block.

    One program an image. The last one also marks the slots left over as empty. Bounds are clipped
    to the tokens there are, so that no later program leaves its tensors.
    """
    image = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    first = 0
    for other in range(0, image, CHUNK):
        index = other + lane
        live = index < image
        a = tl.load(cu_seqlens + index, mask=live, other=0).to(tl.int32)
        b = tl.load(cu_seqlens + index + 1, mask=live, other=0).to(tl.int32)
        a = tl.minimum(tl.maximum(a, 0), tokens)
        b = tl.minimum(tl.maximum(b, a), tokens)
        first += tl.sum((b - a + BLOCK - 1) // BLOCK)
    a = tl.load(cu_seqlens + image).to(tl.int32)
    b = tl.load(cu_seqlens + image + 1).to(tl.int32)
    a = tl.minimum(tl.maximum(a, 0), tokens)
    b = tl.minimum(tl.maximum(b, a), tokens)
    last = first + (b - a + BLOCK - 1) // BLOCK
    for slot in range(first, last, CHUNK):
        index = slot + lane
        live = (index < last) & (index < slots)
        zero = tl.zeros([CHUNK], tl.int32)
        tl.store(table + index, zero + a, mask=live)
        tl.store(table + slots + index, zero + (b - a), mask=live)
        tl.store(table + 2 * slots + index, zero + first, mask=live)
    if image == images - 1:
        for slot in range(last, slots, CHUNK):
            index = slot + lane
            tl.store(table + slots + index, tl.zeros([CHUNK], tl.int32), mask=index < slots)


@triton.jit
def _place(pid, table, slots, heads, BLOCK: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Start and length of a program's image, its head and its block; length 0 if it has no work."""
    slot = pid // heads
    length = tl.load(table + slots + slot)
    start = tl.load(table + slot, mask=length > 0, other=0)
    first = tl.load(table + 2 * slots + slot, mask=length > 0, other=0)
    if HEADS_FIRST:
        head = pid % heads
        block = slot - first
    else:
        # Programs of one image are adjacent: heads · blocks of them, from heads · first on.
        blocks = tl.maximum((length + BLOCK - 1) // BLOCK, 1)
        rest = pid - first * heads
        head = rest // blocks
        block = rest % blocks
    return start, length, head, block


# -- pieces --------------------------------------------------------------------------------------


@triton.jit
def _rows(
    base,
    row,
    stride,
    length,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MASK: tl.constexpr,
):
    """Columns FIRST to FIRST + WIDTH of ROWS rows; zeros past the head's width and the image."""
    rows = tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    at = base + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if FIRST + WIDTH > DIM:
        mask = (columns < DIM)[None, :]
        if MASK:
            mask = mask & ((row + rows) < length)[:, None]
        return tl.load(at, mask=mask, other=0.0)
    elif MASK:
        return tl.load(at, mask=((row + rows) < length)[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _products(queries, keys, others=None):
    """Dot products in float32, of columns that follow those of `others`."""
    if INTERPRETED:
        queries = queries.to(tl.float32)
        keys = keys.to(tl.float32)
    return tl.dot(queries, tl.trans(keys), others)


@triton.jit
def _power(x):
    """2^x for x up to about 1 without the special-function unit; below -126 it fades to 0."""
    x = tl.maximum(x, -127.0)
    shifted = x + ROUND
    f = x - (shifted - ROUND)
    p = P4 * f + P3
    p = p * f + P2
    p = p * f + P1
    p = p * f + P0
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns; both stay in their threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _joined(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`_halves` undone."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def _exponentials(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POLYNOMIAL: tl.constexpr):
    """2^x, one in POLYNOMIAL of them by polynomial."""
    if POLYNOMIAL == 2:
        a, b = _halves(x, ROWS, COLUMNS)
        return _joined(tl.math.exp2(a), _power(b), ROWS, COLUMNS)
    elif POLYNOMIAL == 4:
        a, b = _halves(x, ROWS, COLUMNS)
        c, d = _halves(b, ROWS, COLUMNS // 2)
        b = _joined(tl.math.exp2(c), _power(d), ROWS, COLUMNS // 2)
        return _joined(tl.math.exp2(a), b, ROWS, COLUMNS)
    else:
        return tl.math.exp2(x)


# -- column sums ---------------------------------------------------------------------------------


@triton.jit
def _step(
    sums,
    key_1,
    key_2,
    query,
    descriptor_1,
    descriptor_2,
    lse,
    row,
    start,
    length,
    head,
    stride,
    factor,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds the probabilities of BLOCK_Q queries from `row` on."""
    rows = row + tl.arange(0, BLOCK_Q)
    # A query past the image gets an infinite log-sum-exp, and so probabilities of exactly 0.
    if MASK:
        entropy = tl.load(lse + rows, mask=rows < length, other=float("inf")) * LOG2_E
    else:
        entropy = tl.load(lse + rows) * LOG2_E
    if DESCRIPTOR:
        query_1 = tl.reshape(descriptor_1.load([start + row, head, 0]), (BLOCK_Q, FIRST))
    else:
        query_1 = _rows(query, row, stride, length, 0, FIRST, DIM, BLOCK_Q, MASK)
    if REST > 0:
        if DESCRIPTOR:
            query_2 = tl.reshape(descriptor_2.load([start + row, head, FIRST]), (BLOCK_Q, REST))
        else:
            query_2 = _rows(query, row, stride, length, FIRST, REST, DIM, BLOCK_Q, MASK)
        logits = _products(query_2, key_2)
        logits = _products(query_1, key_1, logits)
    else:
        logits = _products(query_1, key_1)
    if MASK and DESCRIPTOR:
        # A descriptor knows the tensor's end and not the image's: these rows are the next image's.
        logits = tl.where((rows < length)[:, None], logits, 0.0)
    p = _exponentials(logits * factor - entropy[:, None], BLOCK_Q, BLOCK_K, POLYNOMIAL)
    if FOLD:
        # A thread holds row r and row r + 8 of every 16, and every ROWS-th row from there.
        p = tl.reshape(p, (BLOCK_Q // ROWS, ROWS // 16, 2, 8, BLOCK_K))
        return sums + tl.sum(tl.sum(p, 2), 0)
    else:
        return sums + p


@triton.jit
def _key_block(
    query,
    key,
    lse,
    out,
    table,
    descriptor_1,
    descriptor_2,
    pid,
    slots,
    heads,
    query_token,
    query_head,
    key_token,
    key_head,
    lse_head,
    out_head,
    factor,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,
    PEEL: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """Column sums of BLOCK_K keys of one image and head: the program's work, or one round of it."""
    start, length, head, block = _place(pid, table, slots, heads, BLOCK_K, HEADS_FIRST)
    if length > 0:
        q_stride = query_token * 8
        k_stride = key_token * 8
        q = query + start.to(tl.int64) * q_stride + head.to(tl.int64) * (query_head * 8)
        k = key + start.to(tl.int64) * k_stride + head.to(tl.int64) * (key_head * 8)
        entropy = lse + head.to(tl.int64) * lse_head + start
        low = block * BLOCK_K
        key_1 = _rows(k, low, k_stride, length, 0, FIRST, DIM, BLOCK_K, True)
        key_2 = key_1
        if REST > 0:
            key_2 = _rows(k, low, k_stride, length, FIRST, REST, DIM, BLOCK_K, True)
        if FOLD:
            sums = tl.zeros([ROWS // 16, 8, BLOCK_K], tl.float32)
        else:
            sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        whole = length
        if PEEL:
            whole = length // BLOCK_Q * BLOCK_Q
        for row in tl.range(0, whole, BLOCK_Q, num_stages=STAGES):
            sums = _step(
                sums, key_1, key_2, q, descriptor_1, descriptor_2, entropy,
                row, start, length, head, q_stride, factor,
                DIM, FIRST, REST, BLOCK_Q, BLOCK_K, ROWS, FOLD, POLYNOMIAL, DESCRIPTOR,
                not PEEL,
            )  # fmt: skip
        if PEEL:  # noqa: SIM102 - the outer one is the compiler's
            if whole < length:
                sums = _step(
                    sums, key_1, key_2, q, descriptor_1, descriptor_2, entropy,
                    whole, start, length, head, q_stride, factor,
                    DIM, FIRST, REST, BLOCK_Q, BLOCK_K, ROWS, FOLD, POLYNOMIAL, DESCRIPTOR,
                    True,
                )  # fmt: skip
        if FOLD:
            sums = tl.sum(sums, 0)
        total = tl.sum(sums, 0)
        columns = low + tl.arange(0, BLOCK_K)
        at = out + head.to(tl.int64) * out_head + start + columns
        tl.store(at, total, mask=columns < length)


@triton.jit(**PLAIN)
def _head_scores_kernel(
    query,
    key,
    lse,
    out,
    table,
    descriptor_1,
    descriptor_2,
    programs,
    slots,
    heads,
    query_token,
    query_head,
    key_token,
    key_head,
    lse_head,
    out_head,
    factor,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,
    PEEL: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """Column sums, [heads, tokens]; strides of queries and keys come in units of 8 elements.

    (So the compiler knows that each row is 16-byte aligned, which a stride of 72 would not tell.)
    """
    # Two calls, since a loop around the block costs a third more registers.
    if PERSISTENT:
        for pid in range(tl.program_id(0), programs, tl.num_programs(0)):
            _key_block(
                query, key, lse, out, table, descriptor_1, descriptor_2, pid, slots, heads,
                query_token, query_head, key_token, key_head, lse_head, out_head, factor,
                DIM, FIRST, REST, BLOCK_Q, BLOCK_K, ROWS, STAGES, FOLD, PEEL, POLYNOMIAL, DESCRIPTOR,
                HEADS_FIRST,
            )  # fmt: skip
    else:
        _key_block(
            query, key, lse, out, table, descriptor_1, descriptor_2, tl.program_id(0), slots, heads,
            query_token, query_head, key_token, key_head, lse_head, out_head, factor,
            DIM, FIRST, REST, BLOCK_Q, BLOCK_K, ROWS, STAGES, FOLD, PEEL, POLYNOMIAL, DESCRIPTOR,
            HEADS_FIRST,
        )  # fmt: skip


@triton.jit(**PLAIN)
def _mean_heads_kernel(parts, out, tokens, heads, stride, divisor, BLOCK: tl.constexpr):
    """Sum over heads, first to last, over the divisor."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    total = tl.zeros([BLOCK], tl.float32)
    for head in range(heads):
        total += tl.load(parts + token + head * stride, mask=live, other=0.0)
    tl.store(out + token, total / divisor, mask=live)


# -- log-sum-exp ---------------------------------------------------------------------------------


@triton.jit
def _lse_step(
    peak,
    total,
    query_1,
    query_2,
    key,
    row,
    length,
    stride,
    factor,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASK: tl.constexpr,
):
    """Takes in BLOCK_K keys from `row` on: the largest logit so far, and the sum under it."""
    key_1 = _rows(key, row, stride, length, 0, FIRST, DIM, BLOCK_K, MASK)
    if REST > 0:
        key_2 = _rows(key, row, stride, length, FIRST, REST, DIM, BLOCK_K, MASK)
        logits = _products(query_2, key_2)
        logits = _products(query_1, key_1, logits)
    else:
        logits = _products(query_1, key_1)
    if MASK:
        columns = row + tl.arange(0, BLOCK_K)
        logits = tl.where((columns < length)[None, :], logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, 1) * factor)
    fresh = tl.sum(tl.math.exp2(logits * factor - higher[:, None]), 1)
    return higher, total * tl.math.exp2(peak - higher) + fresh


@triton.jit(**PLAIN)
def _log_sum_exp_kernel(
    query,
    key,
    out,
    table,
    slots,
    heads,
    query_token,
    query_head,
    key_token,
    key_head,
    out_head,
    factor,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Log-sum-exp of BLOCK_Q queries over their image's keys; strides in units of 8 elements."""
    start, length, head, block = _place(tl.program_id(0), table, slots, heads, BLOCK_Q, False)
    if length > 0:
        q_stride = query_token * 8
        k_stride = key_token * 8
        q = query + start.to(tl.int64) * q_stride + head.to(tl.int64) * (query_head * 8)
        k = key + start.to(tl.int64) * k_stride + head.to(tl.int64) * (key_head * 8)
        low = block * BLOCK_Q
        query_1 = _rows(q, low, q_stride, length, 0, FIRST, DIM, BLOCK_Q, True)
        query_2 = query_1
        if REST > 0:
            query_2 = _rows(q, low, q_stride, length, FIRST, REST, DIM, BLOCK_Q, True)
        peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        whole = length // BLOCK_K * BLOCK_K
        for row in tl.range(0, whole, BLOCK_K, num_stages=STAGES):
            peak, total = _lse_step(
                peak, total, query_1, query_2, k, row, length, k_stride, factor,
                DIM, FIRST, REST, BLOCK_K, False,
            )  # fmt: skip
        if whole < length:
            peak, total = _lse_step(
                peak, total, query_1, query_2, k, whole, length, k_stride, factor,
                DIM, FIRST, REST, BLOCK_K, True,
            )  # fmt: skip
        rows = low + tl.arange(0, BLOCK_Q)
        at = out + head.to(tl.int64) * out_head + start + rows
        tl.store(at, (peak + tl.math.log2(total)) * LN_2, mask=rows < length)


# -- launches ------------------------------------------------------------------------------------


def head_scores(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """Attention that each token receives, head by head: two launches, no synchronisation.

    Args:
        query, key: [tokens, heads, head_dim], after rotary embedding; bfloat16 or float16, with
            head_dim one of `WIDTHS`.
        lse: [heads, tokens] float32, natural logarithm, as FlashAttention returns it.
        cu_seqlens: [images + 1], int32 or int64, on the same device; its values are not read here.
        scale: factor on the dot products; positive.
        tuning: how to cut the work.

    Returns:
        [heads, tokens] float32. A token that no image covers is left undefined.
    """
    heads, tokens = query.shape[1], query.shape[0]
    first, rest = WIDTHS[query.shape[2]]
    query, key = _aligned(query), _aligned(key)
    if lse.stride(1) != 1:
        lse = lse.contiguous()
    out = torch.empty((heads, tokens), dtype=torch.float32, device=query.device)
    descriptors = [None, None]
    if tuning.descriptor:
        descriptors = [
            _descriptor(query, tuning.block_q, width) if width else None for width in (first, rest)
        ]
    with _on(query):
        table = _table(cu_seqlens, tokens, tuning.block_k)
        programs = table.shape[1] * heads
        grid = programs
        if tuning.persistent and query.is_cuda:
            properties = torch.cuda.get_device_properties(query.device)
            grid = min(programs, tuning.persistent * properties.multi_processor_count)
        elif tuning.persistent:
            grid = min(programs, tuning.persistent)
        _head_scores_kernel[(grid,)](
            query, key, lse, out, table, *descriptors,
            programs, table.shape[1], heads, *_eighths(query), *_eighths(key),
            lse.stride(0), out.stride(0), scale * LOG2_E.value,
            DIM=query.shape[2], FIRST=first, REST=rest,
            BLOCK_Q=tuning.block_q, BLOCK_K=tuning.block_k, ROWS=16 * tuning.warps,
            STAGES=tuning.stages, FOLD=tuning.fold, PEEL=tuning.peel,
            POLYNOMIAL=tuning.polynomial, DESCRIPTOR=tuning.descriptor,
            HEADS_FIRST=tuning.heads_first, PERSISTENT=tuning.persistent > 0,
            num_warps=tuning.warps, maxnreg=tuning.registers or None, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def mean_heads(parts: Tensor, total_heads: int) -> Tensor:
    """As `kernels.visionzip.attention.mean_heads`, on a GPU."""
    heads, tokens = parts.shape
    if parts.stride(1) != 1:
        parts = parts.contiguous()
    out = torch.empty(tokens, dtype=torch.float32, device=parts.device)
    with _on(parts):
        _mean_heads_kernel[(triton.cdiv(tokens, 256),)](
            parts, out, tokens, heads, parts.stride(0), float(total_heads), BLOCK=256, num_warps=4
        )
    return out


def log_sum_exp(query: Tensor, key: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Log-sum-exp of each query's logits, for where attention's own is not to be had.

    Args:
        query, key, cu_seqlens, scale: as for `head_scores`.

    Returns:
        [heads, tokens] float32, natural logarithm. A token that no image covers is left undefined.
    """
    heads, tokens = query.shape[1], query.shape[0]
    first, rest = WIDTHS[query.shape[2]]
    query, key = _aligned(query), _aligned(key)
    out = torch.empty((heads, tokens), dtype=torch.float32, device=query.device)
    with _on(query):
        table = _table(cu_seqlens, tokens, LSE_BLOCK_Q)
        _log_sum_exp_kernel[(table.shape[1] * heads,)](
            query, key, out, table,
            table.shape[1], heads, *_eighths(query), *_eighths(key),
            out.stride(0), scale * LOG2_E.value,
            DIM=query.shape[2], FIRST=first, REST=rest,
            BLOCK_Q=LSE_BLOCK_Q, BLOCK_K=LSE_BLOCK_K, STAGES=LSE_STAGES, num_warps=LSE_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _table(cu_seqlens: Tensor, tokens: int, block: int) -> Tensor:
    """[3, slots] int32: image start, length and first slot, one slot a block of an image.

    The number of slots is a bound that the host knows, Σ ceil(n / block) <= tokens / block +
    images, so that nothing waits for the device; slots left over have length 0.
    """
    images = cu_seqlens.shape[0] - 1
    slots = tokens // block + images
    table = torch.empty((3, slots), dtype=torch.int32, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.contiguous()
    _table_kernel[(images,)](
        cu_seqlens, table, images, tokens, slots, BLOCK=block, CHUNK=128, num_warps=1
    )
    return table


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if each of its rows is a run of whole 16-byte units, else a copy."""
    strides = tensor.stride()
    if strides[2] == 1 and not (strides[0] % 8 or strides[1] % 8 or tensor.data_ptr() % 16):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _eighths(tensor: Tensor) -> tuple[int, int]:
    """Strides of a token and of a head in units of 8 elements."""
    return tensor.stride(0) // 8, tensor.stride(1) // 8


def _descriptor(tensor: Tensor, rows: int, width: int) -> Any:
    """Tensor descriptor for boxes of `rows` tokens, one head and `width` columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, 1, width])


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the tensor's device, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
