"""Task folders: `task.yml` with the sizes of tests, `reference.py` with `generate_input`
and `ref_kernel`, of which a submission is a file with `custom_kernel`.

Both functions take what `generate_input` returns, whatever that is, and what the first
one returns is right. Memory for an output that a task hands over holds NaN until it is
written. Smaller sizes than the tests' are not made up: a task may have constants."""

from __future__ import annotations

import ast
import importlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from numdev.errors import UsageError, one_line, why_no_file
from numdev.kernels.parsed_files import parsed_file, why_not_imported
from numdev.operations.function.inputs import Make, parameters_of
from numdev.operations.function.task_environment import Surroundings, uninitialised_is_nan
from numdev.operations.function.trees import Arguments
from numdev.seeding import seeded
from numdev.yamlfile import Loose, read_yaml

GENERATE, REFERENCE, SUBMISSION = "generate_input", "ref_kernel", "custom_kernel"
CHECK = "check_implementation"
SEED = "seed"
SUBMITTED = "@SUBMISSION@"  # in place of the path of a submission's file
LARGEST = {"cpu": 1 << 24, "cuda": 1 << 28}  # numbers in the inputs of one test
TOGETHER = {"cpu": 1 << 20, "cuda": 1 << 26}  # in those of all tests that run
MOST_TESTS = 4
Sizes = Mapping[str, object]  # arguments of `generate_input`


class _TaskFile(Loose):
    """A file that code of the task imports under a name."""

    name: str
    source: str | None = None  # its path in the folder


