"""What a user's Python file has, and what is wrong with it, in words. A file is parsed
here, never run."""

from __future__ import annotations

import ast
import os
import traceback
from pathlib import Path

from numdev.errors import UsageError, one_line, why_no_file

MOST_NAMED = 8  # functions of a file that a message names


def functions_in(file: Path) -> list[str]:
    """Returns the public functions that a file defines at its top level, in its order,
    each with the names of its parameters: `attend(q, k, *, scale)`. Names that begin with
    an underscore are left out. Raises UsageError for a file that cannot be read, and for
    what is not valid Python."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in parsed_file(file).body if isinstance(node, kinds)]
    return [_signature(f) for f in functions if not f.name.startswith("_")]


def parsed_file(file: Path) -> ast.Module:
    """Returns the syntax tree of a Python file. Raises UsageError for a file that cannot
    be read, and for what is not valid Python, or is too deep for Python's parser."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"{file}: not valid Python ({one_line(error)})"
        raise UsageError(
            why_not_imported(error) if names_place(error) else what
        ) from error


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns a function's name with the names of its parameters, without defaults and
    types: `attend(q, k, *, scale, **options)`."""
    a = function.args
    stars = [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
    named = [*(x.arg for x in (*a.posonlyargs, *a.args)), *stars]
    named += [x.arg for x in a.kwonlyargs] + ([f"**{a.kwarg.arg}"] if a.kwarg else [])
    return f"{function.name}({', '.join(named)})"


def no_function_named(file: str) -> UsageError:
    """Returns the error for a Python file where one of its functions is expected: its
    hint has the first MOST_NAMED of them and how many more there are, or says that there
    is none. Where no such file exists, the error says that. Raises UsageError for a file
    that cannot be read, and for what is not valid Python."""
    if not os.path.isfile(file):
        return UsageError(f"{file}: {why_no_file(file)}")
    functions = functions_in(Path(file))
    words = ", ".join(functions[:MOST_NAMED])
    if len(functions) > MOST_NAMED:
        words += f" and {len(functions) - MOST_NAMED} more"
    return UsageError(
        f"{file}: expected {file}:FUNCTION, got no function",
        hint=f"it has {words}" if words else "it defines none",
    )


def names_place(error: BaseException) -> bool:
    """Whether an error is a SyntaxError with its file and line: that of a null byte has
    neither."""
    return isinstance(error, SyntaxError) and bool(error.filename and error.lineno)


def why_not_imported(error: BaseException) -> str:
    """Returns why Python cannot import a file. Of a SyntaxError: `a.py, line 3: not valid
    Python (invalid syntax): x = = 1`. Of any other exception, and of a SyntaxError that
    names no line: its message in one line, and in brackets the innermost file and line of
    its traceback outside numdev and importlib, if there is one."""
    if isinstance(error, SyntaxError) and names_place(error):
        text = f": {error.text.strip()}" if error.text else ""
        where = f"{_shown(str(error.filename))}, line {error.lineno}"
        return f"{where}: not valid Python ({error.msg}){text}"
    frames = traceback.extract_tb(error.__traceback__)
    files = [f for f in frames if not f.filename.startswith("<") and _is_foreign(f)]
    place = f" ({_shown(files[-1].filename)}, line {files[-1].lineno})" if files else ""
    return one_line(error) + place


def _is_foreign(frame: traceback.FrameSummary) -> bool:
    """Whether a frame's file lies outside numdev's package, and not directly in a folder
    called `importlib`."""
    path = Path(frame.filename)
    return path.parent.name != "importlib" and not path.is_relative_to(
        Path(__file__).parent.parent
    )


def _shown(filename: str) -> str:
    """Returns a path relative to the current folder where it lies below that; any other
    as it is."""
    path, folder = Path(filename), Path(os.getcwd())
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else filename
