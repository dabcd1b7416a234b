"""The harness of paced runs: a program that calls a model and works with tools for a drawn time. Standard library only.

    python3 -I -S scripted_agent.py --base-url URL --workspace DIR --instruction "Task 17" --seed 4 --answer-tokens N
        --mean S --task-sigma X --execution-sigma Y --tokens-per-s R --turn-s S     (or --calls N --context-words W)

Everything is drawn from (task, seed), nothing from what the model says: length log-normal with a share common to the
task and one of its own, split into turns of one model call and one tool pause. It knows no limit: executions drawn
beyond the harness limit end there together, as real time-outs cluster. `--lengths FILE` takes recorded lengths instead of
drawn ones: a JSON list with one list of seconds per query. With `--calls` there are no pauses: after one short
call as the main agent come calls as a sub-agent on a context of W words that no other execution shares. The score is drawn
too, and written first, so that an execution cut short is scored. Exit codes: 0 done, 3 the endpoint kept failing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import string
import sys
import time
from pathlib import Path
from typing import Any

SCORE_FILE = "score.json"
SYSTEM = "Work in small steps."
PAUSE_SIGMA = 0.8
"""Log-normal spread of the tool pauses of one execution."""
ATTEMPTS, BACK_OFF_S, READ_TIMEOUT_S = 6, 0.5, 120


def draw_seconds(task: int, seed: int, mean: float, task_sigma: float, execution_sigma: float) -> float:
    """Length of an execution on an engine at nominal speed; log-normal with this mean over tasks and executions."""
    common = random.Random(f"task {task}").gauss(0.0, task_sigma)
    own = random.Random(f"task {task} seed {seed}").gauss(0.0, execution_sigma)
    return mean * math.exp(common + own - (task_sigma**2 + execution_sigma**2) / 2)


def recorded_seconds(task: int, seed: int, queries: list[list[float]]) -> float:
    """Length of a recorded execution: each epoch of tasks meets every query once, in an order of its own."""
    epoch, place = divmod(task, len(queries))
    order = list(range(len(queries)))
    random.Random(f"epoch {epoch}").shuffle(order)
    members = queries[order[place]]
    return members[seed % len(members)]


def draw_score(task: int, seed: int) -> float:
    """Uniform, so the members of a group differ."""
    return round(random.Random(f"score of task {task} seed {seed}").random(), 6)


def draw_pauses(task: int, seed: int, seconds: float, turn_s: float, call_s: float) -> list[float]:
    """Tool pause of each turn: as many turns as fit, pauses log-normal, calls and pauses together `seconds`."""
    turns = max(1, round(seconds / turn_s))
    draw = random.Random(f"pauses of task {task} seed {seed}")
    weights = [draw.lognormvariate(0.0, PAUSE_SIGMA) for _ in range(turns)]
    left = max(0.0, seconds - turns * call_s)
    return [left * weight / sum(weights) for weight in weights]


def draw_calls(task: int, seed: int, mean: int) -> int:
    """Calls of an execution without pauses: from 1 to 2 * mean - 1, so that those of a burst end one by one."""
    return random.Random(f"calls of task {task} seed {seed}").randint(1, 2 * mean - 1)


def draw_context(task: int, seed: int, words: int) -> str:
    """Words of four letters."""
    draw = random.Random(f"context of task {task} seed {seed}")
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(words))


class Client:
    """OpenAI Chat Completions over one kept-alive connection."""

    def __init__(self, base_url: str, answer_tokens: int) -> None:
        address, _, prefix = base_url.rstrip("/").removeprefix("http://").partition("/")
        self.path = (f"/{prefix}" if prefix else "") + "/v1/chat/completions"
        self.answer_tokens = answer_tokens
        self.headers = {"content-type": "application/json"}
        self.connection = http.client.HTTPConnection(address, timeout=READ_TIMEOUT_S)

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant message. Raises ConnectionError when the endpoint kept failing."""
        body = json.dumps({"model": "policy", "max_tokens": self.answer_tokens, "messages": messages})
        cause = ""
        for attempt in range(ATTEMPTS):
            try:
                self.connection.request("POST", self.path, body, self.headers)
                response = self.connection.getresponse()
                text = response.read().decode()
                if response.status == 200:
                    return dict(json.loads(text)["choices"][0]["message"])
                cause = f"{response.status} {text[:200]}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.connection.close()
                cause = str(error)
            time.sleep(BACK_OFF_S * 2**attempt)
        raise ConnectionError(f"{self.path}: {cause}")


def work(options: argparse.Namespace) -> None:
    """One execution."""
    task = int(options.instruction.split()[-1])
    Path(options.workspace, SCORE_FILE).write_text(
        json.dumps({"score": draw_score(task, options.seed)}) + "\n"
    )
    client = Client(options.base_url, options.answer_tokens)
    (call_on_and_on if options.calls else work_and_pause)(client, task, options)


def call_on_and_on(client: Client, task: int, options: argparse.Namespace) -> None:
    """One short call, then long ones without a pause."""
    client.headers["x-agent-role"] = "main"
    client.answer([{"role": "user", "content": options.instruction}])
    client.headers["x-agent-role"] = "sub-agent"
    context = draw_context(task, options.seed, options.context_words)
    messages: list[dict[str, Any]] = [{"role": "system", "content": context}]
    for turn in range(draw_calls(task, options.seed, options.calls)):
        messages.append({"role": "user", "content": f"Step {turn}."})
        messages.append(client.answer(messages))


def work_and_pause(client: Client, task: int, options: argparse.Namespace) -> None:
    """Turns of a call and a pause for the drawn time."""
    if options.lengths:
        seconds = recorded_seconds(task, options.seed, json.loads(Path(options.lengths).read_text()))
    else:
        seconds = draw_seconds(task, options.seed, options.mean, options.task_sigma, options.execution_sigma)
    call_s = options.answer_tokens / options.tokens_per_s
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": options.instruction},
    ]
    for turn, pause in enumerate(draw_pauses(task, options.seed, seconds, options.turn_s, call_s)):
        messages.append(client.answer(messages))
        time.sleep(pause)
        messages.append({"role": "user", "content": f"Step {turn} took {pause:.2f} s."})


def main(arguments: list[str]) -> int:
    """Run one execution; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--workspace", required=True)
    parser.add_argument("--instruction", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--answer-tokens", type=int, required=True)
    for name in ("mean", "task-sigma", "execution-sigma", "tokens-per-s", "turn-s"):
        parser.add_argument(f"--{name}", type=float, default=1.0)
    parser.add_argument("--lengths", default="")
    for name in ("calls", "context-words"):
        parser.add_argument(f"--{name}", type=int, default=0)
    try:
        work(parser.parse_args(arguments))
    except ConnectionError as error:
        sys.stderr.write(f"endpoint unavailable: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
