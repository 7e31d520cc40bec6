"""Hazards: each has the property it stands for, after rounding too, and says where it is from."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.config import CaseConfig, Layout, MaskKind, SweepConfig
from numdev.errors import UsageError
from numdev.formats import format_named
from numdev.kernels.reference import attend
from numdev.sources.opening import ConfigSource
from numdev.sources.synthetic import REGIMES, Inputs, Shapes, check, draw
from numdev.system import System
from numdev.yamlfile import bundled, read_yaml

ROOT = Path(__file__).parent.parent
SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=48, kv_len=256, head_dim=64, v_dim=32)


def drawn(name: str, shapes: Shapes = SHAPES, **options: Any) -> Inputs:
    return draw(name, shapes, seed=0, options=options, gradients=True)


def case_of(inputs: Inputs, fmt: str = "float64", **fields: Any) -> AttentionCase:
    q, k, v = inputs
    case = AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=q.shape[-1] ** -0.5, **fields)
    return case.rounded_to(format_named(fmt))


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


# --- what each stands for ------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("lse", "q", "dim", "n"),
    [(-120.0, 1.0, 64, 704), (-490.0, 1.0, 128, 65), (-5e4, 64.0, 256, 256), (-6e4, 64.0, 32, 1)],
)
def test_far_below(fmt: str, lse: float, q: float, dim: int, n: int) -> None:
    """The log-sum-exp of every row is near what was asked. k's constant is off by at most half an
    ulp, a relative u; scores of N(0, 1) beside it spread a row's by a few."""
    shapes = dataclasses.replace(SHAPES, kv_len=n, head_dim=dim)
    found = attend(case_of(drawn("far_below", shapes, lse=lse, q=q), fmt)).lse
    u = format_named(fmt).unit_roundoff
    assert bool(((found - lse).abs() <= 7.0 + u * abs(lse)).all())
    assert bool((found < -88.7).all())  # exp(-lse) overflows fp32


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_massive_channel(fmt: str) -> None:
    """One feature of q is 448, of k 1880 (an exact bf16 number, too); unscaled scores exceed
    float16, and outputs are those of the other features alone."""
    case = case_of(drawn("massive_channel"), fmt)
    q, k = case.q.double(), case.k.double()
    assert bool((q[..., 32] == 448).all())
    assert bool((k[..., 32] == 1880).all())
    assert 448 * 1880 > 65504
    others = dataclasses.replace(case, k=case.k.index_fill(-1, torch.tensor([32]), 0.0))
    # Scores near 1e5 in fp64 are good to 1e5 * 2^-53 * d.
    assert float((attend(case).out - attend(others).out).abs().max()) < 1e-8


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_one_signed_gradient(count: int) -> None:
    """V and dO are at most -1, so dP and delta are positive sums; and `count` keys tie."""
    inputs = drawn("one_signed_gradient", count=count)
    assert inputs.grad_out is not None
    assert float(inputs.v.max()) <= -1.0
    assert float(inputs.grad_out.max()) <= -1.0
    k = inputs.k.repeat_interleave(2, dim=1)
    s = (inputs.q.double()[:, :, :, None] * k.double()[:, :, None]).sum(dim=-1)
    tied = s == s.amax(dim=-1, keepdim=True)
    assert bool((tied.sum(dim=-1) == max(count, 1)).all())
    assert bool(tied[..., :count].all())


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_low_rank(rank: int) -> None:
    """K and V of every head have this many singular values above fp32's rounding."""
    inputs = drawn("low_rank", rank=rank)
    for x in (inputs.k, inputs.v):
        s = torch.linalg.svdvals(x.double())
        assert bool((s[..., rank - 1] > 1.0).all())
        assert bool((s[..., rank:] < 1e-5 * s[..., :1]).all())
        assert 0.7 < rms(x) < 1.4


