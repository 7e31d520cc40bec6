"""Synthetic inputs: q, k, v (and dO) of a named regime, and masks as models make them.

A regime is a function of shapes, draws, and parameters that a configuration may set; each
in full: docs/hazards.md. Each head of each named tensor has a stream of its own, from
seed, label, name and head alone: a tensor keeps its numbers whatever else is drawn, to
the same bits on every machine. All is drawn in fp32, and rounded to the audited format
afterwards."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from numdev.errors import UsageError, closest
from numdev.formats import format_named, round_to

# What is smaller becomes 0: else a number of 8 bits is none of float16
SMALLEST = 2.0**-16
UNSEEN = -1024.0  # A score so far below the maximum that exp of it is 0 in fp64
SMALL = 1 << 18  # Numbers of a tensor, drawn in some milliseconds
# Standard deviation of the features of q and of the other keys that decide no level
NOISE = 0.5


@dataclass(frozen=True)
class Draws:
    """The random numbers of one case. A shape is [batch, heads, ...]; the same seed,
    label, name and shape always give the same numbers."""

    seed: int
    # Cases of one audit have different labels, and with them different numbers
    label: str = ""

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns N(0, 1) in fp32 of this shape; `name` picks the stream. It is drawn in
        fp64 and rounded: the last bits of the tails' logarithms differ between
        processors, which in fp64 reaches the result once in some 10^8 of them."""
        return self._draw_by_head("standard_normal", name, shape, np.float32)

    def uniform(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns numbers uniform in [0, 1), fp64, of this shape; `name` picks the
        stream."""
        return self._draw_by_head("random", name, shape, np.float64)

    def integers(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Returns integers uniform over low, ..., high - 1, int64, of this shape; `name`
        picks the stream. `low` must be below `high`."""
        return self._draw_by_head("integers", name, shape, np.int64, low, high)

    def permutation(self, name: str, count: int) -> Tensor:
        """Returns 0, ..., count - 1 in random order, int64 [count]; the same for all
        heads. `name` picks the stream."""
        return torch.from_numpy(self._generator(name, 0).permutation(count))

    def _draw_by_head(
        self, law: str, name: str, shape: tuple[int, ...], dtype: DTypeLike, *of: int
    ) -> Tensor:
        """Returns numbers of numpy's distribution `law`, with parameters `of`, in this
        shape [batch, heads, ...]; each head has a stream of its own, by its number and
        `name`."""
        batch, heads, *trailing = shape
        numbers = np.empty(shape, dtype=dtype)

        def fill(head: int) -> None:
            """Draws the numbers of one head, in place."""
            numbers[:, head] = getattr(self._generator(name, head), law)(
                *of, size=(batch, *trailing)
            )

        if numbers.size < SMALL:  # a thread takes as long to start as these to draw
            list(map(fill, range(heads)))
        else:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                # Numpy draws without holding the interpreter
                list(pool.map(fill, range(heads)))
        return torch.from_numpy(numbers)

    def _generator(self, name: str, head: int) -> np.random.Generator:
        """Returns the generator of one name and head, which depends on label, seed, name
        and head alone."""
        digest = hashlib.sha256(f"{self.label}/{self.seed}/{name}".encode()).digest()
        sequence = np.random.SeedSequence(
            int.from_bytes(digest[:16], "big"), spawn_key=(head,)
        )
        return np.random.Generator(np.random.PCG64(sequence))


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of one attention call, and the shapes of its tensors; `out` is grad_out's
    too."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int

    q = property(lambda self: (self.batch, self.heads, self.q_len, self.head_dim))
    k = property(lambda self: (self.batch, self.kv_heads, self.kv_len, self.head_dim))
    v = property(lambda self: (self.batch, self.kv_heads, self.kv_len, self.v_dim))
    out = property(lambda self: (self.batch, self.heads, self.q_len, self.v_dim))


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors drawn for one attention call, fp32, on the CPU: `q, k, v = inputs` are
    those of its forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    # dO, [batch, heads, q_len, v_dim]; None where any will do
    grad_out: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.q, self.k, self.v))


