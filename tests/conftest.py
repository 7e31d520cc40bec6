"""What holds for every test."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same inputs every day: what is drawn anew is `scripts/fuzz.py` and its kin, run on
# purpose.
settings.register_profile("numdev", derandomize=True, deadline=None, database=None)
settings.load_profile("numdev")

MEMORY = {"before": 0}
MUCH = 1 << 27


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `one_in(n)` every n-th case is run every day; the others are
    `thorough`. Checks of functions come first, while the process is small: they fork."""
    items.sort(key=lambda item: not item.path.name.startswith("test_function"))
    seen = Counter[str]()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.thorough)
            seen[test] += 1


def pytest_collection_finish() -> None:
    """What is imported by now stays: no search for garbage goes through it again. It is
    searched for where memory has grown (below), and at no other time."""
    gc.collect()
    gc.freeze()
    gc.disable()  # as the command line does


@pytest.hookimpl(trylast=True)  # when nothing of a test is patched any more
def pytest_runtest_teardown() -> None:
    """Gives free memory back to the system where the process has grown by much: a fork
    takes as long as the process is large, 6 ms of 240 MB and 25 ms of 600."""
    if sys.platform == "linux" and resident_memory() > MEMORY["before"] + MUCH:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        MEMORY["before"] = resident_memory()


def resident_memory() -> int:
    """The bytes of memory that this process has, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: a reference takes 50 ms with two threads and 1 ms with
    one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_reaches_what_is_started() -> Iterator[None]:
    """A shell that runs tests in the background has it ignored in all they start."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def no_module_of_a_test_stays(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """A file that a test wrote and imported takes the name of no other test's file, nor
    is it looked for by its folder. Those of fixtures that were set up before stay."""
    modules, path = set(sys.modules), [*sys.path]
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(written):
            del sys.modules[name]
    sys.path[:] = [x for x in sys.path if x in path or not x.startswith(written)]
