"""Plant the faults of tests/mutations.yaml, one at a time, and see which tests notice.

    python scripts/mutate.py --check               every fault can be planted, and compiles
    python scripts/mutate.py --baseline            the hinted tests, without a fault
    python scripts/mutate.py --jobs 16             all faults, each against its hinted tests
    python scripts/mutate.py gate holm             some: by area, by id, or by file or folder
    python scripts/mutate.py --rest gate           what no hinted test sees, against all others too
    python scripts/mutate.py --tests 'tests/test_*.py'     other tests than those hinted

Each fault gets a copy of the tree, compiled files included, and a pytest of its own, which
ends at the first test that fails: the working tree is never touched. A test that hangs notices, too. Prints each
fault with the test that caught it, and a table by area. The exit code is 0 where every
fault was caught.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = shutil.ignore_patterns(
    *(
        ".git",
        ".venv",
        ".*_cache",
        "numdev-reports",
        "*.egg-info",
        ".hypothesis",
        "shared",
    )
)
OUTCOMES = {0: "survived", 1: "caught"}
"""By pytest's exit code; above 1, where it was interrupted or collected nothing,
`broken`."""
Fault = dict[str, Any]


def main() -> int:
    """Run what the command line asks for; 0, or 1 where a fault was not caught or not
    planted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "which", nargs="*", metavar="NAME", help="ids, areas, folders  [all]"
    )
    parser.add_argument("--list", type=Path, default=ROOT / "tests/mutations.yaml")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time  [1]")
    parser.add_argument(
        "--tests", help="a pattern of test files, in place of those hinted"
    )
    parser.add_argument("--rest", action="store_true", help="then all other tests")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds for one fault  [900]"
    )
    parser.add_argument("--pytest", default="", help="further arguments of pytest")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument(
        "--check", action="store_true", help="plant and compile, run nothing"
    )
    parser.add_argument(
        "--baseline", action="store_true", help="run the hinted tests unchanged"
    )
    options = parser.parse_args()
    faults = chosen(
        yaml.safe_load(options.list.read_text(encoding="utf-8")), options.which
    )
    wrong = [problem for fault in faults if (problem := unplantable(fault))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if options.check or wrong:
        print(f"{len(faults) - len(wrong)} of {len(faults)} faults can be planted")
        return 1 if wrong else 0
    if options.baseline:
        files = dict.fromkeys(file for fault in faults for file in hinted(fault, options))
        faults = [{"id": file, "area": "no fault", "tests": [file]} for file in files]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda fault: tried(fault, options), faults):
            results.append(result)
            print(
                f"{result['id']:28} {result['by']:68} {result['seconds']:6.0f} s",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    wanted = "survived" if options.baseline else "caught"
    return int(any(result["outcome"] != wanted for result in results))


def chosen(faults: list[Fault], which: list[str]) -> list[Fault]:
    """Those with one of these ids or areas, or in one of these files or folders; or all.
    Exits for a name that none has."""

    def is_meant(fault: Fault, name: str) -> bool:
        file = Path(fault["file"])
        return name in (fault["id"], fault["area"]) or Path(name) in (file, *file.parents)

    if unknown := [name for name in which if not any(is_meant(f, name) for f in faults)]:
        sys.exit(f"no fault is called {', '.join(unknown)}")
    return [f for f in faults if not which or any(is_meant(f, name) for name in which)]


def unplantable(fault: Fault) -> str | None:
    """Why a fault cannot be planted in this tree; None where it can."""
    path, name = ROOT / fault["file"], f"{fault['id']}: {fault['file']}"
    if not path.is_file():
        return f"{name}: no such file"
    text = path.read_text(encoding="utf-8")
    count = len(spelling(fault["old"], text).findall(text))
    if count != 1 or fault["old"] == fault["new"]:
        return f"{name}: expected 1 place to plant it, got {count}: {fault['old']}"
    if path.suffix == ".py":
        try:
            ast.parse(planted(text, fault))
        except SyntaxError as error:
            return f"{name}: does not compile ({error})"
    lacking = [file for file in fault["tests"] if not (ROOT / file).is_file()]
    return f"{fault['id']}: no such tests: {lacking}" if lacking else None


def spelling(code: str, text: str) -> re.Pattern[str]:
    """A piece of code as it is in a file: to the letter, or laid out in other lines. Line
    ends, indentation, and the comma after the last of several are the formatter's."""
    if code in text:
        return re.compile(re.escape(code))
    pieces = [piece for piece in re.split(r"\s+|(?<=[(\[{])|(?=[)\]}])", code) if piece]
    spelt = re.escape(pieces[0])
    for piece in pieces[1:]:
        spelt += (r",?\s*" if piece[0] in ")]}" else r"\s*") + re.escape(piece)
    return re.compile(spelt)


def planted(text: str, fault: Fault) -> str:
    """The file with the fault in it."""
    return spelling(fault["old"], text).sub(lambda _: fault["new"], text)


def hinted(fault: Fault, options: argparse.Namespace) -> list[str]:
    """The test files to run, from the root of the tree."""
    if options.tests is None:
        return list(fault["tests"])
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(options.tests))


def tried(fault: Fault, options: argparse.Namespace) -> dict[str, Any]:
    """One fault in a copy of the tree: its outcome, by which test, and what pytest said
    last."""
    start = time.monotonic()
    first = hinted(fault, options)
    others = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/test_*.py"))
    rounds = (
        [first, [file for file in others if file not in first]]
        if options.rest
        else [first]
    )
    with tempfile.TemporaryDirectory(
        prefix="numdev-mutate-", ignore_cleanup_errors=True
    ) as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=SKIPPED, symlinks=True)
        if "file" in fault:
            path = tree / fault["file"]
            text = path.read_text(encoding="utf-8")
            path.write_text(planted(text, fault), encoding="utf-8")
        for files in rounds:
            code, output = tested(tree, files, options)
            if code != 0:
                break
    outcome = "caught" if code is None else OUTCOMES.get(code, "broken")
    failed = re.search(
        r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", output, re.MULTILINE
    )
    by = (
        "timeout"
        if code is None
        else failed[1]
        if code == 1 and failed
        else outcome.upper()
    )
    last = output.strip().splitlines()[-12:] if outcome != "survived" else []
    seconds = round(time.monotonic() - start, 1)
    named = {"id": fault["id"], "area": fault["area"]}
    return {**named, "outcome": outcome, "by": by, "seconds": seconds, "said": last}


def tested(
    tree: Path, files: Sequence[str], options: argparse.Namespace
) -> tuple[int | None, str]:
    """pytest's exit code, None where it hung, and all that it said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [
        "-m",
        "not gpu and not thorough",
        "--basetemp",
        f"{tree}.tmp",
        *shlex.split(options.pytest),
        *files,
    ]
    alone = {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # No pipe: what a test leaves behind would keep it open
    log = tree.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | alone, stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        code: int | None = process.wait(options.limit)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Caught, survived and broken by area, and in all; the names of what was not
    caught."""
    lines = [f"{'area':16}{'faults':>8}{'caught':>8}  not caught"]
    areas = dict.fromkeys(result["area"] for result in results)
    for area, of_area in [
        *((a, [r for r in results if r["area"] == a]) for a in areas),
        ("", results),
    ]:
        count = Counter(result["outcome"] for result in of_area)
        left = [
            f"{r['id']} ({r['outcome']})"
            for r in of_area
            if area and r["outcome"] != "caught"
        ]
        lines.append(
            f"{area or 'all':16}{len(of_area):8}{count['caught']:8}  {', '.join(left)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
