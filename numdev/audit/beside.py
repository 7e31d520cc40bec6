"""What rows say beside their metrics: the rows that were not measured, noise, checksums, suspicion.

Each takes the metrics of all heads of a tensor and returns them with one thing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from numdev.audit.bench import Bench, Prepared
from numdev.explain.wrong_function import far_off, suspect
from numdev.kernels import Output
from numdev.metrics.deviation import Metrics
from numdev.metrics.finiteness import Elsewhere
from numdev.metrics.noise import Noise


def with_the_rest(metrics: Sequence[Metrics], rest: Sequence[Elsewhere]) -> list[Metrics]:
    """`nonfinite` over all rows; where those that are not measured leave it open, why."""
    found = []
    for head, there in zip(metrics, rest, strict=True):
        count = head["nonfinite"] + there.nonfinite
        if there.unknown and not count:
            found.append(with_nulls({**head, "nonfinite": None}, ("nonfinite",), there.unknown))
        else:
            found.append({**head, "nonfinite": count})
    return found


def with_empty_rows(metrics: Sequence[Metrics], x: Tensor, prepared: Prepared) -> list[Metrics]:
    """The metrics of an output, and of each head how much is not finite in rows that see no key."""
    if not any(head["empty_rows"] for head in metrics):
        return list(metrics)
    wrong = ~x.isfinite() & prepared.yardstick.empty[..., None]
    counts = wrong.sum(dim=(0, 2, 3)).tolist()
    return [{**head, "empty_nonfinite": n} for head, n in zip(metrics, counts, strict=True)]


def with_nulls(head: Metrics, names: Sequence[str], why: str) -> Metrics:
    return {**head, "nulls": {**head["nulls"], **dict.fromkeys(names, why)}}


def with_bits(
    metrics: Sequence[Metrics], bits: Mapping[str, Sequence[str]], tensor: str
) -> list[Metrics]:
    if tensor not in bits:
        return list(metrics)
    return [{**head, "bits": x} for head, x in zip(metrics, bits[tensor], strict=True)]


def with_noise(metrics: Sequence[Metrics], noises: Sequence[Noise]) -> list[Metrics]:
    """The metrics, with the noise of each head; where there is no number, why."""
    if not noises:
        return list(metrics)
    found = []
    for head, n in zip(metrics, noises, strict=True):
        why = None
        if n.flickering:
            why = f"{n.flickering} elements are finite in some runs and not in others"
        elif n.noise is None:
            why = "no element is finite"
        nulls = head["nulls"] if why is None else {**head["nulls"], "noise": why}
        found.append({**head, "noise": None if why else n.noise, "nulls": nulls})
    return found


def with_suspicion(
    metrics: Sequence[Metrics], output: Output, prepared: Prepared, bench: Bench
) -> list[Metrics]:
    """The metrics, and for heads that are far off what the kernel seems to compute instead."""
    far = [h for h, head in zip(bench.heads, metrics, strict=True) if far_off(head)]
    if not far:
        return list(metrics)
    found = suspect(prepared.case, output.out, prepared.reference, bench.heads, far, bench.queries)
    return [
        {**head, "suspicion": found[h].cause, "suspicion_cut": found[h].cut} if h in found else head
        for h, head in zip(bench.heads, metrics, strict=True)
    ]