def _expect(is_met: bool, condition: str) -> None:
    """Raises ValueError, which names the condition (`count >= 1`), unless it is met."""
    if not is_met:
        raise ValueError(f"expected {condition}")


def draw_each(shapes: Shapes, draw: Callable[[str, tuple[int, ...]], Tensor]) -> Inputs:
    """Returns q, k and v, each as `draw` returns it for its name and shape."""
    return Inputs(*(draw(name, getattr(shapes, name)) for name in "qkv"))


def standard_normal(shapes: Shapes, draws: Draws) -> Inputs:
    """Returns q, k and v of independent N(0, 1)."""
    return Inputs(*(draws.normal(name, getattr(shapes, name)) for name in "qkv"))


def normal(
    shapes: Shapes, draws: Draws, *, logits: float = 1.0, values: float = 1.0
) -> Inputs:
    """Draws independent N(0, 1). `logits` multiplies q, and so the spread of the scores;
    `values`, v."""
    q, k, v = standard_normal(shapes, draws)
    return Inputs(q * logits, k, v * values)


def outliers(
    shapes: Shapes, draws: Draws, *, rate: float = 0.001, variance: float = 100.0
) -> Inputs:
    """Draws N(0, 1) plus N(0, `variance`) in a fraction `rate` of the entries, as
    activations have. Raises ValueError for a `variance` below 0, and for a `rate`
    outside of [0, 1]."""
    _expect(variance >= 0 and 0 <= rate <= 1, "variance >= 0 and rate within [0, 1]")
    deviation = math.sqrt(variance)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns one tensor of the regime."""
        rare = draws.uniform(f"{name} rare", shape) < rate
        return draws.normal(name, shape) + rare * (
            draws.normal(f"{name} extra", shape) * deviation
        )

    return draw_each(shapes, one)


def sink(
    shapes: Shapes, draws: Draws, *, strength: float = 8.0, value: float = 0.1
) -> Inputs:
    """Draws N(0, 1) such that, at the scale 1 / sqrt(head_dim), key 0 scores higher than
    the others by about `strength` in every row, and its V is `value` times N(0, 1). The
    other keys have no component along key 0."""
    q, k, v = standard_normal(shapes, draws)
    dim = shapes.head_dim
    direction = torch.full((dim,), dim**-0.5, dtype=torch.float32, device="cpu")
    # In fp64, rounded once: the last bits of a product in fp32 depend on the processor.
    wide, along = k.double(), direction.double()
    k = (wide - (wide @ along)[..., None] * along).float()
    k[:, :, 0] = direction * shapes.head_dim**0.5
    v[:, :, 0] *= value
    return Inputs(q + direction * strength, k, v)


def ties(
    shapes: Shapes, draws: Draws, *, count: int = 2, strength: float = 8.0
) -> Inputs:
    """Draws inputs whose first `count` keys are equal and score higher than all others by
    about `strength`, at the scale 1 / sqrt(head_dim); V is negative there. With kv_len or
    more all keys are equal. Raises ValueError for a `count` below 1."""
    _expect(count >= 1, "count >= 1")
    q, k, v = sink(shapes, draws, strength=strength, value=1.0)
    k[:, :, :count] = k[:, :, :1]
    v[:, :, :count] = -(v[:, :, :count].abs() + 1.0)
    return Inputs(q, k, v)


def border_ties(
    shapes: Shapes, draws: Draws, *, every: int = 64, strength: float = 8.0
) -> Inputs:
    """Draws inputs in which the keys on both sides of every multiple of `every` are equal
    to key 0, which scores higher than the others by about `strength`, at the scale 1 /
    sqrt(head_dim). Raises ValueError for `every` below 1, and above kv_len, with which no
    key would be equal to key 0."""
    keys = shapes.kv_len
    _expect(1 <= every <= keys, f"every >= 1 and at most the {keys} keys, got {every}")
    q, k, v = sink(shapes, draws, strength=strength, value=1.0)
    for first in (every - 1, every):
        k[:, :, first::every] = k[:, :, :1]
    return Inputs(q, k, v)


def one_signed_gradient(
    shapes: Shapes, draws: Draws, *, count: int = 2, strength: float = 8.0
) -> Inputs:
    """Draws q and k as `ties` does with this `count` and `strength` (`count` 0: N(0, 1)
    without ties), with all of V and of dO negative, -1 - |N(0, 1)|. Raises ValueError for
    a `count` below 0."""
    _expect(count >= 0, "count >= 0")
    inputs = (
        ties(shapes, draws, count=count, strength=strength)
        if count
        else standard_normal(shapes, draws)
    )
    v = draws.normal("v", shapes.v)
    grad_out = draws.normal("grad_out", shapes.out)
    return Inputs(inputs.q, inputs.k, -(v.abs() + 1.0), -(grad_out.abs() + 1.0))


def one_sign(shapes: Shapes, draws: Draws, *, least: float = 1.0) -> Inputs:
    """Draws N(0, 1) but for V, which is `least` + |N(0, 1)|. Raises ValueError for a
    `least` below 0, with which V had both signs."""
    _expect(least >= 0, "least >= 0")
    q, k, v = standard_normal(shapes, draws)
    return Inputs(q, k, v.abs() + least)


def far_below(
    shapes: Shapes, draws: Draws, *, lse: float = -120.0, q: float = 1.0
) -> Inputs:
    """Draws inputs whose log-sum-exp is about `lse` in every row, at the scale 1 /
    sqrt(head_dim) and with all keys seen. Feature 0 of every query is `q`; that of every
    key is one number, which brings all scores down to what `lse` needs. Raises ValueError
    for a `q` of 0."""
    _expect(q != 0, "q other than 0")
    queries, keys, values = standard_normal(shapes, draws)
    # Scores of N(0, 1) alone have a log-sum-exp of about log(kv_len) + 1/2.
    score = lse - math.log(shapes.kv_len) - 0.5
    queries[..., 0] = q
    keys[..., 0] = score * math.sqrt(shapes.head_dim) / q
    return Inputs(queries, keys, values)


def massive_channel(
    shapes: Shapes, draws: Draws, *, q: float = 448.0, k: float = 1880.0
) -> Inputs:
    """Draws N(0, 1) with one feature, in the middle, that is the constant `q` in every
    query and `k` in every key."""
    queries, keys, values = standard_normal(shapes, draws)
    channel = shapes.head_dim // 2
    queries[..., channel], keys[..., channel] = q, k
    return Inputs(queries, keys, values)


def near_constant_keys(shapes: Shapes, draws: Draws, *, spread: float = 0.01) -> Inputs:
    """Draws N(0, 1), where all keys of a head are one common vector plus `spread` times
    N(0, 1)."""
    q, k, v = standard_normal(shapes, draws)
    common = draws.normal("k common", (*shapes.k[:2], 1, shapes.head_dim))
    return Inputs(q, common + spread * k, v)


def low_rank(shapes: Shapes, draws: Draws, *, rank: int = 2) -> Inputs:
    """Draws K and V as sums of `rank` outer products of N(0, 1), scaled to the variance 1
    and rounded to fp32: of rank `rank` but for that rounding, or less where their sides
    are shorter. q is N(0, 1). Raises ValueError for a `rank` below 1."""
    _expect(rank >= 1, "rank >= 1")

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns one tensor of the regime."""
        if name == "q":
            return draws.normal(name, shape)
        left = draws.normal(f"{name} left", (*shape[:3], rank)).double()
        right = draws.normal(f"{name} right", (*shape[:2], rank, shape[3])).double()
        total = torch.zeros(shape, dtype=torch.float64, device="cpu")
        for r in range(rank):  # a matrix product's order depends on the machine
            total = total + left[..., r : r + 1] * right[..., r : r + 1, :]
        return (total / math.sqrt(rank)).float()

    return draw_each(shapes, one)


