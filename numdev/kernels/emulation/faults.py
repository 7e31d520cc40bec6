"""Controls: sound attention with a planted fault of a known dose, to show what a gate would catch.

A gate that passes says little unless it would have failed something worse. So an audit can put
planted faults beside the kernel, on the same data: what `fa2` predicts of a production kernel
(`numdev.kernels.emulation.kernel`), with one thing wrong, a little or a lot. The smallest dose a
gate catches is its power there.

A fault sits in one of three places, and a `Control` fills in what it needs: another *case* is
computed, another *option* of the emulation is in force, or the results are *spoiled* before they
are cast. The cast is made here. At dose 0 nothing differs from the sound emulation, bit for bit.

Doses grow with the fault, and are relative to the working format where it is one of rounding: "one
significant bit fewer" is comparable in bf16 and fp16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.formats import FORMATS, Format, RoundingMode, round_to
from numdev.kernels import Kernel, Output, Refused, find, fingerprint
from numdev.kernels.output import GRADIENTS, upstream

PREFIX = "control:"
FORWARD = ("out",)
Results = dict[str, Tensor]
"""By name, of FORWARD and GRADIENTS, in float64 from before the cast."""
RELATIVE = (0.001, 0.003, 0.01, 0.03)
BITS = (1.0, 2.0, 3.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Control:
    """A planted fault and the doses in which it is measured."""

    name: str
    said: Callable[[float], str]
    """A dose of it in words, as a clause."""
    doses: tuple[float, ...]
    """Those that are measured, the smallest first. Any other from 0 on may be asked for, whole
    numbers where these are."""
    case: Callable[[AttentionCase, float], AttentionCase] = lambda case, dose: case
    options: Callable[[Format, float], dict[str, str]] = lambda fmt, dose: {}
    backward_options: Callable[[Format, float], dict[str, str]] = lambda fmt, dose: {}
    spoil: Callable[[Results, AttentionCase, float], Results] = lambda results, case, dose: results
    cast: Callable[[float], RoundingMode] = lambda dose: "nearest"
    in_backward_only: bool = False
    """Whether the output is sound, and only gradients show it."""

    def attend(self, case: AttentionCase, dose: float = 0.0) -> Output:
        """The output with the fault in it, in the case's dtype. Raises Refused where the case
        cannot have this dose (more keys dropped than there are), UsageError for what is no dose."""
        return self._run(case, dose, gradients=False)

    def gradients(self, case: AttentionCase, dose: float = 0.0) -> Output:
        """The same with the three gradients, for a case with `grad_out`."""
        return self._run(case, dose, gradients=True)

    def kernel(self) -> Kernel:
        """As a kernel with the option `dose`; no registered one."""
        return Kernel(
            name=PREFIX + self.name,
            function=self.attend,
            summary=f"fa2 as emulated, but {self.said(self.doses[0])}",
            options={"dose": 0.0},
            validate=lambda options: self._checked(options["dose"]),
            any_format=True,
            any_rows=True,
            made_from=fingerprint(self.attend),
            backward=self.gradients,
        )

    def _run(self, case: AttentionCase, dose: float, *, gradients: bool) -> Output:
        dose, fmt = self._checked(dose), case.format
        options = {"preset": "fa2", "out": "exact", **self.options(fmt, dose)}
        if gradients:
            options |= {f"{name}_out": "exact" for name in GRADIENTS}
            options |= self.backward_options(fmt, dose)
        sound = getattr(find("emulated"), "gradients" if gradients else "attend")
        result: Output = sound(self.case(case, dose), **options)
        names = (*FORWARD, *GRADIENTS) if gradients else FORWARD
        exact = {name: getattr(result, name) for name in names}
        cast = {
            name: round_to(x, fmt, self.cast(dose)).to(case.q.dtype)
            for name, x in self.spoil(exact, case, dose).items()
        }
        said = self.said(dose) if dose else "nothing planted"
        changes: dict[str, Any] = {**cast, "ran": f"{said}; else {result.ran}"}
        return dataclasses.replace(result, **changes)

    def _checked(self, dose: Any) -> float:
        if isinstance(dose, bool) or not isinstance(dose, int | float) or not 0 <= dose < math.inf:
            problem = "expected a number from 0 on"
        elif all(known.is_integer() for known in self.doses) and dose != int(dose):
            problem = "expected a whole number"
        else:
            return float(dose)
        raise UsageError(f"the dose of {PREFIX}{self.name} is {dose!r}", hint=problem)


def control_named(name: str) -> Control:
    """The control of a name such as `control:scale`; raises UsageError for an unknown one."""
    found = CONTROLS.get(name.removeprefix(PREFIX))
    if found is None:
        known = [PREFIX + known for known in CONTROLS]
        raise UsageError(f"unknown control {name!r}", hint=closest(name, known))
    return found


def _without_last_keys(case: AttentionCase, dose: float) -> AttentionCase:
    """The last keys of k, v and the mask left out; positions stay as they are."""
    kept = case.kv_len - int(dose)
    if kept < 1:
        raise Refused(f"it has {case.kv_len} keys, so {dose:g} cannot be dropped")
    mask = case.mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :kept]
    return dataclasses.replace(case, k=case.k[:, :, :kept], v=case.v[:, :, :kept], mask=mask)


def _keys_restored(results: Results, case: AttentionCase, dose: float) -> Results:
    """Keys that were dropped get a gradient of 0."""
    rows = (0, 0, 0, int(dose))
    return {name: pad(x, rows) if name in ("dk", "dv") else x for name, x in results.items()}


def _fewer_bits(site: str) -> Callable[[Format, float], dict[str, str]]:
    return lambda fmt, dose: {site: _narrowed(fmt, fmt.precision - int(dose))} if dose else {}


def _l_with_fewer_bits(fmt: Format, dose: float) -> dict[str, str]:
    """Sound is a row sum in fp32 or wider. Dose 1 is the working format's significand, if that is
    narrower; the exponent is never narrower than fp32's, so that long rows do not overflow."""
    if not dose:
        return {}
    narrower = fmt.precision < FORMATS["float32"].precision
    return {"row_sum": _narrowed(fmt, fmt.precision + narrower - int(dose), least_exponent=8)}


