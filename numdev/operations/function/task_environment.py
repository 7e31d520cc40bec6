"""What code of a task or a definition finds around it: files beside it, and a GPU.

Its modules are imported under their plain names (`task`, `utils`) from a folder of the
check's own. Where the check runs on a CPU, "cuda" written in the code means that CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from numdev.errors import UsageError
from numdev.operations.function.problem_files import module_of, on_device


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A folder that holds modules, and the device that "cuda" means."""

    folder: str
    modules: tuple[str, ...]  # names under which code imports them
    device: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Returns a context in which code imports its modules from the folder, anew. At
        its end `sys.modules` has the modules of these names, and `sys.path` the entries,
        that it had before."""
        before = {name: sys.modules.pop(name, None) for name in self.modules}
        path = list(sys.path)
        sys.path.insert(0, self.folder)
        try:
            yield
        finally:
            sys.path[:] = path
            for name, module in before.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module

    @contextmanager
    def on_its_device(self) -> Iterator[None]:
        """Returns a context in which "cuda" in code means the device. On any other device
        than a CUDA one `torch.cuda.synchronize` does nothing in it."""
        if self.device.startswith("cuda"):
            yield
            return
        wait = torch.cuda.synchronize
        torch.cuda.synchronize = lambda *_: None
        try:
            with on_device(self.device):
                yield
        finally:
            torch.cuda.synchronize = wait

    def on_device_of(self, function: Callable[..., object]) -> Callable[..., object]:
        """Returns a function of the same signature that calls `function` where "cuda"
        means the device."""

        @functools.wraps(function)
        def call(*arguments: object, **named: object) -> object:
            with self.on_its_device():
                return function(*arguments, **named)

        return call

    def module_at(self, path: Path) -> ModuleType:
        """Imports a file, anew, with "cuda" meaning the device, and returns its module.
        The file's own folder stays on sys.path, and the module in sys.modules. Raises
        UsageError where the file is missing, is no `.py`, or its import raises an
        exception or SystemExit."""
        with self.on_its_device():
            return module_of(path)

    def function_at(self, target: str) -> Callable[..., object]:
        """Returns the function that `FILE.py:NAME` names, called where "cuda" means the
        device. Raises UsageError for a file that cannot be imported or lacks it."""
        path, _, name = target.rpartition(":")
        function = getattr(self.module_at(Path(path)), name, None)
        if not callable(function):
            raise UsageError(f"{path}: expected a function {name}, got none")
        return self.on_device_of(function)


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Returns a context in which memory that PyTorch allocates and nobody writes into
    holds NaN (of integers the largest number), so that an output that a kernel leaves
    unwritten is seen. In it operations run by deterministic algorithms where PyTorch has
    them, else as ever, with PyTorch's warning."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # The public function of the same name loads PyTorch's compiler, for seconds
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was_on, warn_only=warns)
