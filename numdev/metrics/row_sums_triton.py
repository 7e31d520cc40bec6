"""The Triton kernels of `numdev.metrics.rowwise`, and those that round numbers (`numdev.formats`) and sum
bits (`numdev.metrics.bits`). Imported only where they run: this module needs Triton.

Where nothing else is said tensors are [heads, rows, width], contiguous, heads being batch entries
times heads and the first axis of the grid. A program takes CHUNK rows of a head, the grid's second
axis, BLOCK of them at a time. TABLE is [columns, heads, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compare_rows(
    OUT, REFERENCE, FLOOR, SPACING, EXPECTED, BASELINE, TABLE, FEATURES, rows, width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    PREDICTED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """An output's sums for each row, and for each feature, summed over the rows of a chunk, into
    FEATURES [heads, chunks, width]."""
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    features = tl.zeros([BLOCK_D], tl.float64)
    for first in range(chunk * CHUNK, tl.minimum(rows, chunk * CHUNK + CHUNK), BLOCK):
        row, here, at, ok = places(head, first, rows, width, BLOCK, BLOCK_D)
        o = tl.load(OUT + at, mask=ok, other=0.0).to(tl.float64)
        r = tl.load(REFERENCE + at, mask=ok, other=0.0)
        off = o - tl.load(FLOOR + at, mask=ok, other=0.0)
        per_ulp = 1.0 / tl.load(SPACING + at, mask=ok, other=1.0)  # exact: a power of two
        error = o - r
        ulps = off * per_ulp
        features += tl.sum(ulps, axis=0)
        sign = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
        put(TABLE, 0, row, here, rows, tl.sum(tl.abs(error), axis=1))
        put(TABLE, 1, row, here, rows, tl.sum(error * error, axis=1))
        put(TABLE, 2, row, here, rows, tl.max(tl.abs(error), axis=1))
        put(TABLE, 3, row, here, rows, tl.max(tl.abs(error * per_ulp), axis=1))
        put(TABLE, 4, row, here, rows, tl.sum(ulps * sign, axis=1))
        if PREDICTED:
            predicted = tl.load(EXPECTED + at, mask=ok, other=0.0).to(tl.float64) - r
            put(TABLE, 5, row, here, rows, tl.sum(predicted * predicted, axis=1))
        if BESIDE:
            apart = o - tl.load(BASELINE + at, mask=ok, other=0.0).to(tl.float64)
            put(TABLE, 6, row, here, rows, tl.sum(apart * apart, axis=1))
            put(TABLE, 7, row, here, rows, tl.max(tl.abs(off), axis=1))
    d = tl.arange(0, BLOCK_D)
    at = (head * tl.num_programs(1) + chunk) * width
    tl.store(FEATURES + at + d, features, mask=d < width)


# It runs for microseconds, and every variant would take most of a second to build.
@triton.jit(
    do_not_specialize=[
        *("batch", "rows", "width", "chunks", "gap_chunks", "elements"),
        *("has_expected", "has_arithmetic", "has_baseline"),
    ]
)
def output_heads(
    TABLE, FEATURES, SCALE, LEAST, ARITHMETIC, GAPS,
    SUMS, LARGEST, BY_ROW, BY_FEATURE, ALONG, W1,
    batch, rows, width, chunks, gap_chunks, elements, smallest, unit_roundoff,
    has_expected, has_arithmetic, has_baseline,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What `compare_rows` put into TABLE and FEATURES, by head: sums [names, heads, GROUPS], row i
    being in group i mod GROUPS; maxima [names, heads]; over features, and along the reference's
    sign, for each batch entry; and the sums of `gaps`, over the number of elements.

    Beside a part's SCALE, LEAST and what fp32 ARITHMETIC may err, all [batch, heads, rows]: errors
    relative to the scale, which go into BY_ROW [2, batch, heads, rows] too, those predicted,
    and the largest ratio of the two, as `numdev.metrics.comparison` defines them."""
    h, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    column = batch * heads * rows
    absolute, square, relative = zeros(BLOCK), zeros(BLOCK), zeros(BLOCK)
    max_abs, max_ulp = zeros(BLOCK), zeros(BLOCK)
    expected, least, counted = zeros(BLOCK), zeros(BLOCK), zeros(BLOCK)
    apart, from_floor = zeros(BLOCK), zeros(BLOCK)
    for b in range(batch):
        along = zeros(BLOCK)
        for first in range(0, rows, BLOCK):
            i = first + tl.arange(0, BLOCK)
            here, at = i < rows, (b * heads + h) * rows + i
            scale = tl.load(SCALE + at, mask=here, other=0.0)
            judged = (scale >= smallest) & (scale < float("inf"))
            unit = tl.where(judged, scale, float("inf"))
            squares = got(TABLE, 1, column, at, here)
            own = tl.sqrt(squares) / unit
            tl.store(BY_ROW + at, own * own, mask=here)
            absolute += got(TABLE, 0, column, at, here)
            square += squares
            relative += own * own
            max_abs = tl.maximum(max_abs, got(TABLE, 2, column, at, here))
            max_ulp = tl.maximum(max_ulp, got(TABLE, 3, column, at, here))
            along += got(TABLE, 4, column, at, here)
            if has_expected:
                predicted = with_arithmetic(TABLE, ARITHMETIC, column, at, here, has_arithmetic)
                predicted /= unit
                tl.store(BY_ROW + column + at, predicted * predicted, mask=here)
                expected += predicted * predicted
                smallest_row = tl.load(LEAST + at, mask=here, other=0.0) / unit
                least += smallest_row * smallest_row
                counted += judged.to(tl.float64)
            if has_baseline:
                apart += got(TABLE, 6, column, at, here)
                from_floor = tl.maximum(from_floor, got(TABLE, 7, column, at, here))
        tl.store(ALONG + b * heads + h, tl.sum(along, axis=0))
    put_groups(SUMS, 0, h, absolute, GROUPS, BLOCK)
    put_groups(SUMS, 1, h, square, GROUPS, BLOCK)
    put_groups(SUMS, 2, h, relative, GROUPS, BLOCK)
    tl.store(LARGEST + h, tl.max(max_abs, axis=0))
    tl.store(LARGEST + heads + h, tl.max(max_ulp, axis=0))
    if has_baseline:
        put_groups(SUMS, 4, h, apart, GROUPS, BLOCK)
        tl.store(LARGEST + 2 * heads + h, tl.max(from_floor, axis=0))
    if has_expected:
        put_groups(SUMS, 3, h, expected, GROUPS, BLOCK)
        rows_judged = tl.sum(counted, axis=0)
        most = tl.maximum(tl.sum(expected, axis=0), tl.sum(least, axis=0))
        typical = tl.sqrt(most / tl.maximum(rows_judged, 1.0))
        # In fp32, in which both came, it would be 0.
        least_allowed = (zeros(BLOCK) + smallest) * unit_roundoff
        worst = zeros(BLOCK)
        for b in range(batch):
            for first in range(0, rows, BLOCK):
                i = first + tl.arange(0, BLOCK)
                here, at = i < rows, (b * heads + h) * rows + i
                scale = tl.load(SCALE + at, mask=here, other=0.0)
                size = tl.sqrt(got(TABLE, 1, column, at, here))
                allowed = with_arithmetic(TABLE, ARITHMETIC, column, at, here, has_arithmetic)
                allowed = tl.maximum(allowed, typical * scale)
                allowed = tl.maximum(allowed, tl.load(LEAST + at, mask=here, other=0.0))
                allowed = tl.maximum(allowed, least_allowed)
                worst = tl.maximum(worst, tl.where(size > 0, size / allowed, 0.0))
        found = tl.max(worst, axis=0)
        # Where no row is judged nothing is typical, and a row with an error has no ratio.
        found = tl.where((rows_judged == 0) & (found > 0), float("nan"), found)
        tl.store(LARGEST + 3 * heads + h, found)
    d, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    for b in range(batch):
        features = tl.zeros([BLOCK_D], tl.float64)
        for first in range(0, chunks, BLOCK_C):
            at = ((b * heads + h) * chunks + first + c)[:, None] * width + d[None, :]
            ok = (first + c < chunks)[:, None] & (d < width)[None, :]
            features += tl.sum(tl.load(FEATURES + at, mask=ok, other=0.0), axis=0)
        tl.store(BY_FEATURE + (b * heads + h) * width + d, features, mask=d < width)
    put_gaps(GAPS, W1, 0, h, gap_chunks, elements, BLOCK)
    if has_baseline:
        put_gaps(GAPS, W1, 1, h, gap_chunks, elements, BLOCK)