class _TaskForm(Loose):
    """What `task.yml` says, as far as a check reads it."""

    lang: str = "py"
    multi_gpu: bool | None = None
    tests: list[dict[str, object]] | None = None
    benchmarks: list[dict[str, object]] | None = None
    files: list[_TaskFile] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """A task folder, as `task.yml` describes it."""

    path: Path
    tests: tuple[Sizes, ...]
    files: Mapping[str, Path]  # by the names under which code imports them

    @classmethod
    def read(cls, path: Path) -> TaskFolder:
        """Reads the task of a folder. Its tests are those of `task.yml`, or the
        benchmarks where there are none. Raises UsageError where it has no `task.yml` with
        a list of either, where a file is missing or cannot be read, and for a task of
        several GPUs, of another language than Python, or whose outputs are judged by
        their properties."""
        text = path / "task.yml"
        if not text.is_file():
            raise UsageError(f"{path}: expected a folder with task.yml")
        form = read_yaml(text, _TaskForm)
        if form.multi_gpu:
            raise UsageError(f"{path}: the task runs on several GPUs, a check on one")
        if form.lang != "py":
            raise UsageError(f"{text}: lang: expected py, got {form.lang}")
        tests = form.tests or form.benchmarks
        if not tests:
            raise UsageError(f"{text}: expected a list of tests")
        files = dict(_files(path, form.files or ()))
        if "reference.py" not in files:
            raise UsageError(f"{path}: expected a file reference.py")
        _check_by_reference(files["reference.py"])
        return cls(path=path, tests=tuple(tests), files=files)

    def unpacked(self, folder: Path, device: str) -> Surroundings:
        """Copies the task's files into a folder, which is there, under the names by which
        code imports them, and returns the surroundings of code there. Raises UsageError
        where a file cannot be copied."""
        for name, source in self.files.items():
            try:
                shutil.copyfile(source, folder / name)
            except (OSError, ValueError) as error:  # ValueError: a null byte
                what = f"cannot be copied to {name!r}: {one_line(error)}"
                raise UsageError(f"{source}: {what}") from error
        modules = tuple(Path(name).stem for name in self.files)
        return Surroundings(folder=str(folder), modules=modules, device=device)

    def by_size(self) -> list[Sizes]:
        """Returns the tests, the smallest first, by the product of their whole numbers
        above 0 without the seed."""
        return sorted(self.tests, key=_size)

    def with_sizes(self, text: str) -> Sizes:
        """Returns the arguments of `generate_input` in `m=64,n=32`. Those that the text
        does not name are the smallest test's. A value is a Python literal, else a text.
        Raises UsageError for a part of another form, and for a name that the smallest
        test lacks."""
        sizes = dict(self.by_size()[0])
        for part in filter(None, text.split(",")):
            name, is_pair, value = (x.strip() for x in part.partition("="))
            if not is_pair or name not in sizes:
                names = ", ".join(sizes)
                raise UsageError(f"shape: expected NAME=VALUE of {names}, got {part!r}")
            try:
                sizes[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                sizes[name] = value
        return sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class ImportedTask:
    """A task whose reference was imported."""

    folder: TaskFolder
    surroundings: Surroundings
    generate: Callable[..., object]
    reference: Callable[..., object]

    @classmethod
    def imported(cls, folder: TaskFolder, surroundings: Surroundings) -> ImportedTask:
        """Imports the reference of a task as the module `reference`, which must be found
        on `sys.path` (`Surroundings.entered`). Raises UsageError where the import raises
        an exception or SystemExit, and where it lacks one of its two functions."""
        with surroundings.on_its_device():
            try:  # by this name, since inputs may be of its classes
                module = importlib.import_module("reference")
            except (Exception, SystemExit) as error:
                words = f"{folder.path}: reference.py cannot be imported"
                raise UsageError(f"{words}: {why_not_imported(error)}") from error
        lacking = [n for n in (GENERATE, REFERENCE) if not callable(vars(module).get(n))]
        if lacking:
            raise UsageError(f"reference.py: expected a function {lacking[0]}, got none")
        return cls(
            folder=folder,
            surroundings=surroundings,
            generate=surroundings.on_device_of(vars(module)[GENERATE]),
            reference=surroundings.on_device_of(vars(module)[REFERENCE]),
        )

    def inputs(self, sizes: Sizes, seed: int) -> Arguments:
        """Returns the only argument of a call of these sizes, which has the name `data`.
        A test's own seed is raised by `seed`; a task that takes a seed and has none in
        the test gets `seed`. PyTorch's generators are seeded and restored. Raises
        UsageError where `generate_input` raises."""
        takes = parameters_of(self.generate) or {}
        first = sizes.get(SEED)
        named = dict(sizes)
        if isinstance(first, int):
            named[SEED] = first + seed
        elif SEED in takes and SEED not in named:
            named[SEED] = seed
        with seeded(seed), uninitialised_is_nan():
            try:
                data = self.generate(**named)
            except (Exception, SystemExit) as error:
                words = f"{GENERATE}({sizes_text(named)}) raised {one_line(error)}"
                raise UsageError(words) from error
        return Arguments(positional=(data,), names=("data",))

    def chosen(self, shapes: str, device: str) -> tuple[list[Sizes], list[str]]:
        """Returns the tests that a check runs, the smallest first, at most MOST_TESTS,
        and, if there are tests that do not run, a sentence on them. With `shapes`
        (`m=64,n=32`) it returns that call alone, of any size. The smallest test is too
        large beyond LARGEST numbers in its inputs. Another is too large where it may have
        more than that, as the square of its size over that of the test before it makes
        these more, or where all tests up to it have more than TOGETHER; none after it
        runs. Inputs are made to be counted. Raises UsageError where the smallest test is
        too large, for wrong `shapes`, and where `generate_input` raises."""
        if shapes:
            return [self.folder.with_sizes(shapes)], []
        kind = "cuda" if device.startswith("cuda") else "cpu"
        every = self.folder.by_size()
        numbers = _numbers(self.inputs(every[0], 0))
        if numbers > LARGEST[kind]:
            raise UsageError(
                f"the smallest test ({sizes_text(every[0])}) has {numbers} numbers in "
                f"its inputs: at most {LARGEST[kind]} are run on this device",
                hint="give sizes by --shape, or run on a GPU",
            )
        chosen, left = [every[0]], TOGETHER[kind] - numbers
        for sizes in every[1:MOST_TESTS]:
            # A size may stand for a square: what may be too large is not made
            if numbers * _size(sizes) ** 2 > LARGEST[kind] * _size(chosen[-1]) ** 2:
                break
            numbers = _numbers(self.inputs(sizes, 0))
            left -= numbers
            if left < 0:
                break
            chosen.append(sizes)
        not_run = every[len(chosen) :]
        if not not_run:
            return chosen, []
        first = sizes_text(not_run[0])
        return chosen, [
            f"Not run: {len(not_run)} of {len(every)} tests, the larger ones (from "
            f"{first} on); --shape {first.replace(' ', '')} runs one."
        ]

    def calls(self, chosen: Sequence[Sizes]) -> Make:
        """Returns a function that makes the calls of a seed, one for each of the sizes.
        That raises UsageError where `generate_input` raises."""
        return lambda seed: [self.inputs(sizes, seed) for sizes in chosen]


def sizes_text(sizes: Sizes) -> str:
    """Returns the arguments of `generate_input` as text: `m=64, n=32, seed=1`."""
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def _size(sizes: Sizes) -> int:
    """Returns the product of the whole numbers above 0 in a test, but for the seed; 1
    without any."""
    return math.prod(
        value for name, value in sizes.items()
        if name != SEED and isinstance(value, int) and value > 0
    )  # fmt: skip


def _numbers(arguments: Arguments) -> int:
    """Returns how many numbers all tensors of a call have."""
    return sum(x.numel() for x in arguments.leaves().values())


def _files(path: Path, listed: Sequence[_TaskFile]) -> Iterator[tuple[str, Path]]:
    """Yields the names of a task's files with their paths: the `.py` files of its folder
    by name, then those that `task.yml` lists with a source, but for the submission's.
    Raises UsageError for a listed file that is not there, or whose name has a folder."""
    for file in sorted(path.glob("*.py")):
        if file.is_file():
            yield file.name, file
    for entry in listed:
        if entry.source in (SUBMITTED, None):
            continue
        source = path / entry.source
        # A name too long for a file is none of a file either
        if Path(entry.name).name != entry.name or not os.path.isfile(source):
            what = f"{entry.name}: {source}: {why_no_file(source)}"
            raise UsageError(f"{path / 'task.yml'}: {what}")
        yield entry.name, source


def _check_by_reference(file: Path) -> None:
    """Raises UsageError where the file has no `ref_kernel`, and where it has a
    `check_implementation` that does not use `ref_kernel`: then other outputs than the
    reference's are right. Raises UsageError for invalid Python too. Nothing is run."""
    names: dict[str, set[str]] = {}  # of what is defined: the names that it uses
    for node in parsed_file(file).body:
        uses = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = uses
        elif isinstance(node, ast.Assign):
            names |= {t.id: uses for t in node.targets if isinstance(t, ast.Name)}
    if REFERENCE not in names:
        raise UsageError(f"{file}: expected a function {REFERENCE}, got none")
    used, left = set[str](), [CHECK]
    while left:
        name = left.pop()
        if name not in used:
            used.add(name)
            left += names.get(name, ())
    if CHECK in names and REFERENCE not in used:
        raise UsageError(
            f"{file}: {CHECK} judges outputs by their properties, not by {REFERENCE}: "
            "there is no reference to check beside"
        )
