"""The emulated kernel: exact when nothing rounds, rounding where it says, true to what it
models.

`oracles.attention` (90 digits) is the truth for small cases, the fp64 reference for
larger ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_bounds import of_group, operands, weights
from oracles import FEATURES, U64, assert_within, attention, error_bounds, make_case, step
from recipes import REGIMES, autograd, drawn, everything, is_representable, rms, watched
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, visible
from numdev.errors import Refused, UsageError
from numdev.formats import FORMATS, format_named, format_of, round_to, ulp
from numdev.kernels import find
from numdev.kernels.emulation import backward
from numdev.kernels.emulation import forward as module
from numdev.kernels.emulation.backward import gradients
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.recipe import BACKWARD, FORWARD, PRESETS, SITES, recipe
from numdev.kernels.emulation.rounding import Rounder, rounding
from numdev.kernels.reference import attend as reference
from numdev.kernels.reference import gradients as in_fp64
from numdev.studies.diagnose import cures
from numdev.studies.diagnose.exact_and_rounded_passes import PRODUCT
from numdev.studies.effects.rounding_sites import ATTENTION

BF16 = FORMATS["bfloat16"]
KERNEL = find("emulated")
nan, inf = math.nan, math.inf


def emulate(case: AttentionCase, **options: Any) -> Tensor:
    """The emulation's output as float64."""
    return KERNEL.attend(case, **options).out.double()


def max_error(case: AttentionCase, **options: Any) -> float:
    """max |o - r|, geometric mean over heads."""
    error = (emulate(case, **options) - reference(case).out).abs().amax(dim=(0, 2, 3))
    return float(error.log().mean().exp())


@pytest.mark.parametrize(("options", "says"), [
    ({"preset": "eagre"}, "unknown preset 'eagre'; did you mean 'eager'"),
    ({"row_sums": "exact"}, "a recipe has no 'row_sums'; did you mean 'row_sum'"),
    ({"p": "bfloat61"}, "site p: unknown format 'bfloat61'; did you mean 'bfloat16"),
    ({"loop_order": "k"}, "loop_order is 'k'; did you mean 'kv'"),
    ({"block_kv": 0}, "block_kv is 0; expected a positive whole number"),
    ({"preset": "eager", "block_kv": 64}, "has a single tile"),
    ({"preset": "eager", "l_from": "rounded"}, "divides P by l"),
    ({"max_lag": 8, "algorithm": "fa1"}, "max_lag with an algorithm other than fa2"),
    ({"memory": 64, "block_kv": 64}, "memory and block_kv both set the tile"),
    ({"beta": 2.0}, "beta is of the stabilised softmax"),
    ({"softmax": "guarded", "tie_tolerance": 0.0}, "of the stabilised softmax"),
    *(
        ({"softmax": "stabilised", **wrong}, says)
        for wrong, says in (
            ({"beta": 0.5}, "at least 1.0"),
            ({"tie_tolerance": -1e-3}, "at least 0.0"),
            ({"tie_tolerance": nan}, "at least 0.0"),
        )
    ),
    *(
        ({site: "float8_e4m3fn"}, f"{site} must hold -inf")
        for site in ("bias", "max", "exponent", "lse", "s", "lse_read", "p_backward")
    ),
])  # fmt: skip
def test_a_wrong_recipe_is_refused_in_words(options: dict[str, Any], says: str) -> None:
    """An unknown name gets the closest known one, and contradictions are not ignored."""
    with pytest.raises(UsageError) as error:
        recipe(**options)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("options", "head_dim", "tile"),
    [
        # FlashAttention-1: Bc = ceil(M / 4d), Br = min(Bc, d).
        ({"preset": "golden2024"}, 64, (16, 16)),
        ({"preset": "golden2024", "memory": 65536}, 64, (64, 256)),
        ({"preset": "golden2024", "memory": 1000}, 80, (4, 4)),
        ({"preset": "golden2024", "memory": 2**30}, 64, (64, 1000)),
        ({"preset": "fa2", "memory": 16384, "block_q": 7}, 64, (7, 64)),
        ({"preset": "fa2"}, 64, (128, 128)),
        ({"preset": "fa2"}, 128, (128, 64)),
        ({"preset": "fa2", "block_kv": 5000}, 128, (128, 1000)),
        ({"preset": "qiu2025"}, 64, (512, 512)),
        ({"preset": "eager"}, 64, (1, 1000)),
        ({"preset": "fa2", "algorithm": "plain"}, 64, (1, 1000)),
        ({"preset": "eager", "algorithm": "fa2", "block_kv": 9}, 64, (1, 9)),
    ],
)
def test_tiles(options: dict[str, Any], head_dim: int, tile: tuple[int, int]) -> None:
    """Tiles follow the preset's rule, the memory, or what is given; never beyond the
    keys."""
    assert recipe(**options).tile(head_dim, 1000) == tile