def _truncating(fmt: Format, dose: float) -> dict[str, str]:
    """From dose 2 on every rounding is toward zero. (Beside P's those in fp32 do not show.) O / l
    is left exact, since in fp32 the cast would find it rounded already."""
    if dose < 1:
        return {}
    return {"normalised": "exact", **({"rounding": "toward_zero"} if dose >= 2 else {})}


def _narrowed(fmt: Format, precision: int, *, least_exponent: int = 2) -> str:
    """The name of a format of `precision` significant bits with the exponents of `fmt`."""
    if precision < 2:
        raise Refused(f"{fmt.name} has only {fmt.precision} significant bits to lose")
    exponent = max(least_exponent, (2 - fmt.emin).bit_length())
    return f"e{exponent}m{precision - 1}"


def _one_head_larger(results: Results, case: AttentionCase, dose: float) -> Results:
    """The first head, of queries and of keys alike."""
    for x in results.values():
        x[:, 0] *= 1 + dose
    return results


def _dq_without_scale(results: Results, case: AttentionCase, dose: float) -> Results:
    if "dq" in results:
        results["dq"] = results["dq"] * abs(case.scale) ** -dose
    return results


def _delta_too_small(results: Results, case: AttentionCase, dose: float) -> Results:
    """dS = P o (dP - (1 - dose) delta). What is missing adds dose scale (P o delta) K to dQ, and
    dose scale (P o delta)ᵀ Q to dK: the output of attention whose values are K, and the gradient of
    these values where that of the output is delta Q."""
    if "dq" not in results or not dose:
        return results
    if case.softcap is not None:
        raise Refused("this control does not know the soft cap")
    delta = (upstream(case).double() * results["out"]).sum(dim=-1, keepdim=True)
    turned = dataclasses.replace(case, v=case.k, grad_out=delta * case.q.double())
    missing: Output = getattr(find("emulated"), "gradients")(turned, preset="exact")  # noqa: B009
    factor = dose * case.scale
    results["dq"] = results["dq"] + factor * delta * missing.out.double()
    results["dk"] = results["dk"] + factor * getattr(missing, "dv").double()  # noqa: B009
    return results


def _bits(count: float) -> str:
    return f"{count:g} significant bit{'' if count == 1 else 's'}"


CONTROLS: Mapping[str, Control] = {
    control.name: control
    for control in (
        Control(
            name="scale",
            said=lambda dose: f"the scale is {100 * dose:g} % too large",
            doses=RELATIVE,
            case=lambda case, dose: dataclasses.replace(case, scale=case.scale * (1 + dose)),
        ),
        Control(
            name="p-bits",
            said=lambda dose: f"P has {_bits(dose)} fewer than the format",
            doses=BITS,
            options=_fewer_bits("p"),
            backward_options=_fewer_bits("p_for_dv"),
        ),
        Control(
            name="l-rounded",
            said=lambda dose: (
                "the row sum is rounded to the significand of the format"
                + (f" less {_bits(dose - 1)}" if dose > 1 else "")
            ),
            doses=BITS,
            options=_l_with_fewer_bits,
        ),
        Control(
            name="truncated",
            said=lambda dose: f"{'P and ' if dose >= 2 else ''}the output is rounded toward zero",
            doses=(1.0, 2.0),
            options=_truncating,
            cast=lambda dose: "toward_zero" if dose >= 1 else "nearest",
        ),
        Control(
            name="keys-dropped",
            said=lambda dose: f"the last {dose:g} keys are dropped",
            doses=(1.0, 4.0, 16.0, 64.0),
            case=_without_last_keys,
            spoil=_keys_restored,
        ),
        Control(
            name="one-head",
            said=lambda dose: f"the first head is {100 * dose:g} % too large",
            doses=RELATIVE,
            spoil=_one_head_larger,
        ),
        Control(
            name="dq-unscaled",
            said=lambda dose: "dQ lacks the scale",
            doses=(1.0,),
            spoil=_dq_without_scale,
            in_backward_only=True,
        ),
        Control(
            name="delta-small",
            said=lambda dose: f"delta is {100 * dose:g} % too small",
            doses=(0.01, 0.1, 1.0),
            spoil=_delta_too_small,
            in_backward_only=True,
        ),
    )
}