def correlated(shapes: Shapes, draws: Draws, *, rho: float = 0.9) -> Inputs:
    """Draws N(0, 1) entries; the tokens of a head are correlated, `rho` between any two.
    Raises ValueError for a `rho` outside of [0, 1], and for NaN."""
    _expect(0 <= rho <= 1, "rho within [0, 1]")

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns one tensor of the regime."""
        common = draws.normal(f"{name} common", (*shape[:2], 1, shape[3]))
        return common * math.sqrt(rho) + draws.normal(name, shape) * math.sqrt(1 - rho)

    return draw_each(shapes, one)


def near_overflow(shapes: Shapes, draws: Draws, *, peak: float = 6e4) -> Inputs:
    """Draws N(0, 1) but for V, which is N(0, 1) limited to [-3, 3] and scaled so that 3
    becomes `peak`."""
    q, k, v = standard_normal(shapes, draws)
    return Inputs(q, k, v.clamp(-3.0, 3.0) * (peak / 3.0))


# --- every link of the biased-rounding chain by hand (Qiu & Yao, arXiv 2510.04212) ----
#
# Every number is exact in bfloat16 and in float16, and sums of two such values in float16
# too (`v_bits` 11 gives it values that fill it, which bfloat16 rounds). Feature 0 of q is
# about sqrt(head_dim), that of a key its score, so levels and the tail's mass hold at the
# default scale; exactly where sqrt(head_dim) and the level have 8 bits, as with head_dim
# 64.


def biased_rounding(
    shapes: Shapes,
    draws: Draws,
    *,
    count: int = 2,
    level: float = 8.0,
    tail: float = 1e-3,
    share: float = 1.0,
    value: float = 1.0,
    v_sign: int = 1,
    tail_sign: int = 1,
    grad_sign: int = 1,
    v_bits: int = 8,
) -> Inputs:
    """Draws inputs, with grad_out, for each condition of the biased-rounding chain.
    `count` equal keys score `level` in a `share` of the rows, at the scale 1 /
    sqrt(head_dim). All other keys together weigh about `tail` times one of them there.
    |V| is `value` times larger at the equal keys. `v_sign` (V at equal keys), `tail_sign`
    (V elsewhere) and `grad_sign` (dO): 1 is negative, -1 positive, 0 random. `v_bits`:
    significant bits of V. Raises ValueError for a `count` below 1, a `tail` below 0, a
    `value` not above 0, a `share` outside of [0, 1], `v_bits` outside of 2 to 24, and
    another sign. Details: docs/hazards.md#biased_rounding."""
    _expect(
        count >= 1 and tail >= 0 and value > 0 and 0 <= share <= 1,
        "count >= 1, tail >= 0, value > 0 and share within [0, 1]",
    )
    _expect(2 <= v_bits <= 24, "v_bits from 2 to 24")  # fp32 has 24
    tied = min(count, shapes.kv_len)
    others = shapes.kv_len - tied
    q = draws.normal("q", shapes.q) * NOISE
    k = draws.normal("k", shapes.k) * NOISE
    chance = draws.uniform("share", shapes.q[:3])
    q[..., 0] = torch.where(chance < share, math.sqrt(shapes.head_dim), 0.0).float()
    gap = UNSEEN
    if tail and others:  # noise in the scores raises the mean of their exp
        gap = (
            math.log(tail / others)
            - NOISE**4 * (shapes.head_dim - 1) / shapes.head_dim / 2
        )
    k[..., 0] = level + gap
    k[:, :, :tied] = 0.0
    k[:, :, :tied, 0] = level
    v = _significands("v", shapes.v, v_bits, draws)
    of_tied, of_others = ((*shapes.v[:2], n, shapes.v_dim) for n in (tied, others))
    v[:, :, :tied] *= value * _signs("tied v sign", of_tied, v_sign, draws)
    v[:, :, tied:] *= _signs("tail v sign", of_others, tail_sign, draws)
    grad_out = _significands("grad_out", shapes.out, 8, draws)
    grad_out *= _signs("grad_out sign", shapes.out, grad_sign, draws)
    return Inputs(
        _rounded_to_bits(q), _rounded_to_bits(k), _rounded_to_bits(v, v_bits), grad_out
    )


