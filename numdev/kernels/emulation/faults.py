"""Controls: sound attention with a planted fault of a known dose, to show what a gate
would catch.

An audit can put them beside the kernel, on the same data: what `fa2` predicts of a
production kernel, with one thing wrong. The smallest dose a gate catches is its power
there. A fault sits in one of three places (`Planted`): another *case* is computed,
another *option* of the emulation is in force, or the results are *spoiled* before they
are cast. At dose 0 nothing differs from the sound emulation, bit for bit. Doses of
rounding are relative to the working format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format, RoundingMode, round_to
from numdev.kernels import Kernel, Output, Refused, find, fingerprint
from numdev.kernels.emulation.backward import CASTS
from numdev.kernels.output import GRADIENTS, upstream

PREFIX = "control:"
RELATIVE = (0.001, 0.003, 0.01, 0.03)
BITS = (1.0, 2.0, 3.0, 4.0)
ALL, FIRST = slice(None), slice(1)
Results = dict[str, Tensor]
"""`out`, and of a training step GRADIENTS, in float64 from before the cast."""


class Planted(NamedTuple):
    """A fault in one case: the case to compute, options of `emulated` beside the preset
    `fa2`, a change of its results before they are cast, and the mode of that cast."""

    case: AttentionCase
    options: Mapping[str, str] = {}
    spoil: Callable[[Results], Results] = lambda results: results
    cast: RoundingMode = "nearest"


@dataclass(frozen=True)
class Control:
    """A planted fault and the doses in which it is measured. A dose is a number above 0;
    what it counts (percent, bits, keys) stands in `words`."""

    name: str
    words: str
    """A dose of it as a clause, with `dose`, `percent` and `fewer` (a dose less 1) filled
    in."""
    doses: tuple[float, ...]  # those that are measured, the smallest first
    plant: Callable[[AttentionCase, float], Planted]  # of a dose above 0
    # Whether the output is sound, and only gradients show it
    in_backward_only: bool = False

    def describe(self, dose: float) -> str:
        """Returns a dose of the fault as a clause, for example `the scale is 0.1 % too
        large`."""
        return self.words.format(dose=dose, percent=100 * dose, fewer=dose - 1)

    def kernel(self) -> Kernel:
        """Returns the fault as a kernel with the option `dose`, 0 by default (a sound
        emulation); it is not registered. The kernel refuses a case that cannot have the
        dose, as where it has no more keys than are dropped."""
        return Kernel(
            name=PREFIX + self.name,
            function=partial(self._run, names=("out",)),
            summary=f"fa2 as emulated, but {self.describe(self.doses[0])}",
            options={"dose": 0.0},
            any_format=True,
            any_rows=True,
            made_from=fingerprint(self._run),
            backward=partial(self._run, names=("out", *GRADIENTS)),
        )

    def _run(self, case: AttentionCase, dose: float, *, names: tuple[str, ...]) -> Output:
        """Returns the results `names` with the fault in them, rounded to the case's
        format, in its dtype; dose 0 plants nothing. Raises Refused for a case that cannot
        have the dose."""
        planted = self.plant(case, dose) if dose else Planted(case)
        uncast = dict.fromkeys(("out", *CASTS), "exact")
        sound = (
            find("emulated").attend if names == ("out",) else find("emulated").gradients
        )
        result = sound(planted.case, preset="fa2", **{**uncast, **planted.options})
        cast = {
            name: round_to(x, case.format, planted.cast).to(case.q.dtype)
            for name, x in planted.spoil({n: getattr(result, n) for n in names}).items()
        }
        words = self.describe(dose) if dose else "nothing planted"
        return dataclasses.replace(
            result,
            out=cast["out"],
            dq=cast.get("dq", result.dq),
            dk=cast.get("dk", result.dk),
            dv=cast.get("dv", result.dv),
            ran=f"{words}; else {result.ran}",
        )


def _l_rounded(case: AttentionCase, dose: float) -> Planted:
    """Plants a row sum of fewer bits. A sound kernel's is in fp32 or wider; dose 1 is the
    working format's significand, if that is narrower, and each further dose a bit less.
    The exponent is never narrower than fp32's, so that long rows do not overflow. Raises
    Refused where fewer than 2 bits are left."""
    narrower = case.format.precision < FORMATS["float32"].precision
    row_sum = _narrowed(case.format, int(dose) - narrower, least_exponent=8)
    return Planted(case, {"row_sum": row_sum})


def _narrowed(fmt: Format, fewer: int, *, least_exponent: int = 2) -> str:
    """Returns the name (`e8m6`) of the format `fmt` with `fewer` significant bits fewer,
    and an exponent of at least `least_exponent` bits. A negative `fewer` adds bits.
    Raises Refused where fewer than 2 bits are left."""
    if fmt.precision - fewer < 2:
        raise Refused(f"{fmt.name} has only {fmt.precision} significant bits to lose")
    exponent = max(least_exponent, (2 - fmt.emin).bit_length())
    return f"e{exponent}m{fmt.precision - fewer - 1}"


def _keys_dropped(case: AttentionCase, dose: float) -> Planted:
    """Plants the loss of the last `dose` keys. Positions stay, and dk and dv of the
    dropped keys are 0. Raises Refused where the case has no more keys than that."""
    count, rows = case.kv_len - int(dose), (0, 0, 0, int(dose))
    if count < 1:
        raise Refused(f"the case has {case.kv_len} keys, so {dose:g} cannot be dropped")
    mask = case.mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :count]
    return Planted(
        dataclasses.replace(
            case, k=case.k[:, :, :count], v=case.v[:, :, :count], mask=mask
        ),
        spoil=lambda results: {
            name: pad(x, rows) if name in ("dk", "dv") else x
            for name, x in results.items()
        },
    )


def _times(
    case: AttentionCase, factor: float, *names: str, heads: slice = ALL
) -> Planted:
    """Plants a factor on the results `names`: without names on all of them, and a name
    that the results lack is passed over. `spoil` multiplies in place, in the `heads` (a
    slice) of query tensors and kv tensors alike."""

    def spoil(results: Results) -> Results:
        """Returns the results, those that are named multiplied in place."""
        for name, x in results.items():
            if not names or name in names:
                x[:, heads] *= factor
        return results

    return Planted(case, spoil=spoil)


def _delta_small(case: AttentionCase, dose: float) -> Planted:
    """Plants dS = P o (dP - (1 - dose) delta). What is missing adds dose scale (P o
    delta) K to dQ, and dose scale (P o delta)ᵀ Q to dK: the output of attention whose
    values are K, and the gradient of these values where that of the output is delta Q.
    With a soft cap `spoil` raises Refused, unless there are no gradients."""

    def spoil(results: Results) -> Results:
        """Returns the results with dq and dk as a too small delta makes them; unchanged
        without gradients."""
        if "dq" not in results:
            return results
        if case.softcap is not None:
            raise Refused("this control does not know the soft cap")
        delta = (upstream(case).double() * results["out"]).sum(dim=-1, keepdim=True)
        turned = dataclasses.replace(case, v=case.k, grad_out=delta * case.q.double())
        missing = find("emulated").gradients(turned, preset="exact")
        assert missing.dv is not None
        factor = dose * case.scale
        dq = results["dq"] + factor * delta * missing.out.double()
        return {**results, "dq": dq, "dk": results["dk"] + factor * missing.dv.double()}

    return Planted(case, spoil=spoil)


def _wrong_scale(case: AttentionCase, dose: float) -> Planted:
    """Plants a scale that is `dose` (0.01: 1 %) too large."""
    return Planted(dataclasses.replace(case, scale=case.scale * (1 + dose)))


def _p_bits(case: AttentionCase, dose: float) -> Planted:
    """Plants P with `dose` significant bits fewer than the format, in both passes. Raises
    Refused where fewer than 2 bits are left."""
    narrow = _narrowed(case.format, int(dose))
    return Planted(case, {"p": narrow, "p_for_dv": narrow})


def _truncated(case: AttentionCase, dose: float) -> Planted:
    """Plants an output rounded toward zero; from dose 2 on every step is. O / l stays
    exact, since the cast must be what rounds it."""
    options = {"normalised": "exact"}
    if dose >= 2:
        options["rounding"] = "toward_zero"
    return Planted(case, options, cast="toward_zero")


def _one_head(case: AttentionCase, dose: float) -> Planted:
    """Plants a first head whose results are `dose` (0.01: 1 %) too large: of dk and dv
    the first kv head, of the others the first query head."""
    return _times(case, 1 + dose, heads=FIRST)


def _dq_unscaled(case: AttentionCase, dose: float) -> Planted:
    """Plants a dQ divided by the scale's magnitude to the power of `dose`; at 1 it lacks
    the scale. Raises ZeroDivisionError for a scale of 0."""
    return _times(case, abs(case.scale) ** -dose, "dq")


_CONTROLS = (
    Control("scale", "the scale is {percent:g} % too large", RELATIVE, _wrong_scale),
    Control("p-bits", "P has {dose:g} bits fewer than the format", BITS, _p_bits),
    Control(
        "l-rounded", "l is rounded to the format less {fewer:g} bits", BITS, _l_rounded
    ),
    Control(
        "truncated",
        "the output is rounded toward zero (2: so is P)",
        (1.0, 2.0),
        _truncated,
    ),
    Control(
        "keys-dropped",
        "the last {dose:g} keys are dropped",
        (1.0, 4.0, 16.0, 64.0),
        _keys_dropped,
    ),
    Control("one-head", "the first head is {percent:g} % too large", RELATIVE, _one_head),
)
_CONTROLS_OF_BACKWARD = (
    Control("dq-unscaled", "dQ lacks the scale", (1.0,), _dq_unscaled, True),
    Control(
        "delta-small",
        "delta is {percent:g} % too small",
        (0.01, 0.1, 1.0),
        _delta_small,
        True,
    ),
)
CONTROLS: Mapping[str, Control] = {
    control.name: control for control in (*_CONTROLS, *_CONTROLS_OF_BACKWARD)
}
