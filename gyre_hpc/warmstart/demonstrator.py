"""Scripted demonstrations: the real reference harness with a noisy script where the model sits.

The harness's own code makes the message flow (tools, sub-agents, summaries); every prompt goes through the gateway's
`Rendering` (fresh render, then bridge), so a demonstration has the very ids that a policy meets in a run. The shell is an
in-process twin of the few commands the script uses; a test compares it with a real `bash`. Format is always right;
decisions are wrong as often as `Noise` says, which leaves room for reinforcement learning.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from gyre_hpc.executions.patchkit.family import (
    CONSTANTS,
    PHRASES,
    VISIBLE_INPUTS,
    Module,
    PatchkitTask,
    apply,
)
from gyre_hpc.executions.reference_harness.agent import ChatCompletions, Json, Tool, Turn, main_agent
from gyre_hpc.gateway.rendering import Rendering

ATTEMPTS = 3
"""Edits a sub-agent tries at most; with reading, checking and the verdict it stays inside its turn limit."""
MAIN_TURNS = 64


@dataclass(frozen=True)
class Noise:
    """Probability of the right decision at each place."""

    operator: float
    constant: float
    verify: float
    retry: float
    again: float
    """Delegate a module once more after `failed`."""
    go_on: float
    pick: float
    keep: float
    """Name a module that is left in the summary."""


NOISY = Noise(operator=0.65, constant=0.7, verify=0.6, retry=0.3, again=0.2, go_on=0.75, pick=0.85, keep=0.8)
"""Its own mean score is 0.32 at 9 calls an execution; a demonstrator that is always right takes 13."""
CLEAN = Noise(*[1.0] * 8)
CLUMSY = replace(CLEAN, operator=0.6, constant=0.7)
"""Right about everything but edits: shows what follows a failed check."""


@dataclass
class Transcript:
    """One context window: all ids, and which of them the model produced."""

    role: str
    ids: list[int]
    mask: list[int]


class EmulatedShell:
    """What `sh check`, `cat` and the line-3 `sed` print and do in a patchkit workspace, without processes."""

    def __init__(self, task: PatchkitTask) -> None:
        self.modules = {m.name: m for m in task.modules}
        self.bodies = {m.name: (m.operator, m.constant) if m.written else None for m in task.modules}

    def passes(self, name: str) -> bool:
        """Whether the module's visible cases hold."""
        body, module = self.bodies[name], self.modules[name]
        return body is not None and all(
            apply(body[0], x, body[1]) == module.expected(x) for x in VISIBLE_INPUTS
        )

    def __call__(self, command: str) -> str:
        program, *arguments = command.split()
        if program == "sh":
            names = arguments[1:] or list(self.modules)
            return "\n".join(f"{name} {'ok' if self.passes(name) else 'FAIL'}" for name in names)
        if program == "cat":
            return self._source(self.modules[arguments[0].removesuffix(".py")])
        edit = re.fullmatch(r"sed -i '3s/\.\*/    return x (.) (\d)/' (\w+)\.py", command)
        assert edit is not None, command
        self.bodies[edit[3]] = (edit[1], int(edit[2]))
        return ""

    def _source(self, module: Module) -> str:
        body = self.bodies[module.name]
        line = "None" if body is None else f"x {body[0]} {body[1]}"
        return f"# {module.phrase} {module.constant}\ndef f(x):\n    return {line}"


@dataclass
class _Window:
    """A context window under way: the messages behind `prompt`, and the answer to it."""

    role: str
    messages: list[Json]
    prompt: list[int]
    output: list[int]
    mask: list[int] = field(default_factory=list)


