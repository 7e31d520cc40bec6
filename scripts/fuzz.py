"""Random damage to reports, rules and configurations, through the command line in this
process.

    python scripts/fuzz.py [--count 10000] [--seed 0]      a run; its summary as Markdown on stdout
    python scripts/fuzz.py --only gate --seed 1234         one input again

An input is a number, which seeds the choice of a target, a file and the damage. In every
case the exit code is 0 to 3 within `SECONDS` of processor time, nothing is written
outside the folder given, output has no control characters, pages and tables hold no
injected element, link or formula, and `gate` and `compare` accept no report that is
damaged, worse or not measured."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml

from numdev.report import io as io_of_reports
from numdev.report.io import with_digest

ROOT = Path(__file__).parent.parent
REPORTS = {
    p.stem: p for p in sorted((ROOT / "tests" / "data" / "reports").glob("*.json"))
}
SECONDS = 20
# An input that asks for more memory fails here, and not other processes
BYTES = 4 * 2**30
# Replaced by deep nesting, and by YAML aliases of aliases
DEEP, BOMB = "@deep@", "@bomb@"
HOSTILE = (
    *(
        "<fuzz0 onload=fuzz1>",
        "</td></svg><script>fuzz2()</script>",
        '" fuzz3="1',
        "' fuzz3='1",
    ),
    *(
        "\x1b[31mred\x1b[0m",
        "\x1b]8;;http://fuzz4\x07link\x1b]8;;\x07",
        "\x07\x08\x00",
        "\u202etxt",
    ),
    *("=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\n=1"),
    *("../../../fuzz5", "/tmp/fuzz6/x", "..", ".", "a/b", "con", "~root", "C:\\fuzz"),
    *(
        "{{ 7*7 }}{% raise %}",
        "[bold red]x[/]",
        "[/]",
        "[link=http://fuzz]",
        "%s%n",
        "${x}",
    ),
    *(
        "# fuzz",
        "[fuzz](http://fuzz)",
        "![x](y)",
        "a|b|c",
        "```",
        "- x",
        "1. x",
        "\n\n# fuzz\n",
    ),
    *("", " ", "長" * 50, "x" * 5000, "\ufeff", "\u2028", "NaN", "null", "🙂"),
)
OTHERS = (
    *(0, -1, 1, 2**31, 2**63, 10**30, -(10**400), 1e308, -1e308, 5e-324, 1e-12, 0.5, 1e6),
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        {"a": 1},
        math.nan,
        math.inf,
        -math.inf,
        DEEP,
        BOMB,
    ),
)
YAML_LINES = (
    "\tx: 1",
    "? [a]",
    "<<: *a",
    "!!python/object:os.system x",
    "%YAML 9",
    "a: b: c",
    "1: 2",
)
WORSE = {  # what makes a sound row one that no gate may accept
    "nonfinite": (1, 1000),
    "expected_ratio": (50.0, 1e300),
    "status": ("failed", "skipped"),
    "suspicion": ("the scale is twice what it should be",),
}
CELL = (
    "case",
    "module",
    "layer",
    "call",
    "phase",
    "seed",
    "head",
    "kernel",
    "format",
    "tensor",
)


class Broken(Exception):
    """An input with an effect that none may have."""


class Done(NamedTuple):
    """The outcome of a command."""

    code: int
    out: str
    err: str


def call(*arguments: str) -> Done:
    """Run `numdev` in this process. Raises Broken for a traceback, another exit code, an
    error of more than a line, or control characters."""
    from numdev.cli import main as cli

    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2)
    ]
    code: Any = 0
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            cli.main(list(arguments))
        except SystemExit as stop:
            code = stop.code or 0
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    if code not in (0, 1, 2, 3) or "a bug of numdev" in err or "Traceback" in err:
        raise Broken(f"exit code {code}: {err.strip()[:300]}")
    begun = ": started" in err.partition("\n")[0]
    if code in (2, 3) and not out and err.count("\n") != 1 + begun:
        raise Broken(f"not one line of error: {err[:200]!r}")
    text_is_safe(err)
    return Done(code, out, err)


# --- damage ---------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside JSON data."""
    for key, inner in list(
        value.items() if isinstance(value, dict) else enumerate(value)
    ):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutated(data: Any, rng: random.Random) -> Any:
    """The data with one to four places changed, removed or repeated; half of the time a
    text."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        every = list(places(data))
        texts = [(parent, key) for parent, key in every if isinstance(parent[key], str)]
        if texts and rng.random() < 0.5:
            parent, key = rng.choice(texts)
            parent[key] = rng.choice(HOSTILE)
        elif every:
            # By name first: a report has a thousand values in rows for each one
            # elsewhere.
            name = rng.choice(sorted({str(key) for _, key in every}))
            parent, key = rng.choice([place for place in every if str(place[1]) == name])
            source, at = rng.choice(every)
            match rng.randrange(5):
                case 0:
                    del parent[key]
                case 1 | 2:
                    parent[key] = rng.choice((*OTHERS, rng.choice(HOSTILE)))
                case 3:
                    parent[key] = json.loads(json.dumps(source[at]))
                case _ if isinstance(parent, list):
                    parent.insert(rng.randrange(len(parent) + 1), parent[key])
                case _:
                    parent[rng.choice(HOSTILE)] = parent[key]
    return data


def written(data: Any, rng: random.Random, *, as_yaml: bool = False) -> bytes:
    """The data as JSON or YAML, one time in twelve cut off or with one byte changed."""
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    if as_yaml and rng.random() < 0.7:
        lines = yaml.safe_dump(data, sort_keys=False).splitlines()
        if rng.random() < 0.3:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(YAML_LINES))
        text = "\n".join(lines)
        if f"'{BOMB}'" in text:  # ten lists of ten lists, ten deep
            layers = [
                f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 10)
            ]
            text = "\n".join(("x0: &x0 [1]", *layers, text.replace(f"'{BOMB}'", "*x9")))
    depth = rng.choice((20, 200, 2000, 50_000))
    raw = re.sub(f"[\"']{DEEP}[\"']", "[" * depth + "]" * depth, text)
    encoded = raw.encode("utf-8", "surrogatepass")
    if not as_yaml and rng.random() < 0.95:  # as if numdev had written it so
        encoded = with_digest(encoded)
    if rng.random() > 1 / 12:
        return encoded
    spot = rng.randrange(len(encoded))
    return encoded[:spot] + rng.choice((b"", rng.randbytes(1) + encoded[spot + 1 :]))


def report_of(kind: str) -> Any:
    report = json.loads(REPORTS[kind].read_text(encoding="utf-8"))
    del report["digest"]
    return report


def sound() -> Any:
    """The report of an audit that the default rules accept."""
    report = report_of("audit")
    plan = report["plan"]
    report["request"]["heads"] = plan["heads"] = None
    plan |= {"backward": False, "named": True, "repeats": 2}
    plan["kernels"] = [k for k in plan["kernels"] if not k["kernel"].startswith("bad:")]
    report["rows"] = [
        row
        for row in report["rows"]
        if row["tensor"] == "out" and not row["kernel"].startswith("bad:")
    ]
    for case in report["cases"]:
        case["heads"] = case["kv_heads"] = 2
    for row in report["rows"]:
        row["tensors"] = ["out"]
    names = {kernel["kernel"] for kernel in plan["kernels"]}
    request = report["request"]
    request["kernels"] = [k for k in request["kernels"] if k["name"] in names]
    request |= {"backward": False, "repeats": 2}
    report["doubts"] = []
    return concluded_again(report)


def concluded_again(report: dict[str, Any]) -> dict[str, Any]:
    """The report with the conclusions that numdev draws of its altered plan and rows; as
    it is where they are no report, or nothing can be concluded."""
    from numdev.gate.judging import judged as judged_anew
    from numdev.gate.rules import Rules
    from numdev.report_kinds import kind_of

    try:
        model = kind_of(report["kind"]).report
        again = judged_anew(
            model.model_validate_json(json.dumps(report), strict=True),
            Rules.model_validate(report["rules"]),
        )
        return json.loads(again.model_dump_json())
    except Exception:  # numdev promises nothing of reports that contradict themselves
        return report


def worsened(rng: random.Random) -> Any:
    """A sound report with one row that no gate may accept."""
    report = sound()
    key = rng.choice(list(WORSE))
    rng.choice(_kernels(report))[key] = rng.choice(WORSE[key])
    return report


def _kernels(report: Any) -> list[Any]:
    """The measured rows of kernels under audit."""
    rows = report["rows"]
    return [row for row in rows if row.get("role") == "kernel" and row["status"] == "ok"]


# --- what must hold -------------------------------------------------------------------

PAGE = """
    html head meta title style body main footer h1 h2 h3 p ul li b strong span br code details
    summary pre table thead tbody tr th td figure figcaption svg g line path rect circle text div
    @open @charset @name @content @http-equiv @lang @class @tabindex @role @aria-label @scope @title
    @viewbox @d @x @y @x1 @x2 @y1 @y2 @cx @cy @r @width @height @transform @text-anchor
    select option label section a @id @hidden @style @href h4 i
    button @type @data-markdown @data-curve @data-of @colspan @aria-hidden
