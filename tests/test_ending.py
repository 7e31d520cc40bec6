"""A process that was started for one command ends at once, and loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from numdev.cli.ending import end

ENDS = """
import atexit, sys
from numdev.cli.ending import end, process_is_ours
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
    """With buffers, as a program has them where nothing else is said."""
    command = [sys.executable, "-c", ENDS.format(ours=ours)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=plain)


def test_all_that_was_printed_is_out_and_what_was_registered_is_done() -> None:
    answer = run("process_is_ours()")
    assert answer.returncode == 7
    assert answer.stdout.removeprefix("x" * 100_000) == "at exit\n"
    assert answer.stderr == "said\n"


@pytest.mark.skipif(os.name != "posix", reason="redirections of a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_are_closed_change_no_exit_code(closed: str) -> None:
    code = "from numdev.cli.ending import end, process_is_ours; process_is_ours(); end(7)"
    command = ["sh", "-c", f'"$0" -c "{code}" {closed}', sys.executable]
    assert subprocess.run(command, check=False).returncode == 7


def test_a_process_of_somebody_elses_goes_on() -> None:
    answer = run("")
    assert answer.returncode == 0
    assert answer.stdout.removeprefix("x" * 100_000) == "went on\nat exit\ntaken apart\n"


def test_called_from_python_it_does_nothing() -> None:
    end(3)  # or there would be no tests any more


def test_a_profiler_has_the_last_word() -> None:
    answer = run("process_is_ours(); sys.setprofile(lambda *_: None)")
    assert answer.returncode == 0
    assert "went on" in answer.stdout


def test_cprofile_says_what_it_saw() -> None:
    """`python -m cProfile -m numdev gate`: the error of the gate, and the table of calls."""
    command = [sys.executable, "-m", "cProfile", "-m", "numdev", "gate", "nothing-there"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "function calls" in answer.stdout
    assert "nothing-there" in answer.stderr
