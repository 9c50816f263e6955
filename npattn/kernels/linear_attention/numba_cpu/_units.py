# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Linear attention on the CPU: explicit vectors inside Numba, chunks of rows along the sequence.

Everything is one operation, ``below(a, b, c) = (a @ b.T, kept where j <= i) @ c`` (see ``contract``); what
looks forward in time is the same on rows read backwards, at negative strides. A unit is a segment of one
(batch element, key head) and is walked in chunks of CHUNK rows::

    state = what earlier segments sum up to            # (dim, dim_c), sum of b_j c_jᵀ
    for each chunk:
        w    = a @ b.T of the chunk, 0 where j > i     # strips of rows, as wide as their rows see
        out  = [a | w] @ [state; c]                    # one product: c lies behind the state
        state += b.T @ c                               # b read at transposed strides

A group's query heads share the state where a is theirs, and are summed into it where b and c are. With
``normalise`` the sum of b, z, is walked along, and [a | w] · [z | 1] is the denominator of each row. Without
causality ``sum_units`` sum the state of each segment and ``apply_units`` multiply blocks of rows by it.

Short of (batch element, key head) pairs, a sequence is cut into segments, by its sizes alone: ``sum_units``,
then sums of all earlier segments in order, then ``walk_units``. A unit writes only its own rows, so results
depend neither on the number of threads nor on which one works.

In scratch: state and c, b and b transposed, [a | w], out: at head_dim 64 some 40 KiB, 16 of them the state.

Versions (Zen 4, one core, float32, 8 heads; ms; "of peak": multiply-adds of the formula, without those inside
chunks, at 114 GFLOP/s):

=========================================== =============== ============== ============== =============
causal, length, head_dim                    256, 64         1024, 64       512, 128       1024, 32
=========================================== =============== ============== ============== =============
chunks of 64 rows, strips of 12             0.62            2.5            3.8            0.96
chunks of 64 rows, strips of 24             0.64            2.6            4.0            1.00
chunks of 48 rows, strips of 12 or 24       0.59            2.4 to 2.8     3.6            0.89
chunks of 32 rows, strips of 6              0.55            2.2            3.5            0.82
chunks of 32 rows, strips of 12 or 16       0.55            2.1            3.3            0.80
chunks of 16 rows, strips of 12 (of peak)   0.51 (57 %)     2.0 (59 %)     3.2 (73 %)     0.73 (40 %)
not causal (of peak)                        0.41 (71 %)     1.56 (75 %)    2.8 (84 %)     0.51 (57 %)
=========================================== =============== ============== ============== =============

