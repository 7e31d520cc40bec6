"""Facts of tests/facts.md that no other test holds: of PyTorch and its kernels, and
limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_reports import audit, head
from oracles import make_case

import numdev
from numdev.gate.compare import compare
from numdev.kernels import Output, find
from numdev.kernels.reference import attend
from numdev.kernels.triton_flash.host import Launch
from numdev.studies.training.measure import is_spike
from numdev.system import System

H200 = System(device="cuda", gpu="NVIDIA H200", capability=(9, 0), processors=132)


def claim(operator: str, system: System, **fields: Any) -> dict[str, Any]:
    """What PyTorch's kernel claims to compute like where this operator ran."""
    case = make_case(**{"heads": 64, "batch": 4, "dtype": torch.bfloat16, **fields})
    ran = Output(out=torch.zeros(1), did={"operator": operator})
    options = find("sdpa-default").claims(case, ran, system)
    return dict(options)


@pytest.mark.parametrize(
    ("q_len", "rows"), [(1, 32), (191, 32), (192, 64), (767, 64), (768, 256), (2000, 256)]
)
@pytest.mark.parametrize(
    ("capability", "kv_len", "exponential"),
    [
        ("DEFAULT", 100, "exact"),
        ("AVX2", 7, "exact"),  # fewer keys than it takes at once
        ("AVX2", 8, "fexp_u20x8"),
        ("AVX512", 15, "exact"),
        ("AVX512", 16, "fexp_u20x16"),
    ],
)
def test_cpu_flash_claims_the_tiles_of_its_source(
    q_len: int, rows: int, capability: str, kv_len: int, exponential: str
) -> None:
    """Its tiles, the exp of its instruction set, and gradients summed in the working
    format."""
    system = System(device="cpu", cpu_capability=capability)
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    shape = {"q_len": q_len, "kv_len": kv_len, "heads": 4, "batch": 1}
    expected: dict[str, Any] = {
        "preset": "fa2", "dq": "working", "dk": "working", "dv": "working",
        "block_q": rows, "block_kv": 512, "exponential": exponential,
    }  # fmt: skip
    assert claim(operator, system, **shape) == expected
    grouped = claim(operator, system, kv_heads=2, **shape)
    assert grouped == {**expected, "group_sum": "running"}


@pytest.mark.parametrize(("operator", "head_dim", "expected"), [
    ("flash", 64, {"block_kv": 128, "kv_order": "descending", "splits": 1}),
    ("flash", 65, {"block_kv": 64, "kv_order": "descending", "splits": 1}),
    ("flash", 128, {"block_kv": 64, "kv_order": "descending", "splits": 1}),
    ("efficient", 64, {"block_kv": 64, "p_for_ds": "working", "ds_scale": "before"}),
    ("efficient", 65, {"block_kv": 128, "p_for_ds": "working", "ds_scale": "before"}),
    ("cudnn", 64, {"block_kv": 128, "ds_scale": "before"}),
    ("cudnn", 128, {"block_kv": 128, "ds_scale": "before"}),
])  # fmt: skip
def test_cuda_operators_claim_the_tiles_of_their_sources(
    operator: str, head_dim: int, expected: dict[str, Any]
) -> None:
    """On a GPU their errors hold these claims element by element; here the table does."""
    name = f"_scaled_dot_product_{operator}_attention"
    shape = {"q_len": 64, "kv_len": 64, "head_dim": head_dim}
    assert claim(name, H200, **shape) == {"preset": "fa2", **expected}


@pytest.mark.parametrize(("shape", "splits"), [
    ({"batch": 2, "heads": 5, "q_len": 1500}, 1), ({"batch": 1, "heads": 1, "q_len": 64}, 1),
    ({"batch": 1, "heads": 8, "q_len": 1500}, 4), ({"batch": 1, "heads": 8, "q_len": 1200}, 3),
])  # fmt: skip
def test_flash_splits_the_keys_of_small_calls(shape: dict[str, Any], splits: int) -> None:
    """Of 264 slots 240 blocks of 64 rows fill enough, and one tile cannot be divided; 192
    in 4 parts use 97 %; 152 in 3 parts use 86 %, within 85 % of the 96 % that 5 parts
    use."""
    call = {**shape, "kv_len": shape["q_len"], "head_dim": 128}
    assert claim("_scaled_dot_product_flash_attention", H200, **call)["splits"] == splits


@pytest.mark.parametrize(("head_dim", "tile"), [(64, 256), (128, 128), (256, 64)])
def test_split_keys_have_larger_tiles(head_dim: int, tile: int) -> None:
    """FlashAttention-2's, where a call is too small to fill the GPU."""
    shape = {"batch": 1, "heads": 1, "q_len": 64, "kv_len": 2048, "head_dim": head_dim}
    options = claim("_scaled_dot_product_flash_attention", H200, **shape)
    assert options["splits"] > 1
    assert options["block_kv"] == tile