@pytest.mark.parametrize("rho", [0.0, 0.9, 1.0])
def test_correlated(rho: float) -> None:
    """Any two tokens of a head have correlation rho: their products average to it."""
    shapes = dataclasses.replace(SHAPES, batch=8, heads=8, kv_heads=8, q_len=256)
    for x in drawn("correlated", shapes, rho=rho):
        pairs = (x[:, :, :-1].double() * x[:, :, 1:].double()).mean()
        # `common` has 8 * 8 * dim entries of variance 1: its mean square has a relative standard
        # error of sqrt(2 / (64 * dim)), and five of these for the smaller dim, 32, are 0.16.
        assert float(pairs) == pytest.approx(rho, abs=0.16 * rho + 0.02)


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", REGIMES)
def test_hazards_are_finite_in_their_formats(name: str, fmt: str) -> None:
    """Neither the rounded inputs nor the exact output overflow: what does is a kernel's."""
    inputs = drawn(name)
    case = case_of(inputs, fmt)
    answer = attend(case)
    for x in (case.q, case.k, case.v, answer.out, answer.lse):
        assert bool(x.double().isfinite().all())
    assert float(answer.out.abs().max()) <= format_named(fmt).largest


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("low_rank", {"rank": 0}, "rank must be at least 1"),
        ("correlated", {"rho": 1.5}, "rho must be between 0 and 1"),
        ("one_signed_gradient", {"count": -1}, "count must be at least 0"),
        ("one_hot", {"margin": 0.0}, "margin must be positive"),
        ("far_below", {"q": 0.0}, "cannot be drawn with q=0.0: q must not be 0"),
        ("massive_channel", {"q": "large"}, "cannot be drawn with q='large'"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    """A parameter out of its range is a usage error that says so."""
    with pytest.raises(UsageError, match=says):
        draw(name, SHAPES, seed=0, options=options)


# --- what is said of them ------------------------------------------------------------------------

REPORTS = (
    "pytorch#196678",
    "huggingface/trl#7181",
    "flash-attention PR #2721",
    "flashinfer#4267",
    "NVIDIA/TransformerEngine#3216",
    "arXiv 2405.02803",
    "arXiv 2510.04212",
)


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime_says_what_it_is(name: str) -> None:
    """What it draws, what it stresses, and where it is from; numbers of reports are known ones."""
    regime = REGIMES[name]
    assert regime.summary.endswith((".", ")"))
    assert regime.stresses
    assert regime.origin
    for cited in re.findall(r"[\w/-]*(?: PR )?#\d+|arXiv [\d.]+\d", regime.origin):
        assert any(cited in report for report in REPORTS), cited
    for parameter, default in regime.parameters.items():
        assert f"`{parameter}`" in regime.summary
        assert isinstance(default, int | float)


def test_the_page_is_what_the_code_says() -> None:
    """docs/hazards.md equals what scripts/hazards_page.py writes."""
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "hazards_page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text() == page.render(), "run python scripts/hazards_page.py"


# --- the sweep over them -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep() -> SweepConfig:
    return read_yaml(bundled("sweep/hazards.yaml"), SweepConfig)


def test_the_sweep_covers_the_list(sweep: SweepConfig) -> None:
    """Every regime, mask, layout, length and head dimension of the list is in some cell."""
    cases = sweep.cases
    assert {case.inputs.name for case in cases} == set(REGIMES)
    assert {case.mask for case in cases} == {None, *get_args(MaskKind)}
    assert {case.layout for case in cases} == set(get_args(Layout))
    lengths = {1, 9, 63, 64, 65, 127, 128, 129, 192, 704, 2925}
    assert lengths <= {case.seq_len for case in cases if case.inputs.name == "normal"}
    assert lengths | {33000} <= {case.kv_len or case.seq_len for case in cases}
    dims = {32, 80, 96, 192, 256}
    assert dims <= {case.head_dim for case in cases if case.inputs.name == "normal"}
    assert any(case.seq_len == 1 and (case.kv_len or 0) >= 1000 for case in cases)
    assert any(case.seq_len > (case.kv_len or case.seq_len) for case in cases)
    assert any(case.heads == 7 * (case.kv_heads or case.heads) for case in cases)
    assert any(case.window for case in cases)
    far = [case.inputs.options for case in cases if case.inputs.name == "far_below"]
    assert {-120, -490, -5e4} <= {options.get("lse", -120) for options in far}
    spreads = {c.inputs.options.get("logits", 1) for c in cases if c.inputs.name == "normal"}
    assert spreads == {0.25, 1, 4, 16}
    for name in REGIMES:
        shapes = {(c.seq_len, c.kv_len, c.head_dim) for c in cases if c.inputs.name == name}
        assert len(shapes) >= 2, name


def test_every_cell_can_be_drawn(sweep: SweepConfig) -> None:
    """With its regime's parameters, mask and layout; with gradients where they are wanted."""
    source = ConfigSource("hazards.yaml", sweep.cases, (0,), System.here("cpu"), gradients=True)
    for located in source.cases:
        config = located.config
        check(config.inputs.name, config.inputs.options)
        if config.seq_len * (config.kv_len or config.seq_len) > 2**17:
            continue  # seconds, and no other
        case = located.load()
        assert case.grad_out is not None
        assert case.grad_out.shape == (*case.q.shape[:3], case.v.shape[3])
        assert (case.mask is not None) == (config.mask is not None)
        assert case.q.is_contiguous() == (config.layout == "contiguous" or case.q_len == 1)


def test_masks_and_layouts_change_no_numbers() -> None:
    """Cells of one entry share q, k, v and dO, whatever their mask and layout."""
    grid = [
        {"name": f"a/mask={mask},layout={layout}", "axes": {"mask": mask, "layout": layout}}
        | {"heads": 4, "kv_heads": 2, "seq_len": 9, "head_dim": 8, "mask": mask, "layout": layout}
        for mask in (None, "random", "bias_lowest")
        for layout in get_args(Layout)
    ]
    configs = [CaseConfig.model_validate(cell) for cell in grid]
    source = ConfigSource("t", configs, (0,), System.here("cpu"), gradients=True)
    first, *others = (located.load() for located in source.cases)
    for case in others:
        for name in ("q", "k", "v", "grad_out"):
            assert torch.equal(getattr(case, name), getattr(first, name))