The backward pass is three such products. With φ(q), φ(k) and the rows [dout / total | ...] in arrays of their
own it took 10 to 11 ms (1024, 64), most of what it lost being page faults of fresh arrays; made anew while
they are loaded, 9. Fetching the next chunk's rows ahead: nothing in the cache; at length 4096 on two threads
5.1 ms became 4.7, and backward 23 became 19. An exponential costs a twentieth of a product. Not tried: the
walk that gives dk and the one that gives dv as one, which would read their operands once and share a state,
in two layouts.
"""

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.matmul import matmul
from npattn.kernels._simd.vectors import (
    cast,
    lanes,
    lesser,
    prefetch,
    scalar_bytes,
    store_scalar,
    vector_bytes,
)
from npattn.kernels.linear_attention.numba_cpu._params import (
    BLOCK,
    BOTH,
    CHUNK,
    PLAIN,
    STRIP,
    call_at,
)
from npattn.kernels.linear_attention.numba_cpu._pieces import (
    add_columns,
    carry,
    cut,
    dots,
    finish,
    load_a,
    load_b,
    load_rows,
    part_nonfinite,
)
from npattn.kernels.tile.numba_cpu._rows import (
    copy_rows,
    fill_zero,
    has_nonfinite,
    pack_transposed,
)


@part()
def _fetch(rows, row_bytes, count, length):
    """Begin to bring rows into the cache."""
    for r in range(count):
        for line in range(0, length, 64):
            prefetch(rows + r * row_bytes + line)


@part()
def _walk(p, unit, scratch, one):
    """One segment of one pair, causal."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    dim = p.dim
    c_vectors = (p.c_dim + n - 1) // n
    c_row = c_vectors * width
    b_row = (dim + n - 1) // n * width
    t_row = CHUNK * size
    row_bytes = b_row + t_row + width
    stack = scratch
    c = stack + dim * c_row
    extra = c + CHUNK * c_row
    carried = extra + CHUNK * c_row
    acc = carried + c_row
    b_rows = acc + CHUNK * c_row
    b_columns = b_rows + CHUNK * b_row
    rows = b_columns + dim * t_row
    z = rows + CHUNK * row_bytes
    totals = z + row_bytes

    pair = unit % p.pairs
    segment = unit // p.pairs
    b = pair // p.heads
    g = pair % p.heads
    state = p.states + (pair * p.segments + segment) * p.state_bytes
    fill_zero(c, CHUNK * c_vectors, one)  # what pads a row
    copy_rows(state, 0, stack, 0, 1, dim * c_vectors * n, 0, one)
    copy_rows(state + dim * c_row, 0, z, 0, 1, dim, 0, one)
    for j in range(dim, dim + CHUNK + n):
        store_scalar(z + j * size, cast(1.0, one))
    stop = lesser((segment + 1) * p.segment_rows, p.length)
    for i0 in range(segment * p.segment_rows, stop, CHUNK):
        count = lesser(CHUNK, stop - i0)
        next_i = i0 + CHUNK  # the next chunk's rows are fetched while this one's are multiplied
        ahead = lesser(CHUNK, stop - next_i)
        for hc in range(p.c_heads):
            h = g * p.c_heads + hc
            _fetch(p.b + b * p.b_b + h * p.b_h + next_i * p.b_i, p.b_i, ahead, p.b_dim * size)
            _fetch(p.c + b * p.c_b + h * p.c_h + next_i * p.c_i, p.c_i, ahead, p.c_dim * size)
            if p.b_kind == BOTH:
                _fetch(p.e + b * p.e_b + h * p.e_h + next_i * p.e_i, p.e_i, ahead, p.b_dim * size)
            load_b(p, b, h, i0, count, b_rows, b_row, one)
            pack_transposed(b_rows, b_row, b_columns, t_row, count, dim, cast(1.0, one), 0, one)
            source = p.c + b * p.c_b + h * p.c_h + i0 * p.c_i
            load_rows(source, p.c_i, c, c_row, count, p.c_dim, p.c_kind, one)
            broken = has_nonfinite(c, c_row, count, c_vectors, one)
            if broken:
                part_nonfinite(c, extra, count * c_vectors, one)
            for ha in range(p.a_heads):
                h = g * p.a_heads + ha
                if hc == 0:
                    _fetch(p.a + b * p.a_b + h * p.a_h + next_i * p.a_i, p.a_i, ahead, p.a_dim * size)
                    if p.a_kind == BOTH:
                        _fetch(p.e + b * p.e_b + h * p.e_h + next_i * p.e_i, p.e_i, ahead, p.a_dim * size)
                    if p.slope != PLAIN:
                        _fetch(p.y + b * p.y_b + h * p.y_h + next_i * p.y_i, p.y_i, ahead, p.c_dim * size)
                    load_a(p, b, h, i0, count, rows, row_bytes, one)
                for r in range(0, count, STRIP):
                    some = lesser(STRIP, count - r)
                    seen = r + some
                    vectors = (seen + n - 1) // n
                    at = rows + r * row_bytes
                    weights = at + dim * size
                    target = acc + r * c_row
                    matmul(
                        at, row_bytes, size, b_columns, t_row, weights, row_bytes, some, vectors, dim, False,
                        one,
                    )  # fmt: skip
                    cut(weights, row_bytes, r, some, vectors, one)
                    if hc == 0:
                        depth = dim + seen
                        matmul(
                            at, row_bytes, size, stack, c_row, target, c_row, some, c_vectors, depth, False,
                            one,
                        )  # fmt: skip
                    else:
                        matmul(
                            weights, row_bytes, size, c, c_row, target, c_row, some, c_vectors, seen, True,
                            one,
                        )  # fmt: skip
                    if p.normalise:
                        both = (dim + vectors * n + n - 1) // n
                        dots(at, row_bytes, z, some, both, totals + r * width, one)
                if broken:
                    carry(acc, extra, carried, c_row, count, c_vectors, one)
                if hc == p.c_heads - 1:
                    finish(p, b, h, i0, count, acc, c_row, totals, one)
            matmul(b_rows, size, b_row, c, c_row, stack, c_row, dim, c_vectors, count, True, one)
            if broken:
                matmul(b_rows, size, b_row, extra, c_row, stack, c_row, dim, c_vectors, count, True, one)
            if p.normalise:
                add_columns(z, b_rows, b_row, count, dim, one)
    if p.keeps_state:
        copy_rows(stack, 0, state, 0, 1, dim * c_vectors * n, 0, one)
        copy_rows(z, 0, state + dim * c_row, 0, 1, dim, 0, one)


