"""The public functions that are no test, with signatures that stay. docs/api.md has examples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor, nn

from numdev import report as reports
from numdev.audit import run
from numdev.audit.isolation import copied
from numdev.audit.plan import Task
from numdev.audit.task import measure_one
from numdev.cases import AttentionCase, CaseRef
from numdev.config import audit_request
from numdev.errors import MeasurementError
from numdev.gate import compare as comparing
from numdev.gate.compare_report import CompareReport
from numdev.kernels import Kernel, Output
from numdev.report import AuditReport, DeviationRow, Report
from numdev.report.renderers import html
from numdev.sources import capture as capturing
from numdev.sources.loss import find_upstream
from numdev.system import System


def audit(
    target: str | Path = "demo",
    *,
    kernels: Sequence[str] = (),
    formats: Sequence[str] = (),
    backward: bool | None = None,
    layers: Sequence[int] | None = None,
    rows: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    output: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """What `numdev audit` does: every attention call of `target` through every kernel, against
    fp64.

    `target`: a checkpoint directory, a state dict, captured tensors, a YAML file, or `demo`.
    `kernels`: names of `numdev kernels`, or `package.module:function`; empty: the target's own, or
    PyTorch's backends. `formats`: empty: the target's own, or bfloat16. `backward`: dq, dk and dv
    too. `layers`: only these. `rows`: so many query rows of each head are measured; None: all.
    `output`: a directory for the report, its tables and reproducers, in which the same request
    continues where it stopped; None keeps nothing. `say` is told what the report does not hold.

    Returns the report: one row for each head, tensor, kernel and format (`report.rows`), the
    findings (`report.findings`), the ranking (`report.summary`). Errors are in the units of the
    tensors, ratios are plain numbers; a number that means nothing is None, and the row's `nulls`
    says why. Raises UsageError for a request that cannot be run here, MeasurementError where
    nothing could be measured."""
    flags = {
        "kernels": tuple(kernels),
        "formats": tuple(formats),
        "layers": None if layers is None else tuple(layers),
        "gradients": backward,
        "sampled_rows": rows,
        "device": device,
        "seed": seed,
        "reproducers": 0 if output is None else None,
    }
    request = audit_request(str(target), flags)
    scratch = tempfile.TemporaryDirectory(prefix="numdev-") if output is None else nullcontext("")
    with scratch as name:
        directory = Path(name if output is None else output)
        found = run.audit(request, directory, command="numdev.audit", say=say)
        if output is not None:
            reports.write(found, directory)
            run.reproducers(found, request, directory, say=say)
            html.write(found, directory)
    if not found.measured:
        raise MeasurementError(found.unmeasured, hint="the rows' reasons say why")
    return found


def capture(
    model: nn.Module, inputs: Mapping[str, Tensor], *, backward: bool = False, seed: int = 0
) -> list[AttentionCase]:
    """The attention calls that `model(**inputs)` makes, in their order, as copies of its tensors.

    Every call that ends in `torch.nn.functional.scaled_dot_product_attention` is met; q is [batch,
    heads, q_len, head_dim], in the model's own format. With `backward` cases carry grad_out, from
    the model's own loss where it returns one, else drawn from N(0, 1) with `seed`. All calls are in
    memory together: for a large model audit the checkpoint instead.

    Raises MeasurementError for a call that is no function of its inputs (dropout: use
    `model.eval()`), for inputs it fails on, and where attention ran unseen, or none did."""
    found: list[AttentionCase] = []
    upstream = find_upstream(model, inputs, seed) if backward else None
    keep = lambda case: found.append(copied(case))  # noqa: E731
    capturing.capture(model, inputs, keep, source=type(model).__name__, upstream=upstream)
    return found


def compare(
    old: str | Path | Report, new: str | Path | Report, *, allow: Sequence[str] = ()
) -> CompareReport:
    """What moved beyond noise from one audit (or sweep) to another of the same request: what
    `numdev compare` says. Each is a report, its file or its directory; `allow` names the keys in
    which the requests may differ.

    `moves` has what moved, `presences` what is new or gone, `exit_code` what the command returns.
    Raises UsageError for two that do not measure the same, MeasurementError for what cannot be
    read."""
    sides = (Path(x) if isinstance(x, str) else x for x in (old, new))
    return comparing.compare(*sides, allow=allow, command="numdev.compare")


def measure(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[DeviationRow, ...]:
    """How far `out` is from attention of q, k and v in fp64: one row for each head, as in a report.

    q is [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads,
    kv_len, v_dim], all in one format; `out` [batch, heads, q_len, v_dim] in that or a wider one.
    `scale`: 1 / sqrt(head_dim) if None. `is_causal`: query i sees keys up to i. `mask`: bool (True:
    may attend) or additive, broadcasting to [batch, heads, q_len, kv_len].

    `max_abs`, `mean_abs` and `rms` are in the units of `out`, `max_ulp` in units of its format's
    spacing; `floor_ratio` is the rms over that of the exact result rounded once, `baseline_ratio`
    over plain attention's, `expected_ratio` over what FlashAttention-2's roundings predict. NaN and
    infinity are counted (`nonfinite`), never averaged; rows that see no key are left out. A number
    that means nothing is None, with the reason in `nulls`.

    Raises UsageError for tensors that do not fit together, MeasurementError for an `out` of no such
    call."""
    case = AttentionCase(
        ref=CaseRef(case="call"),
        q=q.detach(),
        k=k.detach(),
        v=v.detach(),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        is_causal=is_causal,
        mask=mask,
    )
    kernel = Kernel(
        name="output",
        function=lambda case: Output(out=out.detach()),
        any_format=True,
        claims=lambda case, output, system: {"preset": "fa2"},
    )
    fmt = case.format.name
    task = Task(case=case.ref, role="kernel", kernel=kernel.name, format=fmt)
    found = measure_one(task, kernel, case, System.here("cpu"))
    if found[0].status != "ok":
        raise MeasurementError(f"out cannot be measured: {found[0].reason}")
    return tuple(found)