def _significands(name: str, shape: tuple[int, ...], bits: int, draws: Draws) -> Tensor:
    """Returns numbers uniform over those of `bits` significant bits in [1, 2), fp32, of
    this shape; `name` picks the random stream."""
    first = 1 << (bits - 1)
    return draws.integers(name, shape, first, 2 * first).float() / first


def _signs(name: str, shape: tuple[int, ...], sign: int, draws: Draws) -> Tensor:
    """Returns -1 everywhere for `sign` 1, and 1 everywhere for -1, fp32: in
    `biased_rounding` sign 1 means negative numbers. For 0 each is -1 or 1, at random
    (stream `name`). Raises ValueError for another sign."""
    if sign not in (-1, 0, 1):
        raise ValueError("expected a sign of 1, 0 or -1")
    if sign:
        return torch.full(shape, -float(sign), dtype=torch.float32, device="cpu")
    return draws.integers(name, shape, 0, 2).float() * 2.0 - 1.0


def _rounded_to_bits(x: Tensor, bits: int = 8) -> Tensor:
    """Returns x rounded to `bits` significant bits, 0 where that is below SMALLEST in
    magnitude. With 8 bits every number is exact in bfloat16, and in float16 where its
    range reaches."""
    rounded = round_to(x, format_named(f"e8m{bits - 1}"))
    return rounded.masked_fill(rounded.abs() < SMALLEST, 0.0)


