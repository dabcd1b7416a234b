"""Visible tests: `python check.py [MODULE...]` prints `MODULE ok` or `MODULE FAIL` for each module.

Runs many times per execution, so it imports almost nothing: `cases.py` is data, {module: (seconds, ((x, f(x)), ...))}.
"""

import sys
import time


def load(path: str) -> dict[str, object]:
    """The names a Python file defines."""
    names: dict[str, object] = {}
    with open(path) as file:
        exec(file.read(), names)
    return names


def passes(name: str, cases: tuple[tuple[int, int], ...]) -> bool:
    """Whether module `name` answers every case."""
    try:
        module = load(name + ".py")
        return all(eval(f"f({x})", module) == y for x, y in cases)
    except Exception:
        return False


tests = eval("tests", load("cases.py"))
for name in sys.argv[1:] or tests:
    if name in tests:
        seconds, cases = tests[name]
        time.sleep(seconds)
        print(name, "ok" if passes(name, cases) else "FAIL")
    else:
        print(name, "unknown")