SAME = ("one key", "scale 0", *(name for name in FEATURES if "no key" in name))
"""Where the stabilised softmax shifts no row."""


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("softmax", ["plain", "stabilised", "guarded"])
@pytest.mark.one_in(3)
def test_exact_is_attention(softmax: str, name: str) -> None:
    """With all sites exact every algorithm, tile, order and softmax is within fp64
    rounding of the 90-digit answer, with all features. Every row of the stabilised one
    has two keys tied.

    `error_bounds` is for two passes and S - m of at most 2 A. A tile adds an exponent and
    up to three products and a quotient; stabilised, m is up to 2 A, an exponent up to 3 A
    and a factor's up to 4 A. In all 8 A u + 8 u for each tile, two merged splits, and a
    weight."""
    case, exact = oracle(name)
    out, lse = error_bounds(case, exact)
    of_it = {
        "softmax": softmax,
        **({"tie_tolerance": 1e4} if softmax == "stabilised" else {}),
    }
    shifted = False
    for algorithm, (loop, order), tile in itertools.product(
        ("fa2", "fa1", "plain"),
        (("q", "ascending"), ("kv", "descending")),
        ({"block_kv": 3, "block_q": 2}, {"block_kv": 3, "splits": 2}, {"block_kv": 1}, {},
         {"block_kv": 1, "max_lag": 2}),
    ):  # fmt: skip
        if algorithm == "plain" and (tile or softmax == "guarded"):
            continue
        if algorithm != "fa2" and "max_lag" in tile:
            continue
        options = {"algorithm": algorithm, "loop_order": loop, "kv_order": order, **tile}
        O, L = attend(case, recipe("exact", **options, **of_it))
        more = (
            (-(-case.kv_len // tile.get("block_kv", 64)) + 3) * (8 * exact.size + 8) * U64
        )
        assert_within(
            O, exact.out, out + 2 * more[..., None] * exact.term_scale.astype(float)
        )
        assert_within(L, exact.lse, lse + more)
        shifted |= not torch.equal(O, attend(case, recipe("exact", **options))[0])
    assert shifted or softmax != "stabilised" or name in SAME


def test_a_maximum_that_lags_keeps_whole_weights() -> None:
    """Scores 0, 0 and then ln 3, 0: counted from the first tile's maximum P is 1, 1, 3, 1,
    which bfloat16 holds; counted from their own the last is 1/3, which it does not. It
    lags by 2 in log2, since log2(3) is 1.58, and not by 1."""
    keys = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.bfloat16)[:, None]
    values = torch.tensor([2.0, 4.0, 8.0, 64.0], dtype=torch.bfloat16)[:, None]
    case = AttentionCase(
        ref=CaseRef(case="lag"), q=torch.ones(1, 1, 1, 1, dtype=torch.bfloat16),
        k=keys[None, None], v=values[None, None], scale=math.log(3),
    )  # fmt: skip
    lags, follows, never = (
        float(attend(case, recipe("fa2", block_kv=2, max_lag=lag, out="exact"))[0])
        for lag in (2, 1, None)
    )
    # Within fp32's rounding of a sum of four; 1/3 in bfloat16 is 2^-9 too large
    assert lags == pytest.approx((2 + 4 + 3 * 8 + 64) / 6, rel=4 * 2**-24)
    assert follows == never
    assert follows == pytest.approx(lags + 64 / 2 * 2**-9 / 3, rel=1e-4)


@functools.cache
def oracle(name: str) -> tuple[AttentionCase, Any]:
    case = make_case(**FEATURES[name])
    return case, attention(case)


@pytest.mark.parametrize("preset", PRESETS)
def test_float64_needs_no_rounding_to_the_working_format(preset: str) -> None:
    """In a float64 case `working` sites round nothing, so presets differ by their fp32
    sites."""
    case = make_case(q_len=9, kv_len=9)
    error = (emulate(case, preset=preset, block_q=2) - reference(case).out).abs().max()
    assert error < (1e-15 if preset in ("golden2024", "exact") else 1e-6)


BROUGHT: dict[str, dict[str, Any]] = {
    "q_scaled": {"scale_in": "q"}, "k_scaled": {"scale_again": "k_log2"}, "merge": {"splits": 2},
    "ds_scaled": {"ds_scale": "before"}, "dq_partial": {"splits": 2},
}  # fmt: skip
"""What brings a site into play."""


@pytest.mark.parametrize("site", SITES)
def test_a_coarse_site_rounds(site: str) -> None:
    """A site of e8m2 passes on no other values and changes a result; all others stay
    exact."""
    case, names = everything(), ("out", "lse", "dq", "dk", "dv")
    options = {"preset": "exact", "block_q": 4, "block_kv": 4, "loop_order": "kv"}
    options |= BROUGHT.get(site, {})
    plain = KERNEL.gradients(case, **options)
    with watched() as seen:
        coarse = KERNEL.gradients(case, **options, **{site: "e8m2"})
    at_site = [x for name, x in seen if name == site]
    assert at_site
    assert all(is_representable(x, "e8m2") for x in at_site)
    assert len({name for name, x in seen if not is_representable(x, "e8m2")}) > 20
    same = [torch.equal(getattr(plain, n), getattr(coarse, n)) for n in names]
    assert not all(same)
    if site in ("lse", "out") or site in BACKWARD:
        assert same[:2] == [site != "out", site != "lse"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("compute", ["float64", "float32"])
def test_a_preset_rounds_as_its_table_says(preset: str, compute: str) -> None:
    """What leaves a site is of the preset's format; every site without an option is
    reached."""
    tile = {} if preset == "eager" else {"block_q": 4, "block_kv": 4}
    with watched() as seen:
        KERNEL.gradients(everything(), preset=preset, compute=compute, **tile)
    for site, value in seen:
        fmt = PRESETS[preset].format_at(site, BF16)
        assert fmt is None or is_representable(value, fmt.name), site
    optional = {"q_scaled", "k_scaled", "merge", "dq_partial"}
    optional |= set() if preset == "golden2024" else {"state"}
    optional |= {"delta_o"} if preset == "eager" else set()
    optional |= set() if preset in ("eager", "qiu2025") else {"ds_scaled"}
    # Not called where they round nothing
    if preset in ("exact", "fa2") or compute == "float32":
        optional |= {"dk", "dv", "dk_product", "dv_product"}
    reached = {site for site, _ in seen}
    assert set(SITES) - optional <= reached <= set(SITES)


def test_sites_of_a_part_of_attention_are_all_in_its_group() -> None:
    """A site that a group lacks stays as it is where the others are made exact, wide or
    coarse: of P V and its normalisation, and of the whole forward pass."""
    of_output = set(FORWARD[FORWARD.index("pv") :]) - {"lse", "out"}
    assert cures.WIDER_FORMAT["P V in fp32"].options.keys() == of_output
    assert set(PRODUCT) == of_output - {"normalised", "merge"}
    in_groups = [site for group in ATTENTION.values() for site in group]
    assert sorted(in_groups) == sorted(set(FORWARD) - {"lse"})


HARD = [0.0, -0.0, 1.0, -1.0, inf, -inf, nan]
HARD += [
    1 + 2**-8,
    1 + 2**-7 + 2**-8,
    1 + 2**-8 + 2**-30,
    1 + 2**-11,
    1 + 2**-11 + 2**-40,
]
HARD += [1 + 2**-24, 1 + 2**-23 + 2**-24, 1 + 2**-24 + 2**-50, 1 + 2**-8 + 2**-40]
HARD += [
    2.0**-126,
    2.0**-127,
    2.0**-149,
    2.0**-150,
    2.0**-150 * 1.01,
    3 * 2.0**-150,
    1e-320,
]
HARD += [
    2.0**-24,
    2.0**-25,
    2.0**-25 * 1.01,
    3 * 2.0**-25,
    2.0**-14 - 2.0**-25,
    65504,
    65519.9,
]
HARD += [65520, 3.38e38, 3.39e38, 3.3961775e38, 3.4028235e38, 3.4028236e38, 1e39, 1e300]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "e8m7", "float16", "tf32", "e8m3"]
)
def test_the_fast_way_rounds_as_round_to(dtype: torch.dtype, name: str) -> None:
    """torch's cast, where it is used, gives the same numbers: hard ones, and 10^5 random
    ones."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(100_000, generator=generator, dtype=torch.float64) * 320 - 160
    wide = (
        torch.randn(100_000, generator=generator, dtype=torch.float64) * exponents.exp2()
    )
    x = torch.cat([torch.tensor(HARD, dtype=torch.float64), wide]).to(dtype)
    x = torch.cat([x, -x])
    step = rounding(format_named(name), dtype, "nearest", torch.Generator())
    passed = x if step is None else step(x)
    expected = round_to(x, format_named(name))
    assert passed.dtype == dtype
    assert torch.equal(passed.nan_to_num(7.0), expected.nan_to_num(7.0))
    number = ~x.isnan()
    assert torch.equal(passed.signbit()[number], expected.signbit()[number])


def test_a_value_is_rounded_once() -> None:
    """1 + 2^-8 + 2^-40, the mean of two V's, becomes 1.0078125 in bfloat16 and not
    1.0."""
    twice = torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64).bfloat16()
    assert twice == 1.0  # else torch has mended its casts, which go by way of float32
    v = torch.tensor([1 + 2**-7, 1 + 2**-39], dtype=torch.float64).view(1, 1, 2, 1)
    case = make_case(heads=1, q_len=1, kv_len=2, head_dim=1)
    case = dataclasses.replace(case, q=torch.zeros_like(case.q), v=v)
    assert emulate(case, preset="exact").item() == 1 + 2**-8 + 2**-40
    assert emulate(case, preset="exact", out="bfloat16").item() == 1.0078125
    assert (
        emulate(case, preset="exact", normalised="float32", out="bfloat16").item() == 1.0
    )


def test_stochastic_rounding_is_seeded_and_unbiased() -> None:
    """The mean over 100 seeds is the exact output to 6 standard errors of ulp / 2 /
    sqrt(100)."""
    case = drawn(16, heads=1, head_dim=4)
    options = {"preset": "exact", "out": "bfloat16", "rounding": "stochastic"}
    runs = [emulate(case, **options, seed=seed) for seed in range(100)]
    assert torch.equal(runs[3], emulate(case, **options, seed=3))
    assert not torch.equal(runs[3], runs[4])
    exact = emulate(case, preset="exact")
    error = torch.stack(runs).mean(dim=0) - exact
    assert (error.abs() < 6 * ulp(exact, BF16) / 20).all()


def test_the_polynomial_of_flash_attention_4() -> None:
    """Within 8.8e-5 of exp, exact at powers of two, 0 below 2^-127; `fa4` has it in an
    eighth."""
    x = torch.linspace(-88, 5.5, 1 << 17, dtype=torch.float64)
    assert 8.5e-5 < float((module._cubic(x) / x.exp() - 1).abs().max()) < 8.8e-5
    result = module._cubic(
        torch.tensor([0.0, 8.0, -126.0, -128.0, -inf]).double() * math.log(2)
    )
    assert result.tolist() == pytest.approx([1.0, 256.0, 2.0**-126, 0.0, 0.0], rel=1e-13)
    other = (module._fa4(x[:256].clone()) != x[:256].exp()).nonzero().flatten().tolist()
    assert other == [i for i in range(256) if i % 16 > 11 and 31 < i % 128 < 96]


def test_fast_exp() -> None:
    """`fexp_u20`: within 1.1e-4; 1 - 5.3e-5 for 0, 0 below fp32's range and for -inf;
    keeps NaN."""
    x = torch.linspace(-87, 0, 200_001, dtype=torch.float64)
    assert ((module._fexp_u20(x) / x.exp() - 1).abs() < 1.1e-4).all()
    one, *nothing, none = module._fexp_u20(
        torch.tensor([0.0, -88.0, -1e30, -inf, nan]).double()
    )
    # y = -1.07034e-4, to a resolution of 2^-17 for y + 127; then half of 1 + frac(y).
    assert one.item() == pytest.approx(1 - 1.07034e-4 / 2, abs=2**-18)
    assert nothing == [0.0] * 3
    assert none.isnan()


@pytest.mark.parametrize(("dtype", "options", "says"), [
    (torch.float8_e4m3fn, {"preset": "golden2024"}, ("bias must hold -inf, which float8_e4m3fn")),
    (torch.float64, {"compute": "float32"}, "float32 would round inputs in float64"),
    (torch.bfloat16, {"compute": "float32", "p": "e11m30"}, ("float32 cannot round p to e11m30")),
    (torch.bfloat16, {"softmax": "guarded", "p": "float8_e5m2"}, "needs 8 bits"),
    (torch.bfloat16, {"softmax": "guarded", "exp": "float8_e5m2"}, "needs 8 bits"),
])  # fmt: skip
def test_what_a_format_cannot_do_is_declined(
    dtype: torch.dtype, options: Any, says: str
) -> None:
    """A recipe that the case's format does not allow is Refused, so its rows are
    skipped."""
    with pytest.raises(Refused, match=says):
        KERNEL.attend(make_case().rounded_to(format_of(dtype)), **options)


@pytest.mark.parametrize("options", [
    {"preset": "fa2"}, {"preset": "eager"}, {"delta_from": "dP*P"},
], ids=str)  # fmt: skip
def test_gradients_of_some_keys_are_those_of_all(options: dict[str, Any]) -> None:
    """Delta is of all keys, wherever it is from; the flag `at_once` changes nothing."""
    case = step(heads=4, kv_heads=2, dtype=torch.float32)
    r = backward.rounder(case, recipe(**options, compute="float32"))
    saved, keys = backward.run_forward(r), torch.tensor([1, 3])
    _, *every = backward.from_forward(r, saved.O, saved.L)
    _, *some = backward.from_forward(r, saved.O, saved.L, keys)
    inputs = dataclasses.replace(saved.with_upstream(case.grad_out), some=keys)
    tiled, at_once = (backward.backward(inputs, at_once=x) for x in (False, True))
    for one, all_of_them in zip(some, every, strict=True):
        torch.testing.assert_close(one, all_of_them[:, :, keys], rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, tiled, at_once))


def test_tiles_cover_what_is_visible_once_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every visible pair lies in one tile; rows are whole blocks that each see something
    of it; so in backward, in one piece or many, for every combination of lengths and
    positions."""
    windows = (None, (0, 0), (2, None), (None, 1), (3, 2))
    every = itertools.product(
        (1, 7, 12), (1, 5, 12), (False, True), (-20, -3, 0, 4, 20), windows
    )
    for (q_len, kv_len, causal, offset, window), budget, (
        block_q,
        block_kv,
    ) in itertools.product(every, (1, 300, 1 << 20), ((1, 1), (2, 3), (5, 4), (64, 64))):
        case = make_case(
            heads=1, q_len=q_len, kv_len=kv_len, is_causal=causal, causal_offset=offset,
            window=window,
        )  # fmt: skip
        monkeypatch.setattr(module, "BLOCK_BYTES", {"cpu": budget})
        shown = visible(case, slice(0, q_len), slice(0, kv_len))
        shown = torch.ones(q_len, kv_len, dtype=torch.bool) if shown is None else shown
        splits = 3 if budget == 300 else None
        r = Rounder(
            recipe("fa2", block_q=block_q, block_kv=block_kv, splits=splits), case
        )
        tiles = [t for s in module.splits(r) for t in module.tiles(r, s)]
        x = case.q
        same = dict.fromkeys(
            ["q", "q_s", "k", "k_s", "v", "dO", "O", "L", "m", "l", "shift"], x
        )
        passed = backward.BackwardInputs(r=r, scale_in="scores", over=None, **same)
        for blocks in (tiles, list(backward.blocks(passed))):
            count = torch.zeros(shown.shape)
            for rows, keys in blocks:
                count[rows, keys] += 1
                assert rows.start % block_q == 0
                assert keys.start % min(block_kv, kv_len) == 0
            assert (count[shown] == 1).all()
            assert count.max() <= 1
        for rows, keys in tiles:
            assert rows.stop % block_q == 0 or rows.stop == q_len
            for first in range(rows.start, rows.stop, block_q):
                assert shown[first : first + block_q, keys].any()


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"eager"}))
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}, {"window": (20, 5)}])
def test_block_q_does_not_matter(preset: str, fields: dict[str, Any]) -> None:
    """The size of the query block changes nothing, in round-to-nearest."""
    case = drawn(96, **fields)
    first, *others = (
        emulate(case, preset=preset, block_q=block_q, block_kv=16)
        for block_q in (1, 8, 33, 96)
    )
    # In the exact preset matrix products of other shapes may differ in their last bit.
    assert all((first - other).abs().max() <= 1e-15 for other in others)


