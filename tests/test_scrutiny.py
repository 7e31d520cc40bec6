"""Single rows recomputed all at once: ties, carriers, hidden and infinite scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from oracles import FEATURES, make_case
from torch import Tensor

from numdev.metrics.scrutiny import of_queries

ANY_DEVICE = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
        ],
    ),
]


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("device", ANY_DEVICE)
def test_equal_keys_tie_wherever_they_stand(device: str) -> None:
    """Two equal keys share the maximum, at any two places and although the terms of their score are
    10^9 times as large as it, so that its rounding is 10^6 times what counts as equal: it depends
    on the key alone."""
    n, d = 131, 16
    k = normal(0, 1, 1, n, d)
    k[..., 0], k[..., 1] = -400.0, 1880.0 * 2.0**20
    q = normal(1, 1, 1, n, d)
    q[..., 0], q[..., 1] = 1880.0 * 2.0**20, 400.0
    case = make_case(heads=1, q_len=n, kv_len=n, head_dim=d, v_dim=d, scale=1.0)
    for one, other in ((0, 1), (0, 130), (3, 67), (64, 65), (127, 128), (129, 130)):
        twin = k.clone()
        twin[0, 0, [one, other], 2:] = 40.0 * q[0, 0, 5, 2:]
        tensors = {"q": q.to(device), "k": twin.to(device), "v": case.v.to(device)}
        rows = torch.tensor([5, 17], device=device)
        found = of_queries(dataclasses.replace(case, **tensors), 0, torch.zeros_like(rows), rows)
        assert found["tied"].tolist() == [2, 1]


def test_equal_probabilities() -> None:
    """Of n equal scores, n a multiple of ten, exactly nine in ten carry 90 %, and all are tied."""
    for n in range(10, 400, 30):
        case = make_case(heads=1, q_len=2, kv_len=n)
        case = dataclasses.replace(case, q=torch.zeros_like(case.q))
        rows = torch.tensor([0, 1])
        found = of_queries(case, 0, torch.zeros_like(rows), rows)
        assert found["carriers"].tolist() == [n * 9 // 10] * 2
        assert found["tied"].tolist() == found["sees"].tolist() == [n, n]


@pytest.mark.parametrize("feature", FEATURES)
def test_rows_do_not_depend_on_each_other(feature: str) -> None:
    """Asked for in another order, or alone, a row has the same facts: those of other rows, batch
    entries and heads do not get in."""
    case = make_case(**{"seed": 3, **FEATURES[feature]})
    places = [(b, i) for b in range(case.q.shape[0]) for i in range(case.q_len)]
    b, i = (torch.tensor(x) for x in zip(*places, strict=True))
    head = case.heads - 1
    together = of_queries(case, head, b, i)
    other = case.select_heads([head])
    for n in range(len(places)):
        alone = of_queries(other, 0, b[n : n + 1], i[n : n + 1])
        for name, x in together.items():
            torch.testing.assert_close(x[n], alone[name][0], equal_nan=True, rtol=1e-12, atol=1e-12)