def ones(shapes: Shapes, draws: Draws) -> Inputs:
    """Draws N(0, 1) but for V = 1: every output of a row that sees a key is 1."""
    q, k, v = standard_normal(shapes, draws)
    return Inputs(q, k, torch.ones_like(v))


def one_key(shapes: Shapes, draws: Draws) -> Inputs:
    """Draws one key and its value for each head, repeated kv_len times: every output of a
    row that sees a key is that value."""
    q, k, v = standard_normal(shapes, draws)
    return Inputs(q, k[:, :, :1].expand_as(k).clone(), v[:, :, :1].expand_as(v).clone())


def uniform(shapes: Shapes, draws: Draws) -> Inputs:
    """Draws one key for each head, repeated kv_len times, with V of N(0, 1): all scores
    of a row are equal, and its output is the mean of V over the keys that it sees."""
    q, k, v = standard_normal(shapes, draws)
    return Inputs(q, k[:, :, :1].expand_as(k).clone(), v)


def one_hot(shapes: Shapes, draws: Draws, *, margin: float = 80.0) -> Inputs:
    """Draws inputs in which one key of every query scores higher than all others by
    `margin` or more, at the scale 1 / sqrt(head_dim). The key is drawn among those that a
    causal mask shows the query: the last query sees the last key, or query i keys 0 to i
    where there are fewer keys than queries. Raises ValueError for a `margin` that is not
    above 0."""
    return _sign_coded(shapes, draws, 1, margin)


def two_hot(shapes: Shapes, draws: Draws, *, margin: float = 80.0) -> Inputs:
    """Draws inputs in which two equal keys of every query, half the length apart, score
    higher than all others by `margin` or more, at the scale 1 / sqrt(head_dim). The
    output is the mean of two values where the row sees both. With an odd kv_len the
    middle key has no equal. Raises ValueError for a `margin` that is not above 0."""
    return _sign_coded(shapes, draws, 2, margin)