def test_block_q_matters_where_fa1_truncates() -> None:
    """`fa1` shrinks O at every tile that a row's block sees and the row does not."""
    case = drawn(96, is_causal=True)
    options = {"preset": "golden2024", "rounding": "toward_zero", "block_kv": 8}
    small = emulate(case, **options, block_q=8).abs()
    large = emulate(case, **options, block_q=96).abs()
    assert (large <= small).all()
    assert (large < small).any()


@pytest.mark.parametrize("block_kv", [32, 300])
@pytest.mark.parametrize("regime", ["normal", "logits x4", "ties"])
def test_float32_is_within_its_bound(regime: str, block_kv: int) -> None:
    """|o32 - o64| is within the bound of `emulation.forward`, itself below five ulps of
    the term scale; the modes agree in 98 % of the elements, and in rms to 1 %."""
    case = drawn(300, is_causal=True, **REGIMES[regime])
    u, w = BF16.unit_roundoff, 2.0**-24
    n, d, tiles = 300, 64, -(-300 // block_kv)
    truth = reference(case)
    A = case.scale * (
        case.q.double().abs() @ case.k.double().abs().transpose(-1, -2)
    ).amax(-1)
    e = (2 * d + 12 + 4 * tiles) * w * A + (6 + 8 * tiles) * w
    o64 = emulate(case, block_kv=block_kv)
    o32 = emulate(case, block_kv=block_kv, compute="float32")
    T = truth.term_scale
    bound = (2 * u + 2 * e + (2 * n + 8) * w)[..., None] * T + ulp(o64, BF16)
    assert ((o32 - o64).abs() <= bound).all()
    assert (bound < 5 * ulp(T, BF16)).all()
    assert (o32 != o64).double().mean() < 0.02
    ratio = rms(o32 - truth.out) / rms(o64 - truth.out)
    assert ((ratio - 1).abs() < 0.01).all()


@pytest.fixture
def tf32() -> Iterator[Callable[[], tuple[str, ...]]]:
    """TF32 and bf16 passes switched on, and a look at the settings in force."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    backends[0].fp32_precision, backends[1].fp32_precision = "tf32", "bf16"
    yield lambda: tuple(backend.fp32_precision for backend in backends)
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


def test_global_settings_are_off_inside_and_restored(tf32: Any, monkeypatch: Any) -> None:
    """TF32 is off while scores are computed, and as it was afterwards: after an error."""

    def broken(*arguments: Any) -> Tensor:
        raise RuntimeError(" ".join(tf32()))

    monkeypatch.setattr(module, "scores", broken)
    with pytest.raises(RuntimeError, match="ieee ieee"):
        emulate(drawn(8), compute="float32")
    assert tf32() == ("tf32", "bf16")


def test_autocast_and_autograd_have_no_say() -> None:
    """Under autocast the numbers are the same, and inputs that want gradients give
    none."""
    case = drawn(40)
    case = dataclasses.replace(case, q=case.q.clone().requires_grad_())
    plain = emulate(case, compute="float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(emulate(case, compute="float32"), plain)
    assert not plain.requires_grad


def test_golden2024_grows_with_length_and_falls_with_tile_area() -> None:
    """Max error against eager's: 2.22 [1.85, 2.68], 1.44, 1.04 for tiles of 16, 64 and
    256 keys at length 512 over six seeds; square tiles change nothing."""
    case = drawn(512, heads=8)
    eager = max_error(case, preset="eager")
    ratio = {
        m: max_error(case, preset="golden2024", memory=m) / eager for m in (4096, 65536)
    }
    assert ratio[4096] > 1.4 * ratio[65536]
    assert ratio[4096] > 1.5
    square = max_error(case, preset="golden2024", memory=65536, block_q=256) / eager
    assert square == ratio[65536]
    short = drawn(128, heads=8)
    at_128 = max_error(short, preset="golden2024") / max_error(short, preset="eager")
    assert ratio[4096] > 1.2 * at_128


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_devices_agree(preset: str) -> None:
    """On a GPU the numbers of both passes are the CPU's, but where fp64 sums differ."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "is_causal": True, "logits": 2.0}
    by_gpu = KERNEL.gradients(drawn(200, device="cuda", **shape), preset=preset)
    by_cpu = KERNEL.gradients(drawn(200, **shape), preset=preset)
    for name, most in (("out", 1e-3), ("dq", 0.01), ("dk", 0.01), ("dv", 0.01)):
        a, b = getattr(by_gpu, name).cpu(), getattr(by_cpu, name)
        if preset == "exact":
            assert (a - b).abs().max() < 1e-13
        else:
            assert (a != b).double().mean() < most


@pytest.mark.parametrize("block_kv", [1, 16, 200])
def test_consistent_weights_sum_to_one(block_kv: int) -> None:
    """With V = 1 and l from the rounded P, O is exactly 1; else not (flash-attention PR
    2721)."""
    case = drawn(200, logits=2.0)
    case = dataclasses.replace(case, v=torch.ones_like(case.v))
    consistent = emulate(case, preset="fa2-consistent", block_kv=block_kv, out="exact")
    assert (consistent == 1).all()
    assert (emulate(case, preset="fa2", block_kv=block_kv, out="exact") != 1).any()


NAMES = ("dq", "dk", "dv")


def truth_of(case: AttentionCase) -> list[Tensor]:
    return list(autograd(case).values())[1:]


def term_scales(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of absolute terms of dQ, dK and dV, those of dP and delta included."""
    exact = in_fp64(case)
    q, dO, k, v = (x if i == 0 else x.abs() for i, x in enumerate(operands(case)))
    P, _ = weights(case, exact, q, operands(case)[2])
    E = (dO * exact.term_scale).sum(dim=-1, keepdim=True)
    W = abs(case.scale) * P * (dO @ v.mT + E)
    return W @ k, of_group(case, W.mT @ q.abs()), of_group(case, P.mT @ dO)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.one_in(3)
def test_exact_is_the_gradient(name: str) -> None:
    """To 300 u of the term scale: a score has at most eight terms and size 30, and exp
    makes its rounding, up to 2 * 30 u, a relative error of P."""
    case = step(**FEATURES[name])
    truth, scales = truth_of(case), term_scales(case)
    choices = itertools.product(
        ("fa2", "fa1", "plain"),
        (("q", "ascending"), ("kv", "descending")),
        (("lse", "dO*O"), ("m_and_l", "dP*P")),
        (
            ("before", "scores", "separate"),
            ("after", "q", "running"),
            ("after", "q_log2", "running"),
        ),
        ({"block_q": 2, "block_kv": 1}, {"block_q": 2, "block_kv": 3}, {}),
    )
    for algorithm, (loop, order), (p, delta), (
        ds_scale,
        scale_in,
        group,
    ), tile in choices:
        if algorithm == "plain" and tile:
            continue
        created = recipe(
            "exact", algorithm=algorithm, loop_order=loop, kv_order=order, p_from=p,
            delta_from=delta, ds_scale=ds_scale, scale_in=scale_in, group_sum=group, **tile,
            scale_again="k_log2" if (scale_in, p) == ("scores", "lse") else "same",
        )  # fmt: skip
        for result, exact, scale in zip(
            gradients(case, created)[2:], truth, scales, strict=True
        ):
            assert ((result - exact).abs() <= 300 * U64 * scale).all(), created


def test_tiles_matter_through_the_running_sums() -> None:
    """As fp32 sums do; with sums in the working format smaller tiles err more."""
    case = drawn(256)
    truth = truth_of(case)

    def gradients_of_tile(tile: int, sums: str, **more: Any) -> list[Tensor]:
        # Without `p`, whose rounding in forward depends on the tile.
        sites = {"p": "exact", **dict.fromkeys(NAMES, sums)}
        return list(
            gradients(case, recipe(block_q=tile, block_kv=tile, **sites, **more))[2:]
        )

    for a, b, t in zip(
        gradients_of_tile(16, "wide"), gradients_of_tile(128, "wide"), truth, strict=True
    ):
        assert (rms(a - b) < 0.2 * rms(a - t)).all()
    small = gradients_of_tile(16, "working")
    for a, b, t in zip(small, gradients_of_tile(128, "working"), truth, strict=True):
        assert (rms(a - t) > 1.3 * rms(b - t)).all()
    assert not torch.equal(
        gradients_of_tile(16, "working", kv_order="descending")[0], small[0]
    )
    # And forward, where P is rounded
    ways = ({}, {"block_kv": 128}, {"kv_order": "descending"})
    one, *others = (emulate(case, **{"block_kv": 16, **way}) for way in ways)
    assert all((one != other).any() for other in others)


@pytest.mark.parametrize("options", [{}, {"logits": 8.0}, {"regime": "ties"}])
def test_gradients_in_float32_are_within_their_bound(options: dict[str, Any]) -> None:
    """|d32 - d64| is within the bound of `emulation.backward`, itself below eight ulps of
    the term scale; rms errors agree to 1 %, on ties, where a few keys carry everything,
    to 5 %."""
    n, d, t = 256, 64, 2
    case = drawn(n, is_causal=True, **options)
    u, w = BF16.unit_roundoff, 2.0**-24
    A = (
        case.scale
        * (case.q.double().abs() @ case.k.double().abs().transpose(-1, -2)).amax()
    )
    e = float((6 * d + 24 + 4 * t) * w * A + (n + 20 + 8 * t + 2 * math.log(n)) * w)
    of_ds, of_p = (
        4 * u + 3 * e + (2 * n + 4 * d + 8 * t + 16) * w,
        2 * u + 2 * e + 2 * (n + 8) * w,
    )
    d64 = gradients(case, recipe("fa2"))[2:]
    d32 = gradients(case, recipe("fa2", compute="float32"))[2:]
    bounds = zip(
        d64, d32, truth_of(case), term_scales(case), (of_ds, of_ds, of_p), strict=True
    )
    for a, b, exact, X, factor in bounds:
        assert b.dtype == torch.float32
        assert ((a - b).abs() <= factor * X + ulp(a, BF16)).all()
        assert (factor * X < 8 * ulp(X, BF16)).all()
        ratio = rms(b - exact) / rms(a - exact)
        assert ((ratio - 1).abs() < (0.05 if options.get("regime") else 0.01)).all()


def test_what_cannot_be_done_is_refused() -> None:
    """No grad_out, and one that fp32 does not hold, are Refused."""
    case = drawn(4)
    with pytest.raises(Refused, match="grad_out"):
        gradients(dataclasses.replace(case, grad_out=None), recipe("fa2"))
    wide = dataclasses.replace(case, grad_out=case.grad_out.double())
    with pytest.raises(Refused, match="would round grad_out"):
        gradients(wide, recipe("fa2", compute="float32"))
