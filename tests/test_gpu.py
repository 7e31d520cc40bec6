"""What only a GPU can show: every SDPA backend there, and that devices agree on the truth."""

import math

import pytest
import torch

from numdev import deviation
from numdev.bench import Bench
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused
from numdev.inputs import Shapes, draw
from numdev.kernels import find
from numdev.kernels.reference import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
BACKENDS = {
    "sdpa-math": "math",
    "sdpa-flash": "_scaled_dot_product_flash_attention",
    "sdpa-efficient": "_scaled_dot_product_efficient_attention",
    "sdpa-cudnn": "_scaled_dot_product_cudnn_attention",
}


def case(device="cuda", dtype=torch.bfloat16, kv_heads=4, **extra):
    shapes = Shapes(
        batch=2, heads=4, kv_heads=kv_heads, q_len=200, kv_len=200, head_dim=64, v_dim=64
    )
    q, k, v = draw("normal", shapes, seed=3, options={})
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    return AttentionCase(ref=CaseRef(case="gpu"), q=q, k=k, v=v, scale=0.125, **extra)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_backend_runs_alone_and_is_near_the_floor(name, dtype, causal):
    """The forced operator is the one that ran, and its error is within 1.6 floors in every head."""
    here = case(dtype=dtype, is_causal=causal)
    output = find(name).attend(here)
    assert output.ran == BACKENDS[name]
    yardstick = Bench(here.ref, lambda: here).at(here.format.name).yardstick
    for head in deviation.measure(output.out, yardstick):
        assert head["floor_ratio"] < 1.6
        assert head["nonfinite"] == 0


def test_flash_log_sum_exp_is_the_reference():
    """The log-sum-exp taken from the flash operator is natural, unpadded and right to fp32."""
    here = case(is_causal=True)
    lse = find("sdpa-flash").attend(here).lse
    assert lse is not None
    exact = attend(here).lse
    # fp32 exp and sum of 200 terms, and a final rounding: 200 u of the sum, far below 1e-4.
    assert (lse.double() - exact).abs().max() < 1e-4


def test_refusals_carry_pytorchs_own_reason():
    """A soft refusal is Refused with words, not a fallback to another backend."""
    with pytest.raises(Refused) as refusal:
        find("sdpa-flash").attend(case(mask=torch.ones(200, 200, dtype=torch.bool, device="cuda")))
    assert "mask" in str(refusal.value).lower()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_reference_agrees_with_the_cpu(kv_heads):
    """The fp64 reference is the same on both devices to a few fp64 roundings per term."""
    on_gpu = case(kv_heads=kv_heads, is_causal=True, window=(50, 0), softcap=20.0)
    on_cpu = case("cpu", kv_heads=kv_heads, is_causal=True, window=(50, 0), softcap=20.0)
    a, b = attend(on_gpu), attend(on_cpu)
    bound = 64 * 2.0**-53 * 200
    assert ((a.out.cpu() - b.out).abs() <= bound * b.term_scale).all()
    assert (a.lse.cpu() - b.lse).abs().max() <= bound * math.log(200)


def test_metrics_agree_with_the_cpu():
    """The same output measured on either device gives the same metrics."""
    here = case(is_causal=True)
    out = find("sdpa-flash").attend(here).out
    there = case("cpu", is_causal=True)
    a = deviation.measure(out, Bench(here.ref, lambda: here).at("bfloat16").yardstick)
    b = deviation.measure(out.cpu(), Bench(there.ref, lambda: there).at("bfloat16").yardstick)
    for x, y in zip(a, b, strict=True):
        for name in ("max_abs", "mean_abs", "rms", "row_rel", "max_ulp", "w1", "bias"):
            assert x[name] == pytest.approx(y[name], rel=1e-9, abs=1e-15), name
        assert x["nonfinite"] == y["nonfinite"]
        assert x["elements"] == y["elements"]