def test_triton_flash_is_compiled_without_fused_multiply_adds() -> None:
    """With them P at a maximum is off by 5e-4 at scores of 10,000 (GPU tests)."""
    assert Launch(16, 16, 4, 1).as_arguments()["enable_fp_fusion"] is False


@pytest.mark.parametrize(("exponent", "judged"), [(-99, True), (-101, False)])
def test_rows_of_the_smallest_terms_have_no_relative_error(
    exponent: int, judged: bool
) -> None:
    """Terms below 2^-100 are products that fp32 may keep, flush or lose."""
    q, k = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 2, 4)
    v = torch.full((1, 1, 2, 1), 2.0**exponent)
    (row,) = numdev.measure(torch.full((1, 1, 3, 1), 1.5 * 2.0**exponent), q, k, v)
    assert row.row_rel == (pytest.approx(0.5) if judged else None)
    assert ("row_rel" in row.nulls) is not judged


def test_in_float32_scores_are_allowed_the_rounding_of_their_sums() -> None:
    """u sqrt(d) / 3 of |scale| |q_i| max |k_j|, relative to the terms; V = 1, scores of
    3600."""
    q, k = torch.full((1, 1, 1, 16), 30.0), torch.full((1, 1, 4, 16), 30.0)
    k[:, :, 1:] /= 2
    (row,) = numdev.measure(
        torch.full((1, 1, 1, 4), 1.0 + 2.0**-10), q, k, torch.ones(1, 1, 4, 4)
    )
    allowed = 2.0**-24 * math.sqrt(16) / 3 * 0.25 * 120 * 120
    assert row.expected_ratio == pytest.approx(2.0**-10 / allowed, rel=1e-3)


def test_rel_and_maxima_of_a_sample_have_no_interval(tmp_path: Path) -> None:
    """The first rows of a causal call rule |r|, and a sample bounds a maximum from below
    alone."""
    case = tmp_path / "case.yaml"
    case.write_text(
        "cases: [{name: c, heads: 1, seq_len: 64, head_dim: 8, causal: true}]\n"
    )
    report = numdev.audit(
        case, kernels=["sdpa-math"], formats=["bfloat16"], rows=32, device="cpu"
    )
    (row,) = [r for r in report.rows if r.kernel == "sdpa-math" and r.tensor == "out"]
    estimates = {"rms", "row_rel", "floor_ratio", "expected_ratio", "mean_abs"}
    assert estimates <= row.interval.keys()
    assert row.interval.keys().isdisjoint({"rel", "max_abs", "max_ulp", "worst_row"})


@pytest.mark.parametrize(("rows", "named"), [(7, False), (8, True)])
def test_fewer_than_32_numbers_name_no_function(rows: int, named: bool) -> None:
    """They agree with something by chance. And no cut is infinite, however well a mistake
    fits."""
    sizes: dict[str, Any] = {"q_len": rows, "kv_len": 16, "head_dim": 16, "v_dim": 4}
    case, scaled = (
        make_case(heads=1, dtype=torch.float32, **sizes, **more)
        for more in ({}, {"scale": 1.0})
    )
    (row,) = numdev.measure(
        attend(scaled).out.float(), case.q, case.k, case.v, scale=0.25
    )
    assert (row.suspicion is not None) is named
    if named:
        assert "scale" in (row.suspicion or "")
        assert 10 <= (row.suspicion_cut or 0) < math.inf


@pytest.mark.parametrize(
    ("tensor", "least"), [("out", 2.0), ("dv", 2.0), ("dq", 4.0), ("dk", 4.0)]
)
def test_a_worst_row_moves_from_twice_or_four_times_on(tensor: str, least: float) -> None:
    """It is an extreme value, and that of dq and dk a matter of luck."""
    before = head(tensor=tensor, worst_row=2.0)
    for factor, moved in ((0.99 * least, False), (1.01 * least, True)):
        after = head(tensor=tensor, worst_row=2.0 * factor)
        assert bool(compare(audit(before), audit(after)).moves) is moved


@pytest.mark.parametrize(
    ("past", "limit"),
    [([2.0, 2.1, 1.9], 2.6), ([2.0, 2.01, 1.99], 2.4), ([2.0, 2.0, 2.0], 2.4)],
)
def test_a_spike_stands_out_by_share_and_by_deviations(
    past: list[float], limit: float
) -> None:
    """Above 1.2 medians, and above the median by 6 median absolute deviations, of three
    or more."""
    assert not is_spike(9.0, past[:2])
    assert not is_spike(limit - 1e-6, past)
    assert is_spike(limit + 1e-6, past)
