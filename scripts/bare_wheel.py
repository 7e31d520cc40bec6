"""The wheel, installed where nothing else is: `make wheel` builds it and runs this.

    python scripts/bare_wheel.py numdev-0.1.0-py3-none-any.whl

A new environment gets the wheel and what its metadata requires, no more: hard links to
the distributions of the environment that runs this, since unpacking torch again takes a
minute. There `pip check` has to agree, and the console script to work from an empty
folder. What each extra requires has to be met by what is installed here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ELSEWHERE = {"flash-attn", "flashinfer-python"}  # for CUDA alone
COMMANDS = (
    ("--help",),
    ("kernels",),
    ("audit", "demo", "--layers", "0", "--output", "audited"),
    ("gate", "audited"),
)


def main(wheel: str) -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(
        dir=Path(sys.prefix).parent, prefix=".bare-"
    ) as name:
        bare = Path(name)
        venv.create(bare, with_pip=False)
        (packages,) = bare.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(bare / "bin" / "python")]
        subprocess.run(
            [*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True
        )
        (numdev,) = metadata.distributions(path=[str(packages)])
        for extra in numdev.metadata.get_all("Provides-Extra"):
            for requirement in requirements(numdev, extra):
                assert met(requirement), f"extra {extra}: {requirement} is not met here"
        names = closure(numdev)
        for each in names:
            link(metadata.distribution(each), packages)
        subprocess.run([*pip, "check"], check=True)
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "OMP_NUM_THREADS": "1"
        }
        for command in COMMANDS:
            print("numdev", *command, flush=True)
            call = [bare / "bin" / "numdev", *command]
            subprocess.run(
                call, cwd=bare, env=clean, stdout=subprocess.DEVNULL, check=True
            )
    seconds = time.monotonic() - start
    print(f"{Path(wheel).name} works beside {len(names)} distributions; {seconds:.0f} s")


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
            found = metadata.distribution(name)
            todo += [r for e in ("", *requirement.extras) for r in requirements(found, e)]
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
    main(sys.argv[1])
