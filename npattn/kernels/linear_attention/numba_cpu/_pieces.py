# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Steps of the kernels of linear attention: features, triangles, denominators, what is not finite."""

from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp, exp_scalar
from npattn.kernels._simd.row_sums import row_sums
from npattn.kernels._simd.vectors import (
    add,
    cast,
    div,
    fma,
    hsum,
    keep_between,
    keep_where_equal,
    lanes,
    load,
    load_scalar,
    maximum,
    mul,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)
from npattn.kernels.linear_attention.numba_cpu._params import (
    BOTH,
    ELU1,
    ONE,
    PLAIN,
    RELU,
)
from npattn.kernels.tile.numba_cpu._rows import (
    fill_zero,
    store_row,
)

#: Totals between these are divided by through their reciprocal.
_LEAST, _MOST = 1e-30, 1e30


@part("one")
def _feature(x, kind, one):
    """φ of one number."""
    zero = cast(0.0, one)
    if kind == ELU1:
        return x + cast(1.0, one) if x > zero else exp_scalar(x)
    if kind == RELU:
        return zero if zero > x else x  # NaN stays
    return x


@part()
def load_rows(source, source_row, target, target_row, rows, dim, kind, one):
    """Rows of ``dim`` numbers, or their φ, or with ONE and a 1 behind them. Nothing else is written."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    vectors = dim // n
    zeros = splat(cast(0.0, one))
    minus = splat(cast(-1.0, one))
    for r in range(rows):
        s = source + r * source_row
        t = target + r * target_row
        if kind == ELU1:  # max(x, 0) + min(exp(x), 1), of which one is exactly 0 or 1; NaN stays
            for c in range(vectors):
                x = load(s + c * width, one)
                store(t + c * width, sub(maximum(x, zeros), maximum(minus, sub(zeros, exp(x)))))
        elif kind == RELU:
            for c in range(vectors):
                store(t + c * width, maximum(zeros, load(s + c * width, one)))
        else:
            for c in range(vectors):
                store(t + c * width, load(s + c * width, one))
        for d in range(vectors * n, dim):
            store_scalar(t + d * size, _feature(load_scalar(s + d * size, one), kind, one))
        if kind == ONE:
            store_scalar(t + dim * size, cast(1.0, one))


@part()
def load_both(dout, dout_row, out, out_row, inverse, inverse_i, target, target_row, rows, dim, one):
    """Rows of ``dboth = [dout * inverse | -(dout · out) * inverse]``."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    vectors = dim // n
    for r in range(rows):
        x_row = dout + r * dout_row
        y_row = out + r * out_row
        t = target + r * target_row
        share = load_scalar(inverse + r * inverse_i, one)
        shares = splat(share)
        total = splat(cast(0.0, one))
        for c in range(vectors):
            x = load(x_row + c * width, one)
            total = fma(x, load(y_row + c * width, one), total)
            store(t + c * width, mul(x, shares))
        dot = hsum(total)
        for d in range(vectors * n, dim):
            number = load_scalar(x_row + d * size, one)
            dot = dot + number * load_scalar(y_row + d * size, one)
            store_scalar(t + d * size, number * share)
        store_scalar(t + dim * size, -dot * share)


@part()
def load_a(p, b, h, i0, count, target, target_row, one):
    """Rows of a."""
    source = p.a + b * p.a_b + h * p.a_h + i0 * p.a_i
    if p.a_kind == BOTH:
        inverse = p.inverse + b * p.inverse_b + h * p.inverse_h + i0 * p.inverse_i
        out = p.e + b * p.e_b + h * p.e_h + i0 * p.e_i
        load_both(source, p.a_i, out, p.e_i, inverse, p.inverse_i, target, target_row, count, p.a_dim, one)
    else:
        load_rows(source, p.a_i, target, target_row, count, p.a_dim, p.a_kind, one)


@part()
def load_b(p, b, h, i0, count, target, target_row, one):
    """Rows of b."""
    width = vector_bytes(one)
    source = p.b + b * p.b_b + h * p.b_h + i0 * p.b_i
    inverse = p.inverse + b * p.inverse_b + h * p.inverse_h + i0 * p.inverse_i
    if p.b_kind == BOTH:
        out = p.e + b * p.e_b + h * p.e_h + i0 * p.e_i
        load_both(source, p.b_i, out, p.e_i, inverse, p.inverse_i, target, target_row, count, p.b_dim, one)
    else:
        load_rows(source, p.b_i, target, target_row, count, p.b_dim, p.b_kind, one)
    if p.b_scaled:
        for r in range(count):
            share = splat(load_scalar(inverse + r * p.inverse_i, one))
            for at in range(target + r * target_row, target + (r + 1) * target_row, width):
                store(at, mul(load(at, one), share))


