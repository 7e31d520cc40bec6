"""`numdev gate` is quick on large reports: the whole process, with a generous factor."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from gate_rows import report, row


def test_ten_thousand_rows_in_a_moment(tmp_path: Path) -> None:
    """Under 2.5 s of processor time, of which 0.4 s are usual on an idle core; torch, numpy and
    pandas are not imported."""
    roles = ("kernel", "kernel", "floor", "baseline")
    rows = [row(i // 4 % 32, role=roles[i % 4], kernel=f"k{i % 4}", case=f"c{i // 128}")
            for i in range(10_000)]  # fmt: skip
    (tmp_path / "report.json").write_text(report(*rows).model_dump_json())
    code = (
        "import sys\nfrom numdev.cli import main\n"
        "try:\n    main(['gate', sys.argv[1]])\n"
        "finally:\n    print(*sys.modules.keys() & {'torch', 'numpy', 'pandas'}, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (answer.returncode, answer.stderr.strip()) == (0, "")
    assert "5000 rows" in answer.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
