"""Reports: their records, how they are read and written, what is shown of them.

A report is plain data with a schema version. It needs neither torch nor a GPU to be read.
All that other packages need of `records` and `io` is exported here."""

from numdev.report.io import read, replacing, write, write_csv
from numdev.report.records.judgement_outcomes import *  # noqa: F403
from numdev.report.records.measurements import *  # noqa: F403
from numdev.report.records.reports import *  # noqa: F403
from numdev.report.records.summaries import *  # noqa: F403

__all__ = ["read", "replacing", "write", "write_csv"]