@part()
def times_slope(row, y, dim, kind, one):
    """A row of gradients times φ' at y: min(exp(y), 1) for elu1, 1 where y > 0 for relu."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    vectors = dim // n
    zero = cast(0.0, one)
    unit = cast(1.0, one)
    zeros = splat(zero)
    ones = splat(unit)
    minus = splat(-unit)
    if kind == ELU1:
        for c in range(vectors):
            slopes = sub(zeros, maximum(minus, sub(zeros, exp(load(y + c * width, one)))))
            store(row + c * width, mul(load(row + c * width, one), slopes))
    else:
        for c in range(vectors):
            positive = maximum(load(y + c * width, one), zeros)
            slopes = keep_where_equal(positive, zero, zeros, ones)
            store(row + c * width, mul(load(row + c * width, one), slopes))
    for d in range(vectors * n, dim):
        value = load_scalar(y + d * size, one)
        slope = unit if value > zero else zero
        if kind == ELU1 and not (value > zero):
            slope = exp_scalar(value)
        store_scalar(row + d * size, load_scalar(row + d * size, one) * slope)


@part()
def cut(weights, row_bytes, first, rows, vectors, one):
    """0 where the key is later than the query: in row r, row ``first + r`` of the chunk, from there on.

    And in the vector behind the last, which the denominator's sum may touch.
    """
    n = lanes(one)
    width = vector_bytes(one)
    zeros = splat(cast(0.0, one))
    for r in range(rows):
        t = weights + r * row_bytes
        seen = first + r + 1
        for c in range(seen // n, vectors):
            at = t + c * width
            store(at, keep_between(load(at, one), zeros, c * n, 0, seen))
        store(t + vectors * width, zeros)


@part()
def dots(rows, row_bytes, z, count, vectors, totals, one):
    """The dot product of each row with z, one partial sum per lane."""
    width = vector_bytes(one)
    for r in range(count):
        at = rows + r * row_bytes
        total = mul(load(at, one), load(z, one))
        for c in range(1, vectors):
            total = fma(load(at + c * width, one), load(z + c * width, one), total)
        store(totals + r * width, total)


@part()
def add_columns(z, b, b_row, rows, dim, one):
    """Add the sum of the rows of b to z."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    vectors = dim // n
    for c in range(vectors):
        total = load(b + c * width, one)
        for r in range(1, rows):
            total = add(total, load(b + r * b_row + c * width, one))
        store(z + c * width, add(load(z + c * width, one), total))
    for d in range(vectors * n, dim):
        number = load_scalar(z + d * size, one)
        for r in range(rows):
            number = number + load_scalar(b + r * b_row + d * size, one)
        store_scalar(z + d * size, number)


@part()
def part_nonfinite(c, extra, vectors, one):
    """Move what is not finite from c to ``extra``, zeros in its place in either."""
    width = vector_bytes(one)
    zero = cast(0.0, one)
    zeros = splat(zero)
    for v in range(vectors):
        x = load(c + v * width, one)
        test = mul(x, zeros)
        store(extra + v * width, keep_where_equal(test, zero, zeros, x))
        store(c + v * width, keep_where_equal(test, zero, x, zeros))


@part()
def carry(acc, extra, carried, row_bytes, rows, vectors, one):
    """Add to each row what is not finite in its own and earlier rows of c, whatever the weights."""
    width = vector_bytes(one)
    fill_zero(carried, vectors, one)
    for r in range(rows):
        for v in range(vectors):
            at = acc + r * row_bytes + v * width
            total = add(load(carried + v * width, one), load(extra + r * row_bytes + v * width, one))
            store(carried + v * width, total)
            store(at, add(load(at, one), total))


@part()
def finish(p, b, h, i0, count, acc, acc_row, totals, one):
    """Divide by the total or multiply by the slope, and write the rows; ``totals``: sums per lane."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    zero = cast(0.0, one)
    unit = cast(1.0, one)
    vectors = (p.c_dim + n - 1) // n
    target = p.out + b * p.out_b + h * p.out_h + i0 * p.out_i
    inverse = p.inverse + b * p.inverse_b + h * p.inverse_h + i0 * p.inverse_i
    if p.normalise:
        for r in range(0, count, n):  # row r's sum to place r: behind those still to be read
            store(totals + r * size, row_sums(totals + r * width, width, one))
        for r in range(count):
            row = acc + r * acc_row
            total = load_scalar(totals + r * size, one) + cast(p.eps, one)
            size_of = total if total > zero else -total
            share = zero
            factor = zero
            if total == zero:
                fill_zero(row, vectors, one)
            else:
                share = unit / total
                factor = share
                if not (size_of > cast(_LEAST, one) and size_of < cast(_MOST, one)):
                    factor = unit
                    for c in range(vectors):
                        store(row + c * width, div(load(row + c * width, one), splat(total)))
            store_scalar(inverse + r * p.inverse_i, share)
            store_row(row, target + r * p.out_i, p.c_dim, factor, 0, one)
    else:
        y = p.y + b * p.y_b + h * p.y_h + i0 * p.y_i
        for r in range(count):
            row = acc + r * acc_row
            if p.slope != PLAIN:
                times_slope(row, y + r * p.y_i, p.c_dim, p.slope, one)
            store_row(row, target + r * p.out_i, p.c_dim, unit, 0, one)


__all__ = ["add_columns", "carry", "cut", "dots", "finish", "load_a", "load_b", "load_rows", "part_nonfinite"]
