"""Attention as an operation of the audit's loop: which rows of a sample are measured
beside those drawn, and what is written into the rows of a kernel that errs."""

from __future__ import annotations

from collections.abc import Mapping

from numdev.kernels import Kernel, Output
from numdev.studies.audit.deviation_rows import Measured, Runs
from numdev.studies.audit.explanations import beyond, wrong_tensors
from numdev.studies.audit.isolation import Runner
from numdev.studies.audit.mistake_search import (
    Failing,
    far_off_tensors,
    has_room,
    name_mistakes,
)
from numdev.studies.audit.prepared_attention import Bench
from numdev.studies.audit.row_screening import screened
from numdev.system import System


class Attention:
    """Attention as an `Operation` (`numdev.studies.audit.operation`)."""

    def screened(self, call: Bench, output: Output) -> Bench:
        """Returns the call with more rows measured: beside the sampled ones those in
        which `output` differs most from a second computation of the call. Where that
        computation fails, it is the same call with the reason in `unscreened`. A call of
        which all rows are measured is returned as it is."""
        return call if call.selection.queries is None else screened(call, output)

    def explained(
        self,
        kernel: Kernel,
        options: Mapping[str, object],
        runs: Runs[Bench],
        measured: Measured[Bench],
        system: System,
        run: Runner,
        later: list[Failing] | None,
    ) -> Measured[Bench]:
        """Returns the call's measurement, whose rows say why the kernel errs, as far as
        it is known: the mistake it makes, or the known way of rounding that explains it
        where it declares no claim. Rows of `measured` are changed in place, or replaced
        by those measured against that way; where nothing errs, it is returned unchanged.
        With a list `later` a call that errs, and any call of a kernel without a claim, is
        appended to it while there is room, and `measured` is returned unchanged; None:
        nothing waits."""
        wrong = wrong_tensors(measured.rows)
        may_wait = later is not None and bool(wrong or not kernel.declares)
        is_suspicious = any(row.nonfinite or row.suspicion for row in measured.rows)
        if not (wrong or may_wait or is_suspicious):
            return measured
        failing = Failing(kernel, system, run, options, runs, measured)
        if later is not None and may_wait and has_room(later, failing):
            later.append(failing)
            return measured
        wrong = beyond(measured.rows)
        if not kernel.declares and not {*runs.bench.by_row}.isdisjoint(wrong):
            far = far_off_tensors(measured.rows, wrong)
            if not far:
                failing.hold_to_known_way()
            elif "out" not in far:
                failing.hold_if_rounding_alone()
        name_mistakes(failing)
        return failing.measured


ATTENTION = Attention()