class Demonstrator:
    """Sits where the model sits: decides by script, renders as the gateway does, keeps the windows."""

    def __init__(self, task: PatchkitTask, rendering: Rendering, noise: Noise, draw: random.Random) -> None:
        self.task, self.rendering, self.noise, self.draw = task, rendering, noise, draw
        self.modules = {m.name: m for m in task.modules}
        self.left: list[str] | None = None
        self.target = ""
        self.helper: Generator[Json, str] | None = None
        self.windows: list[_Window] = []
        self.calls = 0

    @property
    def dialect(self) -> ChatCompletions:
        """The dialect whose messages the renderer reads."""
        return ChatCompletions()

    def complete(self, role: str, system: str, history: list[Json], tools: list[Tool]) -> Turn:
        """The next turn, recorded."""
        body = self.dialect.body(system, history, tools)
        message = self._decide(role, history)
        self._record(role, body["messages"], body["tools"], message)
        return self.dialect.turn({"choices": [{"message": message}]})

    # ---- decisions ----

    def _decide(self, role: str, history: list[Json]) -> Json:
        last = history[-1]["content"]
        if role == "sub-agent":
            if len(history) == 1:
                self.helper = self._fix(last.removeprefix("fix "))
                return next(self.helper)
            assert self.helper is not None
            return self.helper.send(last)
        if role == "main-summary":
            self._observe(history[-2]["content"])
            return self._summary()
        if history[-1]["role"] == "tool":
            self._observe(last)
        return self._lead()

    def _right(self, probability: float) -> bool:
        return self.draw.random() < probability

    def _lead(self) -> Json:
        if self.left is None:
            return self._call("bash", command="sh check")
        if not self.left or not self._right(self.noise.go_on):
            return {"role": "assistant", "content": "finished"}
        self.target = self.left[0] if self._right(self.noise.pick) else self.draw.choice(list(self.modules))
        return self._call("task", prompt=f"fix {self.target}")

    def _observe(self, result: str) -> None:
        if self.left is None:
            self.left = re.findall(r"(\w+) FAIL", result)
        elif self.target in self.left and not (result.startswith("failed") and self._right(self.noise.again)):
            self.left.remove(self.target)

    def _summary(self) -> Json:
        self.left = [name for name in self.left or [] if self._right(self.noise.keep)]
        return {"role": "assistant", "content": "left: " + (" ".join(self.left) or "none")}

    def _fix(self, name: str) -> Generator[Json, str]:
        """One sub-agent: read, edit, check, verdict."""
        yield self._call("bash", command=f"cat {name}.py")
        for _ in range(ATTEMPTS):
            operator, constant = self._guess(self.modules[name])
            yield self._call("bash", command=f"sed -i '3s/.*/    return x {operator} {constant}/' {name}.py")
            if not self._right(self.noise.verify):
                break
            result = yield self._call("bash", command=f"sh check {name}")
            if result.endswith("ok"):
                break
            if not self._right(self.noise.retry):
                yield {"role": "assistant", "content": f"failed {name}"}
        yield {"role": "assistant", "content": f"done {name}"}

    def _guess(self, module: Module) -> tuple[str, int]:
        operator, constant = module.operator, module.constant
        if not self._right(self.noise.operator):
            operator = self.draw.choice([o for o in PHRASES if o != operator])
        if not self._right(self.noise.constant):
            constant = self.draw.choice([c for c in CONSTANTS if c != constant])
        return operator, constant

    def _call(self, name: str, **arguments: str) -> Json:
        self.calls += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{self.calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    # ---- recording ----

    def _record(self, role: str, messages: list[Json], tools: list[Json], message: Json) -> None:
        output = self.rendering.turn(message)
        assert output is not None, message
        for window in reversed(self.windows):
            known = len(window.messages)
            if messages[:known] == window.messages:
                prompt = self.rendering.bridge(window.prompt, window.output, messages[known:], tools)
                assert prompt is not None
                window.mask += [0] * (len(prompt) - len(window.mask)) + [1] * len(output)
                window.messages, window.prompt, window.output = [*messages, message], prompt, output
                return
        prompt = self.rendering.render(messages, tools)
        mask = [0] * len(prompt) + [1] * len(output)
        self.windows.append(_Window(role, [*messages, message], prompt, output, mask))


def demonstrate(
    task: PatchkitTask, rendering: Rendering, noise: Noise, draw: random.Random
) -> list[Transcript]:
    """All context windows of one demonstrated execution, in the order they opened."""
    demonstrator = Demonstrator(task, rendering, noise, draw)
    main_agent(demonstrator, EmulatedShell(task), MAIN_TURNS).run(task.instruction)
    return [Transcript(w.role, [*w.prompt, *w.output], w.mask) for w in demonstrator.windows]
