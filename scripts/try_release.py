"""The wheel, tried where nothing else is: `make release` builds it and runs this.

    python scripts/try_release.py dist/numdev-0.1.0-py3-none-any.whl [--extras]

A new environment gets the wheel and what its metadata requires, no more: hard links to
the distributions of the environment that runs this, since unpacking torch again takes a
minute. Another Python is tried by running this with the Python of another environment.
`pip check` has to agree. In an empty folder, without this repository, each command then
has to end with its exit code and say its words. `--extras`: what each extra requires is
met by what is installed here."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("rmsnorm.py", "logprobs/from_demo.py")
ELSEWHERE = {"flash-attn", "flashinfer-python"}  # for CUDA alone


class Trial(NamedTuple):
    """A command in the new environment, its exit code, and words of its stdout."""

    line: str
    code: int
    words: str


BESIDE = "--reference rmsnorm.py:reference --shape x=256x1024,w=1024"
TRIALS = (
    Trial("numdev --version", 0, "numdev"),
    Trial("numdev --help", 0, "audit"),
    Trial("numdev kernels", 0, "sdpa-flash"),
    Trial(f"numdev check rmsnorm.py:sound {BESIDE}", 0, "PASS"),
    Trial(f"numdev check rmsnorm.py:kernel {BESIDE} --format float32", 1, "1e-05"),
    Trial("numdev check sdpa-flash --case causal --format bfloat16", 0, "PASS"),
    Trial("numdev audit demo --output audited --backward", 0, "PASS"),
    Trial("numdev gate audited", 0, "PASS"),
    Trial("numdev report audited", 0, "PASS"),
    Trial("numdev effects demo --output effects", 0, "PASS"),
    Trial("numdev invariance demo --output invariance", 0, "PASS"),
    Trial("python from_demo.py", 0, ""),
    Trial("numdev logprobs rollout.jsonl trainer.jsonl --model demo --gate", 1, "FAIL"),
)


def main() -> None:
    """Tries the wheel; ends with 1 where a trial goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(
        dir=Path(sys.prefix).parent, prefix=".bare-"
    ) as name:
        bare = Path(name)
        count = install(options.wheel.resolve(), bare, extras=options.extras)
        folder = bare / "empty"
        folder.mkdir()
        for example in EXAMPLES:
            shutil.copy(ROOT / "examples" / example, folder)
        wrong = [problem for trial in TRIALS if (problem := tried(trial, bare, folder))]
    seconds = time.monotonic() - start
    about = f"Python {platform.python_version()}, {count} distributions"
    print(f"{options.wheel.name}: {about}, {len(TRIALS)} commands, {seconds:.0f} s")
    if wrong:
        sys.exit("\n".join(wrong))


def install(wheel: Path, bare: Path, *, extras: bool) -> int:
    """Fills a new environment; returns how many distributions stand beside the wheel's."""
    venv.create(bare, with_pip=False)
    (packages,) = bare.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(bare / "bin" / "python")]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True
    )
    (numdev,) = metadata.distributions(path=[str(packages)])
    for extra in numdev.metadata.get_all("Provides-Extra") if extras else ():
        for requirement in requirements(numdev, extra):
            assert met(requirement), f"extra {extra}: {requirement} is not met here"
    names = closure(numdev)
    for each in names:
        link(metadata.distribution(each), packages)
    subprocess.run([*pip, "check"], check=True)
    return len(names)


def tried(trial: Trial, bare: Path, folder: Path) -> str | None:
    """What is wrong with a trial; None where it is as it should be."""
    start = time.monotonic()
    done = subprocess.run(
        [bare / "bin" / trial.line.split()[0], *trial.line.split()[1:]],
        cwd=folder,
        env={
            "PATH": f"{bare / 'bin'}{os.pathsep}{os.defpath}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - start
    print(f"{seconds:5.1f} s  exit code {done.returncode}  {trial.line}", flush=True)
    if done.returncode == trial.code and trial.words in done.stdout:
        return None
    expected = f"expected exit code {trial.code} and {trial.words!r}"
    return f"{trial.line}: {expected}, got:\n{done.stdout}{done.stderr}"


def requirements(
    distribution: metadata.Distribution, extra: str = ""
) -> Iterator[Requirement]:
    """What it requires on this machine; with an extra, that extra's alone."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            if not extra:
                yield requirement
        elif extra and marker.evaluate({"extra": extra}):
            yield requirement


def met(requirement: Requirement) -> bool:
    """Whether it is installed here in a version that will do, or is for CUDA alone."""
    if requirement.name in ELSEWHERE:
        return True
    return metadata.version(requirement.name) in requirement.specifier


def closure(distribution: metadata.Distribution) -> list[str]:
    """The names of all that it requires without an extra, and that these require."""
    names: list[str] = []
    todo = list(requirements(distribution))
    while todo:
        requirement = todo.pop()
        name = metadata.distribution(requirement.name).name
        if name not in names:
            names.append(name)
            required = metadata.distribution(name)
            todo += [
                r for e in ("", *requirement.extras) for r in requirements(required, e)
            ]
    return names


def link(distribution: metadata.Distribution, packages: Path) -> None:
    """Its files in `packages`; scripts and other files outside of it are left out."""
    for file in distribution.files or ():
        if not file.parts[0].startswith(".."):
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            source = Path(str(distribution.locate_file(file)))
            if source.exists() and not target.exists():
                os.link(source, target)


if __name__ == "__main__":
    main()
