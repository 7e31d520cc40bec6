"""Where a function errs, in words: some places of an axis, and nothing where all err."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numdev.formats import FORMATS
from numdev.function_check import check_beside
from numdev.operations.function.places import places_that_err
from numdev.operations.function.yardstick import Errors


def errors_of(truth: Tensor) -> Errors:
    generator = torch.Generator().manual_seed(1)
    runs = [
        truth * (1 + 2**-9 * torch.randn(truth.shape, generator=generator).double())
        for _ in range(7)
    ]
    return Errors.of(truth, FORMATS["bfloat16"], runs[:5], runs[5:], runs[0])


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((slice(3, 4),), "row 3 of axis 0"),
        ((slice(60, 64),), "rows 60 to 63 of axis 0"),
        ((slice(15, None, 16),), "every 16th row from 15 of axis 0"),
        ((slice(None), slice(7, 8)), "place 7 of axis 1"),
        ((slice(0, 2), slice(7, 9)), "rows 0 to 1 of axis 0"),
        ((slice(None),), None),
        ((slice(0, 0),), None),
    ],
)
def test_places_of_an_axis(place: tuple[slice, ...], words: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(64, 48, generator=generator, dtype=torch.float64)
    output = truth.clone()
    output[place] += torch.randn(output[place].shape, generator=generator)
    assert places_that_err(output, errors_of(truth)) == words


def test_a_finding_says_where_noise_is() -> None:
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def wrong(x: Tensor) -> Tensor:
        out = 2 * x
        generator = torch.Generator().manual_seed(5)
        out[32:] *= 1 + torch.randn(out[32:].shape, generator=generator)
        return out

    def inputs(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(64, 48, generator=generator).bfloat16()

    report = check_beside(wrong, reference=doubled, inputs=inputs).report
    assert {row.errs_in for row in report.rows if row.role == "kernel"} == {
        "rows 32 to 63 of axis 0"
    }
    sentence = report.findings[0].details
    assert "It errs in rows 32 to 63 of axis 0 of the worst result." in sentence