def _sign_coded(shapes: Shapes, draws: Draws, copies: int, margin: float) -> Inputs:
    """Returns inputs whose keys are different sign patterns, each repeated `copies` times
    (the last perhaps less often), and whose queries are the patterns of their keys. Such
    a key scores higher than all others by `margin` or more at the scale 1 /
    sqrt(head_dim). A pattern is the key's number in binary, each bit repeated in as many
    features as there are, so that two patterns' scores differ by a multiple of 2 *
    repeats * (size of the entries) / sqrt(d). The entries of q and k are powers of two
    with either sign, or 0. Where head_dim has too few features, the keys that get no
    pattern are 0, and score lower by bits * repeats * size / sqrt(d). Raises ValueError
    for a `margin` that is not above 0."""
    _expect(margin > 0, "margin > 0")
    distinct = -(-shapes.kv_len // copies)
    bits = min(shapes.head_dim, max(1, (distinct - 1).bit_length()))
    repeats = shapes.head_dim // bits
    coded = min(distinct, 2**bits)
    # The scores of two patterns differ by 2 of these in one bit, a key of 0 by 1 in each
    steps = repeats * (2 if coded == distinct else min(2, bits))
    size = math.ceil(math.log2(margin * math.sqrt(shapes.head_dim) / steps))

    code = draws.permutation("code", coded)
    sign = (((code[:, None] >> torch.arange(bits)) & 1) * 2 - 1).float()  # [coded, bits]
    patterns = torch.zeros((distinct, shapes.head_dim), dtype=torch.float32, device="cpu")
    patterns[:coded, : bits * repeats] = sign.repeat(1, repeats)
    flips = draws.normal("flips", (*shapes.k[:2], 1, shapes.head_dim)).sign()
    keys = patterns[torch.arange(shapes.kv_len) % distinct] * flips

    last = torch.arange(shapes.q_len) + max(0, shapes.kv_len - shapes.q_len)
    choice = draws.uniform("target", shapes.q[:3])
    target = (choice * (last.clamp_max(shapes.kv_len - 1) + 1)).long() % distinct % coded
    flips = flips.repeat_interleave(shapes.heads // shapes.kv_heads, dim=1)
    half = size // 2
    return Inputs(
        patterns[target] * flips * math.ldexp(1.0, size - half),
        keys * math.ldexp(1.0, half),
        draws.normal("v", shapes.v),
    )


_ALL: tuple[Callable[..., Inputs], ...] = (
    normal,
    outliers,
    sink,
    ties,
    one_signed_gradient,
    one_sign,
    far_below,
    massive_channel,
    border_ties,
    near_constant_keys,
    low_rank,
    correlated,
    near_overflow,
    biased_rounding,
    ones,
    one_key,
    uniform,
    one_hot,
    two_hot,
)
REGIMES = {regime.__name__: regime for regime in _ALL}


def checked_regime(name: str, options: Mapping[str, object]) -> Callable[..., Inputs]:
    """Returns the regime `name`, a function of shapes and draws. Raises UsageError for an
    unknown regime, and for the first of `options` that is no parameter of it; the values
    of `options` are not looked at."""
    regime = REGIMES.get(name)
    if regime is None:
        raise UsageError(f"unknown input regime {name!r}", hint=closest(name, REGIMES))
    parameters = list(inspect.signature(regime).parameters)[2:]
    for option in options:
        if option not in parameters:
            hint = closest(option, parameters)
            raise UsageError(
                f"input regime {name} has no parameter {option!r}", hint=hint
            )
    return regime


def draw(
    name: str,
    shapes: Shapes,
    *,
    seed: int,
    options: Mapping[str, object],
    label: str = "",
    gradients: bool = False,
) -> Inputs:
    """Returns the inputs of the regime `name`, fp32, on the CPU; `label` gives cases of
    one audit different draws. With `gradients` also grad_out, the regime's, else N(0, 1);
    it changes no q, k or v. Without, grad_out is None. Raises UsageError for an unknown
    regime or parameter, for values that the regime cannot draw with, and where a tensor
    that it draws is not finite in fp32."""
    regime, draws = checked_regime(name, options), Draws(seed, label)
    try:
        inputs = regime(shapes, draws, **options)
        for tensor in ("q", "k", "v", "grad_out"):
            x = getattr(inputs, tensor)
            if x is not None and not bool(x.isfinite().all()):
                raise ValueError(f"expected a {tensor} that is finite")
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        written = ", ".join(f"{name}={value!r}" for name, value in options.items())
        what = f"input regime {name} does not work with {written or 'its defaults'}"
        hint = "its parameters must be numbers" if isinstance(error, TypeError) else None
        raise UsageError(f"{what}: {error}", hint=hint) from error
    grad_out = inputs.grad_out if gradients else None
    if gradients and grad_out is None:
        grad_out = draws.normal("grad_out", shapes.out)
    return replace(inputs, grad_out=grad_out)


def draw_mask(kind: str, shapes: Shapes, *, seed: int, label: str = "") -> Tensor:
    """Returns a mask on the CPU that broadcasts to [batch, heads, q_len, kv_len]. Bool
    (True: seen) for the kinds `padding`, `one_empty`, `all_true`, `causal`, `random` and
    `mostly_masked`; additive, fp32, for `bias`, `bias_lowest` and `bias_inf`
    (docs/hazards.md). Another kind is drawn as `bias_inf`. `seed` and `label` pick the
    random stream."""
    draws, rows, keys = (
        Draws(seed, label),
        torch.arange(shapes.q_len),
        torch.arange(shapes.kv_len),
    )
    if kind == "padding":  # entry b of B sees the first (b + 1) / (B + 1) of the keys
        entry = torch.arange(shapes.batch)[:, None, None, None]
        lengths = (shapes.kv_len * (entry + 1) + shapes.batch) // (shapes.batch + 1)
        return torch.arange(shapes.kv_len) < lengths
    if kind == "one_empty":
        return (torch.arange(shapes.batch) > 0)[:, None, None, None].expand(
            -1, 1, 1, len(keys)
        )
    if kind in ("all_true", "causal"):
        whole = torch.ones((1, 1, len(rows), len(keys)), dtype=torch.bool, device="cpu")
        return whole if kind == "all_true" else whole.tril()
    if kind == "bias":
        return draws.normal("mask", (1, shapes.heads, len(rows), len(keys)))
    chance = draws.uniform("mask seen", (shapes.batch, 1, len(rows), len(keys)))
    if kind in ("random", "bias_lowest"):
        empty = draws.uniform("mask empty", (shapes.batch, 1, len(rows), 1)) < 0.1
        if len(rows) > 1:  # the middle row sees no key for certain, the first some
            empty[:, :, len(rows) // 2] = True
            empty[:, :, 0] = False
        seen = (chance < 0.6) & ~empty
        if kind == "random":
            return seen
        lowest = torch.finfo(torch.float32).min  # as transformers writes it
        return torch.zeros(seen.shape, dtype=torch.float32, device="cpu").masked_fill(
            ~seen, lowest
        )
    # One key in each row is seen, which a causal mask leaves too.
    choice = draws.uniform("mask key", (shapes.batch, 1, len(rows)))
    key = (choice * (rows.clamp_max(len(keys) - 1) + 1)).long()
    seen = (chance < (0.02 if kind == "mostly_masked" else 0.6)) | (
        key[..., None] == keys
    )
    if kind == "mostly_masked":
        return seen
    # bias_inf
    return draws.normal("mask", tuple(seen.shape)).masked_fill(~seen, -math.inf)