@triton.jit
def zeros(BLOCK: tl.constexpr):
    return tl.zeros([BLOCK], tl.float64)


@triton.jit
def got(TABLE, index, column, at, here):
    """Of a column of TABLE, what is there."""
    return tl.load(TABLE + index * column + at, mask=here, other=0.0)


@triton.jit
def with_arithmetic(TABLE, ARITHMETIC, column, at, here, has_arithmetic):
    """The sizes of rows' predicted errors, which what fp32 arithmetic may err joins in squares."""
    squares = got(TABLE, 5, column, at, here)
    if has_arithmetic:
        more = tl.load(ARITHMETIC + at, mask=here, other=0.0)
        squares += more * more
    return tl.sqrt(squares)


@triton.jit
def put_groups(SUMS, name, h, values, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    grouped = tl.sum(tl.reshape(values, [BLOCK // GROUPS, GROUPS]), axis=0)
    at = (name * tl.num_programs(0).to(tl.int64) + h) * GROUPS + tl.arange(0, GROUPS)
    tl.store(SUMS + at, grouped)


@triton.jit
def put_gaps(GAPS, W1, pair, h, chunks, elements, BLOCK: tl.constexpr):
    """The mean of GAPS [pairs, heads, chunks] into W1 [pairs, heads]."""
    at = pair * tl.num_programs(0).to(tl.int64) + h
    total = zeros(BLOCK)
    for first in range(0, chunks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(GAPS + at * chunks + i, mask=i < chunks, other=0.0)
    tl.store(W1 + at, tl.sum(total, axis=0) / elements)


@triton.jit
def yardstick_rows(
    REFERENCE, TERMS, UNROUNDED, BASELINE, FP32, LOWER, FLOOR, SPACING, TABLE, rows, width,
    largest, overflow, infinite, unit, per_unit, smallest_binade, largest_binade,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MOVED: tl.constexpr, PLAIN: tl.constexpr, IN_FP32: tl.constexpr, IN_LOWER: tl.constexpr,
):  # fmt: skip
    """A yardstick's floor, spacing and own sums for each row; the format as in `rounded`."""
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    for first in range(chunk * CHUNK, tl.minimum(rows, chunk * CHUNK + CHUNK), BLOCK):
        row, here, at, ok = places(head, first, rows, width, BLOCK, BLOCK_D)
        r = tl.load(REFERENCE + at, mask=ok, other=0.0)
        t = tl.load(TERMS + at, mask=ok, other=0.0)
        floor = rounded(
            r, largest, overflow, infinite, unit, per_unit, smallest_binade, largest_binade
        )
        tl.store(FLOOR + at, floor, mask=ok)
        spacing = binade(tl.abs(t), smallest_binade, largest_binade) * per_unit
        tl.store(SPACING + at, tl.where(tl.abs(t) < float("inf"), spacing, float("nan")), mask=ok)
        off = floor - r
        put(TABLE, 0, row, here, rows, tl.sum(r * r, axis=1))
        put(TABLE, 1, row, here, rows, tl.sum(t * t, axis=1))
        put(TABLE, 2, row, here, rows, tl.sum(off * off, axis=1))
        if MOVED:
            u = tl.load(UNROUNDED + at, mask=ok, other=0.0)
            moved = r - u
            put(TABLE, 3, row, here, rows, tl.sum(u * u, axis=1))
            put(TABLE, 4, row, here, rows, tl.sum(moved * moved, axis=1))
            put(TABLE, 5, row, here, rows, tl.sum(tl.abs(moved), axis=1))
            put(TABLE, 6, row, here, rows, tl.max(tl.abs(moved), axis=1))
        if PLAIN:
            b = tl.load(BASELINE + at, mask=ok, other=0.0).to(tl.float64)
            plain = b - r
            put(TABLE, 7, row, here, rows, tl.sum(plain * plain, axis=1))
            put(TABLE, 8, row, here, rows, tl.max(tl.abs(b - floor), axis=1))
            if IN_FP32:
                cast = b - tl.load(FP32 + at, mask=ok, other=0.0).to(tl.float64)
                put(TABLE, 9, row, here, rows, tl.sum(cast * cast, axis=1))
            if IN_LOWER:
                lower = b - tl.load(LOWER + at, mask=ok, other=0.0).to(tl.float64)
                put(TABLE, 10, row, here, rows, tl.sum(lower * lower, axis=1))


@triton.jit
def gaps(A, B, C, SUMS, length, BOTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of |a - b| over each chunk of rows of A and B [rows, length], into SUMS [2, rows,
    chunks]; and for BOTH that of |a - c|."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to_b, to_c = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for first in range(chunk * CHUNK, tl.minimum(length, chunk * CHUNK + CHUNK), BLOCK):
        i = first + tl.arange(0, BLOCK)
        a = tl.load(A + row * length + i, mask=i < length, other=0.0).to(tl.float64)
        b = tl.load(B + row * length + i, mask=i < length, other=0.0).to(tl.float64)
        to_b += tl.abs(a - b)
        if BOTH:
            c = tl.load(C + row * length + i, mask=i < length, other=0.0).to(tl.float64)
            to_c += tl.abs(a - c)
    at = row * tl.num_programs(1) + chunk
    tl.store(SUMS + at, tl.sum(to_b, axis=0))
    if BOTH:
        second = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        tl.store(SUMS + second + at, tl.sum(to_c, axis=0))


@triton.jit
def places(head, first, rows, width, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of BLOCK rows from `first` on: their numbers over all heads, which of them are there; where
    their elements are, and which of these are there."""
    i, d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    row, here = head * rows + i, i < rows
    return row, here, row[:, None] * width + d[None, :], here[:, None] & (d < width)[None, :]


@triton.jit
def put(TABLE, column, row, here, rows, values):
    tl.store(TABLE + column * tl.num_programs(0).to(tl.int64) * rows + row, values, mask=here)


@triton.jit
def round_elements(
    X, OUT, count, largest, overflow, infinite, unit, per_unit, smallest_binade, largest_binade,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each of `count` numbers rounded to a format, in their own dtype, fp64 or fp32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < count, other=0.0).to(tl.float64)
    found = rounded(x, largest, overflow, infinite, unit, per_unit, smallest_binade, largest_binade)
    tl.store(OUT + i, found.to(OUT.dtype.element_ty), mask=i < count)


@triton.jit
def rounded(x, largest, overflow, infinite, unit, per_unit, smallest_binade, largest_binade):
    """fp64 numbers rounded to the nearest of a format, ties to even.

    `largest` is the format's largest number, `overflow` what becomes of those beyond it, and
    `infinite` of infinity; `unit` is 2^(precision - 1), and `per_unit` its inverse.
    """
    size = tl.abs(x)
    of_size = binade(size, smallest_binade, largest_binade)
    # Adding 2^52 rounds to whole numbers, halves to even.
    whole = (size / of_size * unit + 4503599627370496.0) - 4503599627370496.0
    on_grid = whole * per_unit * of_size
    on_grid = tl.where(on_grid > largest, overflow, on_grid)
    on_grid = tl.where(size == float("inf"), infinite, on_grid)
    signed = on_grid.to(tl.int64, bitcast=True) | (x.to(tl.int64, bitcast=True) & (-1 << 63))
    return signed.to(tl.float64, bitcast=True)


@triton.jit
def binade(size, smallest, largest):
    """As `numdev.formats` has it: the exponent of a magnitude alone, within two powers of two."""
    field = (size.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    return tl.minimum(tl.maximum(field, smallest), largest)


@triton.jit(do_not_specialize=["heads"])
def plain_rows(
    OUT, REFERENCE, EMPTY, BOTH, TABLE, rows, width, heads,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What an output's and its reference's elements come to for each row, those not counting that
    are in an empty row or not finite in one of the two; and if asked (KEEP) the elements of either
    into BOTH [2, heads, elements], 0 where they do not count."""
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch = tl.num_programs(0) // heads
    moved = ((head % heads) * batch + head // heads - head) * rows * width  # heads come first there
    for first in range(chunk * CHUNK, tl.minimum(rows, chunk * CHUNK + CHUNK), BLOCK):
        row, here, at, ok = places(head, first, rows, width, BLOCK, BLOCK_D)
        o = tl.load(OUT + at, mask=ok, other=0.0)
        r = tl.load(REFERENCE + at, mask=ok, other=0.0)
        empty = tl.load(EMPTY + row, mask=here, other=1) != 0
        seen = ok & (empty == 0)[:, None]
        o_fine, r_fine = tl.abs(o) < float("inf"), tl.abs(r) < float("inf")
        usable = seen & o_fine & r_fine
        a, b = tl.where(usable, o, 0.0).to(tl.float64), tl.where(usable, r, 0.0)
        if KEEP:
            tl.store(BOTH + moved + at, a, mask=ok)
            tl.store(BOTH + tl.num_programs(0).to(tl.int64) * rows * width + moved + at, b, mask=ok)
        error = a - b
        put(TABLE, 0, row, here, rows, tl.sum(usable.to(tl.float64), axis=1))
        put(TABLE, 1, row, here, rows, tl.sum(tl.abs(error), axis=1))
        put(TABLE, 2, row, here, rows, tl.sum(error * error, axis=1))
        put(TABLE, 3, row, here, rows, tl.sum(b * b, axis=1))
        put(TABLE, 4, row, here, rows, tl.sum((seen & (o_fine != r_fine)).to(tl.float64), axis=1))
        put(TABLE, 5, row, here, rows, empty.to(tl.float64))
        put(TABLE, 6, row, here, rows, tl.max(tl.abs(error), axis=1))


@triton.jit(do_not_specialize=["batch", "rows", "gap_chunks", "elements", "has_gaps"])
def plain_heads(
    TABLE, GAPS, FOUND, batch, rows, gap_chunks, elements, has_gaps,
    LARGEST: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `plain_rows` put into TABLE, by head, in groups as in `output_heads`: FOUND [columns +
    1, heads, GROUPS], of the column LARGEST the largest and of others the sum; and behind them the
    sums of `gaps`, over the number of elements."""
    h, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(0).to(tl.int64)
    found = zeros(BLOCK)
    if column < tl.num_programs(1) - 1:
        for b in range(batch):
            for first in range(0, rows, BLOCK):
                i = first + tl.arange(0, BLOCK)
                at = (b * heads + h) * rows + i
                x = got(TABLE, column, batch * heads * rows, at, i < rows)
                found = tl.where(column == LARGEST, tl.maximum(found, x), found + x)
    elif has_gaps:
        for first in range(0, gap_chunks, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(GAPS + h * gap_chunks + i, mask=i < gap_chunks, other=0.0)
            found += x / elements
    grouped = tl.reshape(found, [BLOCK // GROUPS, GROUPS])
    values = tl.where(column == LARGEST, tl.max(grouped, axis=0), tl.sum(grouped, axis=0))
    tl.store(FOUND + (column * heads + h) * GROUPS + tl.arange(0, GROUPS), values)


@triton.jit
def sum_bits(
    X, Y, FOUND, count, BESIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of each chunk of X [batch, heads, count], of integers, the checksum of `numdev.metrics.bits`;
    for BESIDE how many are others in Y; and the first: into FOUND [3, batch, heads, chunks]."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads, chunk = tl.num_programs(1), tl.program_id(2)
    total, others = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    at = (b * heads + head) * count
    for first in range(chunk * CHUNK, tl.minimum(count, chunk * CHUNK + CHUNK), BLOCK):
        i = first + tl.arange(0, BLOCK).to(tl.int64)
        bits = tl.load(X + at + i, mask=i < count, other=0).to(tl.int64)
        w = (b * count + i + 1) * -7046029254386353131
        w = (w ^ (w >> 29)) * -4658895280553007687
        w = (w ^ (w >> 32)) | 1
        total += tl.where(i < count, (bits + 1) * w, 0)
        if BESIDE:
            y = tl.load(Y + at + i, mask=i < count, other=0).to(tl.int64)
            others += (bits != y).to(tl.int64)
    to = (b * heads + head) * tl.num_programs(2) + chunk
    column = tl.num_programs(0).to(tl.int64) * heads * tl.num_programs(2)
    tl.store(FOUND + to, tl.sum(total, axis=0))
    tl.store(FOUND + column + to, tl.sum(others, axis=0))
    tl.store(FOUND + 2 * column + to, tl.load(X + at + chunk * CHUNK).to(tl.int64))
