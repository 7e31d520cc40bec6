"""The function of a check as a reproducer script gets it: its file, the files beside
that, and how a module or memory for outputs is made, where a function is not simply
called."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from numdev.errors import MeasurementError, UsageError
from numdev.operations.function.problem_files import SEED, ModuleBuild
from numdev.operations.function.trees import Arguments
from numdev.studies.audit.reproducer_script import literal

STATE = "state."  # before the names of a module's parameters and buffers in the tensors
ASIDE = "files"  # the folder beside a script that holds what the function's file imports


@dataclass(frozen=True, kw_only=True)
class ScriptTarget:
    """A function of a solution or a submission, which a script cannot simply import and
    call, and what a script needs to call it."""

    file: Path
    name: str
    source: str = ""  # of the reference, where that is no Python function's own
    folder: Path | None = None  # of files that it imports, and perhaps its own
    build: ModuleBuild | None = None  # how a module is made of the class that it is
    # Memory for the outputs of a call, which the function gets after its arguments
    memory: Callable[[Arguments], Sequence[Tensor]] | None = None
    outputs: tuple[str, ...] = ()  # names of what a returned mapping has
    constants: frozenset[int] = frozenset()  # sizes that a call cannot change

    def facts(self, arguments: Arguments, device: str) -> dict[str, object]:
        """Returns the facts about the function for the template of a script, by name.
        Raises UsageError for a module's argument that has no spelling, and where the
        file's text contains `cuda` and the check ran on a CPU: the script alone puts no
        CPU in the place of a GPU. Raises OSError where the file cannot be read."""
        text = self.file.read_text(encoding="utf-8", errors="replace")
        if not device.startswith("cuda") and "cuda" in text:
            what = "the function's file asks for CUDA, and this check ran on a CPU"
            raise UsageError(what)
        memory = () if self.memory is None else self.memory(arguments)
        facts: dict[str, object] = {
            "file": self._path_in_script(),
            "aside": ASIDE if self.folder is not None else None,
            "memory": [_unwritten_text(x) for x in memory],
            "outputs": list(self.outputs),
        }
        if self.build is not None:
            facts["class_arguments"] = self._class_arguments(self.build)
            facts["class_seed"] = SEED
            facts["class_dtype"] = self.build.dtype
            facts["has_state"] = self.build.state is not None
        return facts

    def stored(self) -> dict[str, Tensor]:
        """Returns the tensors that a script needs beside those of its calls: what
        `state_dict` had of a module, named `state.NAME`, where the check gave it this
        state. Empty for a function, and for a module with the values that its class makes
        under a seed."""
        state = None if self.build is None else self.build.state
        items: Mapping[str, Tensor] = state or {}
        return {f"{STATE}{name}": x.detach().contiguous() for name, x in items.items()}

    def write_aside(self, folder: Path) -> None:
        """Copies the folder that the function's file imports from into the folder of a
        script, as `files`, without `__pycache__` and `definition_reference.py`. Does
        nothing without such a folder. Raises MeasurementError where it cannot be copied,
        and where `files` exists."""
        if self.folder is None:
            return
        ignored = shutil.ignore_patterns("__pycache__", "definition_reference.py")
        try:
            shutil.copytree(self.folder, folder / ASIDE, ignore=ignored)
        except OSError as error:
            what = f"{folder / ASIDE}: cannot be written ({error})"
            raise MeasurementError(what) from error

    def _path_in_script(self) -> str:
        """Returns the path of the file as the script has it: of a file in `folder` that
        of its copy, relative to the script; else the absolute path."""
        file = self.file.resolve()
        if self.folder is not None and file.is_relative_to(self.folder.resolve()):
            return str(Path(ASIDE) / file.relative_to(self.folder.resolve()))
        return str(file)

    @staticmethod
    def _class_arguments(build: ModuleBuild) -> str:
        """Returns the arguments of the module's class as Python source. Raises UsageError
        for an argument that has no spelling."""
        return ", ".join(map(literal, build.arguments))


def _unwritten_text(x: Tensor) -> str:
    """Returns Python source that makes memory for an output: full of NaN, of complex
    numbers of those with two NaN, of integers of the largest one, of bools of True."""
    if x.is_floating_point():
        value = "torch.nan"
    elif x.is_complex():
        value = "complex(torch.nan, torch.nan)"
    else:
        value = "True" if x.dtype == torch.bool else f"torch.iinfo({x.dtype}).max"
    return f"torch.full({list(x.shape)}, {value}, dtype={x.dtype}, device=DEVICE)"
