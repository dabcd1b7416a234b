"""Hidden tests: `python evaluate.py WORKSPACE CASES` prints one JSON line with score and evidence.

Every module runs in a child process of its own with a time limit, so one that hangs, exits or prints costs only its own
cases. A child is told inputs and answers with outputs; the expected values stay in the parent.
"""

import json
import os
import signal
import sys
from typing import Any, NoReturn

MODULE_SECONDS = 5


def outputs(path: str, inputs: list[int]) -> list[Any]:
    """f(x) for each input, or None where the module does not give one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(path, inputs, reader, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    try:
        got = json.loads(text)
    except ValueError:
        got = []
    return got if isinstance(got, list) and len(got) == len(inputs) else [None] * len(inputs)


def _answer(path: str, inputs: list[int], reader: int, writer: int) -> NoReturn:
    os.close(reader)
    signal.alarm(MODULE_SECONDS)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        module: dict[str, Any] = {}
        with open(path) as file:
            exec(file.read(), module)
        results = [module["f"](x) for x in inputs]
        os.write(writer, json.dumps(results).encode())
    finally:
        os._exit(0)


def main(workspace: str, cases_path: str) -> None:
    with open(cases_path) as file:
        cases = json.load(file)
    gained = broken = wanted = 0
    evidence = []
    for name, case in cases.items():
        got = outputs(os.path.join(workspace, name + ".py"), [x for x, _ in case["cases"]])
        passed = sum(type(a) is int and a == y for a, (_, y) in zip(got, case["cases"], strict=True))
        evidence.append(f"{name} {passed}/{len(got)}" + " given" * case["written"])
        if case["written"]:
            broken += len(got) - passed
        else:
            gained += passed
            wanted += len(got)
    print(json.dumps({"score": max(0.0, (gained - broken) / wanted), "evidence": ", ".join(evidence)}))


main(*sys.argv[1:])
