"""A process that was started for one command ends at once, and loses nothing."""

from __future__ import annotations

import subprocess
import sys

from numdev.ending import end

ENDS = """
import atexit, sys
from numdev.ending import end, process_is_ours
class Last:
    def __del__(self): print("taken apart")
last = Last()
atexit.register(lambda: print("at exit"))
{ours}
print("x" * 100_000, end="")
print("said", file=sys.stderr)
end(7)
print("went on")
"""


def run(ours: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENDS.format(ours=ours)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_that_was_printed_is_out_and_what_was_registered_is_done() -> None:
    answer = run("process_is_ours()")
    assert answer.returncode == 7
    assert answer.stdout.removeprefix("x" * 100_000) == "at exit\n"
    assert answer.stderr == "said\n"


def test_a_process_of_somebody_elses_goes_on() -> None:
    answer = run("")
    assert answer.returncode == 0
    assert answer.stdout.removeprefix("x" * 100_000) == "went on\nat exit\ntaken apart\n"


def test_called_from_python_it_does_nothing() -> None:
    end(3)  # or there would be no tests any more
