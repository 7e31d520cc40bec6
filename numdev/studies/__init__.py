"""Studies: each a question, from what was asked to a report. A study's plan, rows, tests
and view stand in its folder, and `numdev.report_kinds` knows where."""