@part()
def _sum(p, unit, scratch, one):
    """The state of one segment of one pair alone, into ``states``."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    c_vectors = (p.c_dim + n - 1) // n
    c_row = c_vectors * width
    b_row = (p.dim + n - 1) // n * width
    b_rows = scratch
    copied = b_rows + CHUNK * b_row
    pair = unit % p.pairs
    segment = unit // p.pairs
    b = pair // p.heads
    g = pair % p.heads
    state = p.states + (pair * p.segments + segment) * p.state_bytes
    z = state + p.dim * c_row
    fill_zero(state, p.dim * c_vectors + b_row // width, one)
    fill_zero(copied, CHUNK * c_vectors, one)  # what pads a row
    stop = lesser((segment + 1) * p.segment_rows, p.length)
    for h in range(g * p.c_heads, (g + 1) * p.c_heads):
        for i0 in range(segment * p.segment_rows, stop, CHUNK):
            count = lesser(CHUNK, stop - i0)
            load_b(p, b, h, i0, count, b_rows, b_row, one)
            c = p.c + b * p.c_b + h * p.c_h + i0 * p.c_i
            c_i = p.c_i
            if p.c_dim % n != 0 or p.c_kind != PLAIN:  # no whole vectors, or not as it is
                load_rows(c, c_i, copied, c_row, count, p.c_dim, p.c_kind, one)
                c = copied
                c_i = c_row
            matmul(b_rows, size, b_row, c, c_i, state, c_row, p.dim, c_vectors, count, True, one)
            if p.normalise:
                add_columns(z, b_rows, b_row, count, p.dim, one)


@part()
def _apply(p, unit, scratch, one):
    """A block of rows of one head times the one state of its pair; unit = head * blocks + block."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    c_vectors = (p.c_dim + n - 1) // n
    c_row = c_vectors * width
    a_row = (p.dim + n - 1) // n * width
    rows = scratch
    acc = rows + CHUNK * a_row
    totals = acc + CHUNK * c_row
    blocks = (p.rows + BLOCK - 1) // BLOCK
    head = unit // blocks
    b = head // (p.heads * p.a_heads)
    h = head % (p.heads * p.a_heads)
    state = p.states + head // p.a_heads * p.state_bytes
    z = state + p.dim * c_row
    first = unit % blocks * BLOCK
    stop = lesser(first + BLOCK, p.rows)
    for i0 in range(first, stop, CHUNK):
        count = lesser(CHUNK, stop - i0)
        if p.normalise and p.dim % n != 0:  # z is 0 there
            fill_zero(rows, count * (a_row // width), one)
        load_a(p, b, h, i0, count, rows, a_row, one)
        matmul(rows, a_row, size, state, c_row, acc, c_row, count, c_vectors, p.dim, False, one)
        if p.normalise:
            dots(rows, a_row, z, count, a_row // width, totals, one)
        finish(p, b, h, i0, count, acc, c_row, totals, one)


@part()
def _walk_units(where, start, stop, scratch, one):
    for unit in range(start, stop):
        _walk(call_at(where), unit, scratch, one)


@part()
def _sum_units(where, start, stop, scratch, one):
    for unit in range(start, stop):
        _sum(call_at(where), unit, scratch, one)


@part()
def _apply_units(where, start, stop, scratch, one):
    for unit in range(start, stop):
        _apply(call_at(where), unit, scratch, one)


@jit
def walk_units(where, start, stop, scratch, one):
    """Units (segment * pairs + pair) of causal products."""
    _walk_units(where, start, stop, scratch, one)


@jit
def sum_units(where, start, stop, scratch, one):
    """Units (segment * pairs + pair): states."""
    _sum_units(where, start, stop, scratch, one)


@jit
def apply_units(where, start, stop, scratch, one):
    """Units (head * blocks + block): products with the state of all rows."""
    _apply_units(where, start, stop, scratch, one)
