"""What only a GPU can show: every SDPA backend there, and that devices agree on the truth."""

import dataclasses
import math

import pytest
import torch
from on_bench import prepare

from numdev.audit.plan import Task
from numdev.audit.task import measure_task
from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.kernels.emulation.predict import emulation
from numdev.kernels.reference import floor_of, gradients
from numdev.metrics import deviation
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

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


def with_upstream(here):
    drawn = torch.randn(here.q.shape, generator=torch.Generator().manual_seed(1))
    return dataclasses.replace(here, grad_out=drawn.to(here.q))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_backend_runs_alone_and_is_near_the_floor(name, dtype, causal):
    """The forced operator is the one that ran, and its error is within 1.6 floors in every head."""
    here = case(dtype=dtype, is_causal=causal)
    output = find(name).attend(here)
    assert output.ran == BACKENDS[name]
    yardstick = prepare(here, here.format.name).yardsticks["out"]
    for head in deviation.measure(output.out, yardstick).heads:
        assert head["floor_ratio"] < 1.6
        assert head["nonfinite"] == 0


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_runs_alone_and_is_near_the_truth(name, dtype, causal):
    """The forced backend's own backward is the one that ran, on whatever thread, and its gradients
    are within 8 floors of fp64; lse is there unless it is math."""
    here = with_upstream(case(dtype=dtype, is_causal=causal))
    found, exact = find(name).gradients(here), gradients(here)
    assert found.ran == BACKENDS[name]
    assert found.ran_backward == ("math" if name == "sdpa-math" else f"{BACKENDS[name]}_backward")
    assert (found.lse is None) == (name == "sdpa-math")
    # fp32 exp and sum of 200 terms, and a final rounding: 200 u of the sum, far below 1e-4.
    if name == "sdpa-flash":
        assert (found.lse.double() - exact.lse).abs().max() < 1e-4
    floor = floor_of(exact, here.format)
    for tensor in ("dq", "dk", "dv"):
        r = getattr(exact, tensor)
        error, least = ((getattr(x, tensor).double() - r).norm() for x in (found, floor))
        assert error <= 8 * least, (tensor, float(error / least))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_reference_agrees_with_the_cpu(kv_heads):
    """The fp64 reference is the same on both devices to a few fp64 roundings per term, over several
    blocks, and so are its gradients."""
    fields = {"kv_heads": kv_heads, "is_causal": True, "window": (50, 0), "softcap": 20.0}
    a = gradients(with_upstream(case(**fields)))
    b = gradients(with_upstream(case("cpu", **fields)))
    bound = 64 * 2.0**-53 * 200
    assert ((a.out.cpu() - b.out).abs() <= bound * b.term_scale).all()
    assert (a.lse.cpu() - b.lse).abs().max() <= bound * math.log(200)
    for tensor in ("dq", "dk", "dv"):
        most = 2 * bound * getattr(b, f"{tensor}_terms").amax()
        assert ((getattr(a, tensor).cpu() - getattr(b, tensor)).abs() <= most).all()
    assert torch.equal(a.unseen.cpu(), b.unseen)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"])
@pytest.mark.parametrize(
    ("length", "head_dim", "causal"), [(1024, 64, True), (1500, 128, False), (1000, 80, True)]
)
@pytest.mark.parametrize("regime", ["normal", "outliers", "sink", "ties"])
def test_backends_round_where_they_claim_to(
    name: str, length: int, head_dim: int, causal: bool, regime: str
) -> None:
    """Each head's error is within 5 % of its emulation's, and element by element half of it or
    more is the emulation's own: tiles, their order and the splits of small calls are right."""
    shapes = Shapes(
        batch=2,
        heads=4,
        kv_heads=4,
        q_len=length,
        kv_len=length,
        head_dim=head_dim,
        v_dim=head_dim,
    )
    q, k, v = (x.cuda() for x in draw(regime, shapes, seed=0, options={}))
    ref = CaseRef(case="x")
    drawn = AttentionCase(ref=ref, q=q, k=k, v=v, scale=head_dim**-0.5, is_causal=causal)
    bench = prepare(drawn, "bfloat16")
    system, kernel = System.here("cuda"), find(name)
    task = Task(case=ref, role="kernel", kernel=name, format="bfloat16")
    rows = [row for row in measure_task(task, kernel, bench, system).rows if row.tensor == "out"]
    assert len(rows) == 4
    for row in rows:
        assert row.expected_ratio == pytest.approx(1.0, abs=0.05)
    prepared = bench
    output = kernel.attend(prepared.case)
    predicted = emulation(prepared.case, kernel.claims(prepared.case, output, system) or {})
    error = output.out.double() - prepared.reference.out
    assert (error - (predicted - prepared.reference.out)).norm() <= 0.5 * error.norm()