"""
# A page's own
SCRIPT = Path(io_of_reports.__file__).parent / "renderers/templates/page.js"
OUR_PAGES = frozenset(PAGE.split())  # elements and attributes of our pages


def text_is_safe(text: str) -> None:
    if bad := [c for c in text if not c.isprintable() and c != "\n"]:
        raise Broken(f"control character {bad[0]!r} in the output")


def page_is_safe(page: str) -> None:
    page = page.replace(f"<script>{SCRIPT.read_text(encoding='utf-8')}</script>", "")

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if strange := {tag, *(f"@{name}" for name, _ in attrs)} - OUR_PAGES:
                raise Broken(f"in the page: {sorted(strange)}")

    Tags().feed(page)


def markdown_is_safe(text: str) -> None:
    text_is_safe(text)
    text = text.replace("<!-- -->", "")  # keeps emoji and mentions from beginning
    if bad := re.search(
        r"(?<!\\)(\\\\)*<|^#+ fuzz|(?<!\\)\]\(|(?<!\\)```", text, re.MULTILINE
    ):
        raise Broken(f"in Markdown: {text[bad.start() - 20 : bad.end() + 40]!r}")


def csv_is_safe(text: str) -> None:
    csv.field_size_limit(sys.maxsize)
    for cell in (
        cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row
    ):
        if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            try:
                float(cell)
            except ValueError:
                raise Broken(f"a formula in CSV: {cell[:40]!r}") from None


SHOWN: dict[str, Callable[[str], object]] = {
    "html": page_is_safe,
    "markdown": markdown_is_safe,
    "csv": csv_is_safe,
    "terminal": text_is_safe,
    "json": lambda text: json.loads(text, parse_constant=lambda name: 1 / 0),
}


def not_wrongly_accepted(raw: bytes) -> None:
    """Raises Broken for a report that no gate may accept, judged from its JSON alone."""
    report = json.loads(raw)
    measured = _kernels(report)
    wrong = {
        "another schema": report.get("schema_version") != 3,
        "no kernel was measured": not measured,
        "a head twice": len(
            {str([r.get(k) for k in (*CELL, "options")]) for r in measured}
        )
        < len(measured),
        "a kernel failed": any(
            r.get("role") == "kernel" and r["status"] == "failed" for r in report["rows"]
        ),
        "not finite, or not counted": any(r.get("nonfinite") != 0 for r in measured),
        "a different function": any(r.get("suspicion") for r in measured),
        "fifty times what is predicted": any(
            r["tensor"] == "out" and (r.get("expected_ratio") or 0) >= 50
            for r in measured
        ),
    }
    if broken := [words for words, holds in wrong.items() if holds]:
        raise Broken(f"passed: {', '.join(broken)}")


# --- targets: each runs one command on one damaged input, in the current folder -------


def fuzz_report(rng: random.Random) -> int:
    """A damaged report of any kind, shown in any form."""
    form = rng.choice(list(SHOWN))
    Path("report.json").write_bytes(
        written(mutated(report_of(rng.choice(list(REPORTS))), rng), rng)
    )
    done = call("report", "report.json", "--format", form)
    if done.code == 0:
        SHOWN[form](done.out)
    return done.code


def fuzz_gate(rng: random.Random) -> int:
    """A damaged or worsened report before the default rules, or before rules fitted to
    it."""
    raw = written(
        rng.choice((lambda: mutated(sound(), rng), lambda: worsened(rng)))(), rng
    )
    Path("report.json").write_bytes(raw)
    fitted = (
        rng.random() < 0.2
        and call("gate", "report.json", "--init", "-o", "fitted.yaml").code == 0
    )
    done = call(
        "gate", "report.json", *(("--thresholds", "fitted.yaml") if fitted else ())
    )
    text_is_safe(done.out)
    if fitted and done.code:
        raise Broken("the report does not pass rules fitted to it")
    if done.code == 0 and not fitted:
        not_wrongly_accepted(raw)
    return done.code


def fuzz_thresholds(rng: random.Random) -> int:
    """Damaged rules before a report of a wrong kernel, whose rows have a suspicion and
    errors of 300 times what is predicted: accepted only where no whole rule looks at
    either."""
    file = rng.choice(sorted((ROOT / "configs" / "gate").glob("*.yaml")))
    rules = mutated(yaml.safe_load(file.read_text(encoding="utf-8")), rng)
    Path("gate.yaml").write_bytes(written(rules, rng, as_yaml=True))
    done = call("gate", str(REPORTS["audit"]), "--thresholds", "gate.yaml")
    text_is_safe(done.out)
    if done.code:
        return done.code
    for rule in yaml.safe_load(Path("gate.yaml").read_bytes()).get("thresholds", ()):
        limit = rule.get("at_most", rule.get("below", math.inf))
        looks = rule["metric"] == "suspicion" or (
            rule["metric"] == "expected_ratio" and limit < 100
        )
        if looks and not set(rule) - {
            "name",
            "metric",
            "at_most",
            "below",
            "absent",
            "may_lack",
        }:
            raise Broken(f"passed: {rule}")
    return done.code


def fuzz_two(rng: random.Random) -> int:
    """A damaged or worsened report beside a sound one: `compare` shows that one is
    worse."""
    worse = rng.random() < 0.3
    raw = written(worsened(rng) if worse else mutated(sound(), rng), rng)
    Path("new.json").write_bytes(raw)
    Path("old.json").write_bytes(with_digest(json.dumps(sound()).encode()))
    done = call("compare", "old.json", "new.json", "-o", "out", "--overwrite")
    if done.code == 0 and worse:
        raise Broken("passed: the comparison does not show that one is worse")
    written_is_safe(Path("out"))
    text_is_safe(done.out)
    return done.code


def fuzz_config(rng: random.Random) -> int:
    """A damaged configuration, up to where measuring would begin."""
    from numdev.errors import MeasurementError
    from numdev.studies.audit import run

    command = rng.choice(("audit", "sweep", "train"))
    file = rng.choice(sorted((ROOT / "configs" / command).glob("*.yaml")))
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    data.pop("checkpoint", None)
    Path("config.yaml").write_bytes(written(mutated(data, rng), rng, as_yaml=True))
    stop = MeasurementError("nothing is measured here", hint="it is a fuzzer")
    with (
        mock.patch.object(run, "audit", side_effect=stop),
        mock.patch("numdev.studies.audit.sweep.estimate", side_effect=stop),
        mock.patch("numdev.studies.training.study.train", side_effect=stop),
    ):
        done = call(
            command,
            "config.yaml",
            *(["--dry-run"] if command == "sweep" else ["-o", "out"]),
        )
    text_is_safe(done.out)
    return done.code


def fuzz_bounds(rng: random.Random) -> int:
    """The bounds of a damaged training run, written as every result is."""
    Path("report.json").write_bytes(written(mutated(report_of("train"), rng), rng))
    done = call("bounds", "report.json", "-o", "out", "--overwrite")
    text_is_safe(done.out)
    written_is_safe(Path("out"))
    return done.code


def written_is_safe(folder: Path) -> None:
    for page in folder.glob("*.html"):
        page_is_safe(page.read_text(encoding="utf-8"))
    for table in folder.glob("*.csv"):
        csv_is_safe(table.read_text(encoding="utf-8"))


TARGETS: dict[str, Callable[[random.Random], int]] = {
    "report": fuzz_report,
    "gate": fuzz_gate,
    "thresholds": fuzz_thresholds,
    "two": fuzz_two,
    "config": fuzz_config,
    "bounds": fuzz_bounds,
}


def one(target: str, rng: random.Random, folder: Path) -> int:
    """The exit code of one input through one target, run in a folder inside `folder`.
    Raises Broken, also where it takes too long or writes elsewhere."""
    inside = folder / "a" / "b"
    inside.mkdir(parents=True, exist_ok=True)

    def late(*_: Any) -> None:
        raise Broken(f"takes more than {SECONDS} s")

    handler, before = signal.signal(signal.SIGPROF, late), Path.cwd()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        os.chdir(inside)
        code = TARGETS[target](rng)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        os.chdir(before)
    if strange := {
        path.name for path in (*folder.iterdir(), *inside.parent.iterdir())
    } - {
        "a",
        "b",
    }:
        raise Broken(f"written outside: {sorted(strange)}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Random damage through numdev.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", choices=list(TARGETS), help="one input of this target: the seed"
    )
    asked = parser.parse_args()
    resource.setrlimit(
        resource.RLIMIT_DATA, (BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1])
    )
    began, counts, broken = time.monotonic(), Counter[tuple[str, int]](), []
    for number in range(asked.seed, asked.seed + (1 if asked.only else asked.count)):
        rng = random.Random(number)
        target = asked.only or rng.choice(list(TARGETS))
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts[target, one(target, rng, Path(folder))] += 1
            except Exception as error:
                broken.append(f"- {target} {number}: {type(error).__name__}: {error}")
    print("| target | 0 | 1 | 2 | 3 |\n|---|---:|---:|---:|---:|")
    for target in TARGETS:
        print(
            f"| {target} |",
            " | ".join(str(counts[target, code]) for code in range(4)),
            "|",
        )
    total, seconds = counts.total() + len(broken), time.monotonic() - began
    print(
        f"\n{total} inputs in {seconds:.0f} s; {len(broken)} broke a rule.",
        *broken,
        sep="\n",
    )
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
