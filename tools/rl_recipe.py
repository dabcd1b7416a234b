"""Try an RL recipe in one process: real bash workspaces and the project's own engine, trees, selection and trainer.

    python tools/rl_recipe.py --seed 1 --steps 30 --evaluate-every 10 objective.kind=grpo \\
        objective.clip_low=0.2 objective.clip_high=0.28 objective.replay_weight=0.1 objective.replay_tokens=1500 \\
        trainer.learning_rate=5e-4 gateway.max_calls=40 gateway.max_sampled_tokens=400

What is left out against a run: cells, schedule, gateway HTTP and sandbox. The harness's agent runs in threads. Prints one
JSON line per step and evaluation. Default tasks are for tuning: held-out 700000.., training 2000000.. (by seed).
Trailing KEY=VALUE arguments override conf keys, as in `gyre train`.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from gyre_hpc.config import RunConfig, to_run_config
from gyre_hpc.engines.torch.batching import Batcher, Call
from gyre_hpc.engines.torch.model import Qwen3
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.executions.patchkit.family import PatchkitFamily, PatchkitTask
from gyre_hpc.executions.reference_harness.agent import (
    ChatCompletions,
    Json,
    Refused,
    Tool,
    Turn,
    bash,
    main_agent,
)
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.models.shape import read_shape
from gyre_hpc.records import CallRecord, Delivery, ExecutionId, FinishReason, GroupId, LeafRole
from gyre_hpc.training.trainer import Trainer
from gyre_hpc.trajectories.process import Attempt, Settings, process_group
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.trajectories.tree import build_tree

ROOT = Path(__file__).parents[1]
EDIT = re.compile(r"return x (.) (\d)/' (\w+)\.py")
TUNING_HELDOUT, TUNING_TRAIN = 700_000, 2_000_000


class Engine:
    """The torch engine, stepped by the main thread; agents submit from theirs."""

    def __init__(self, model_dir: Path, run: RunConfig, capacity: int, seed: int) -> None:
        self.model = Qwen3(read_shape(model_dir), run.model.max_context)
        self.waiting: queue.SimpleQueue[tuple[Call, Future[Call]]] = queue.SimpleQueue()
        self.futures: dict[str, Future[Call]] = {}
        self.batcher = Batcher(
            self.model,
            page_tokens=run.engine.page_tokens,
            pool_tokens=run.engine.pool_tokens,
            capacity=capacity,
            max_context=run.model.max_context,
            version="0",
            seed=seed,
            on_finish=lambda call: self.futures.pop(call.rid).set_result(call),
        )
        self.version = 0
        self.load(read_weights(model_dir), 0)

    def load(self, arrays: dict[str, np.ndarray], version: int) -> None:  # type: ignore[type-arg]
        self.model.load(arrays, f"version {version}")
        self.batcher.set_version(str(version), flush=True)
        self.version = version

    def generate(self, rid: str, prompt: list[int], budget: int, stop: tuple[int, ...]) -> Call:
        """Called by an agent's thread; returns the finished call."""
        call = Call(rid, list(prompt), budget, namespace=f"v{self.version}", stop_ids=frozenset(stop))
        future: Future[Call] = Future()
        self.waiting.put((call, future))
        return future.result()

    def serve(self, done: threading.Event) -> None:
        """Step until `done`."""
        while not done.is_set():
            idle = not self.batcher.running and not self.batcher.waiting
            while True:
                try:
                    call, future = self.waiting.get(timeout=0.02) if idle else self.waiting.get_nowait()
                except queue.Empty:
                    break
                idle = False
                self.futures[call.rid] = future
                self.batcher.submit(call)
            if not idle:
                self.batcher.step()


@dataclass
class Window:
    messages: list[Json]
    prompt: list[int]
    output: list[int]


@dataclass
class Recorder:
    """Where the gateway sits: renders, generates, parses, records, keeps budgets."""

    engine: Engine
    rendering: Rendering
    run: RunConfig
    execution: int
    windows: list[Window] = field(default_factory=list)
    records: list[CallRecord] = field(default_factory=list)
    refused: str = ""

    @property
    def dialect(self) -> ChatCompletions:
        return ChatCompletions()

    @property
    def sampled(self) -> int:
        return sum(len(record.output_ids) for record in self.records)

    def complete(self, role: str, system: str, history: list[Json], tools: list[Tool]) -> Turn:
        body = self.dialect.body(system, history, tools)
        messages = body["messages"]
        window, prompt = self._prompt(messages, body["tools"])
        budget = self._budget(len(prompt))
        call = self.engine.generate(
            f"{self.execution}-{len(self.records)}", prompt, budget, self.rendering.stop_ids
        )
        output = call.ids[call.prompt_tokens :]
        message = self._message(output, body["tools"])
        window.messages, window.prompt, window.output = [*messages, message], prompt, output
        self._record(role, prompt, output, call)
        return self.dialect.turn({"choices": [{"message": message}]})

    def _prompt(self, messages: list[Json], tools: list[Json]) -> tuple[Window, list[int]]:
        for window in reversed(self.windows):
            known = len(window.messages)
            if messages[:known] == window.messages:
                prompt = self.rendering.bridge(window.prompt, window.output, messages[known:], tools)
                if prompt is not None:
                    return window, prompt
        self.windows.append(Window([], [], []))
        return self.windows[-1], self.rendering.render(messages, tools)

    def _budget(self, prompt_tokens: int) -> int:
        gateway, left = self.run.gateway, self.run.model.max_context - prompt_tokens
        if gateway.max_calls and len(self.records) >= gateway.max_calls:
            self.refused = "calls"
        elif gateway.max_sampled_tokens and self.sampled >= gateway.max_sampled_tokens:
            self.refused = "tokens"
        elif left < 1:
            self.refused = "context"
        if self.refused:
            raise Refused(self.refused)
        budget = min(left, gateway.max_output_tokens)
        return (
            min(budget, gateway.max_sampled_tokens - self.sampled) if gateway.max_sampled_tokens else budget
        )

    def _message(self, output: list[int], tools: list[Json]) -> Json:
        answer = self.rendering.parse(output, tools)
        message: Json = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{self.execution}_{len(self.records)}_{index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(answer.tool_calls)
            ]
        return message

    def _record(self, role: str, prompt: list[int], output: list[int], call: Call) -> None:
        now = time.time()
        self.records.append(
            CallRecord(
                call=call.rid,
                execution=ExecutionId(self.execution),
                attempt=0,
                ordinal=len(self.records),
                prompt_ids=np.array(prompt, np.int32),
                output_ids=np.array(output, np.int32),
                logprobs=np.array(call.logprobs, np.float32),
                versions=np.full(len(output), self.engine.version, np.int32),
                finish=FinishReason.LENGTH if str(call.finish) == "length" else FinishReason.STOP,
                delivery=Delivery.COMPLETE,
                accepted=True,
                constrained=False,
                role_hint=LeafRole(role),
                started=now,
                finished=now,
                held_s=0.0,
                recomputed_tokens=0,
                dialect="openai-chat",
            )
        )


@dataclass
class Outcome:
    task: PatchkitTask
    score: float
    recorder: Recorder
    seconds: float
    last: str


def execute(task: PatchkitTask, recorder: Recorder, turns: int) -> Outcome:
    """One execution in a real folder with real commands."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        workspace, hidden = Path(name, "workspace"), Path(name, "hidden")
        workspace.mkdir()
        hidden.mkdir()
        task.prepare(workspace)
        try:
            last = main_agent(recorder, partial(bash, str(workspace)), turns).run(task.instruction)
        except Refused as refusal:
            last = f"refused {refusal}"
        task.hidden(hidden)
        command = [part.format(workspace=workspace) for part in task.evaluator(hidden)]
        answer = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return Outcome(task, json.loads(answer.stdout)["score"], recorder, time.monotonic() - started, last)


class Recipe:
    """Rollouts, steps and evaluations of one configuration."""

    def __init__(self, run: RunConfig, model_dir: Path, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.rendering = Rendering(model_dir, run.model.renderer, run.model.thinking)
        self.width = run.schedule.batch_groups * run.schedule.executions_per_group
        self.engine = Engine(model_dir, run, self.width, run.seed)
        self.trainer = Trainer(model_dir, run.trainer, run.objective, seed=run.seed)
        self.family = PatchkitFamily(run.tasks.max_modules)
        self.executions = 0
        self.started = time.monotonic()

    def rollout(self, seeds: list[int]) -> list[Outcome]:
        """One execution per task seed, all at once."""
        done, outcomes = threading.Event(), []
        with ThreadPoolExecutor(self.width) as pool:
            futures = []
            for seed in seeds:
                recorder = Recorder(self.engine, self.rendering, self.run, self.executions)
                self.executions += 1
                futures.append(
                    pool.submit(execute, self.family.task(seed), recorder, self.run.harness.max_turns)
                )
            watcher = threading.Thread(target=lambda: ([f.exception() for f in futures], done.set()))
            watcher.start()
            self.engine.serve(done)
            watcher.join()
            outcomes = [future.result() for future in futures]
        return outcomes

    def step(self, index: int) -> None:
        """One batch: groups, advantages, gradient, update, new weights into the engine."""
        groups, size = self.run.schedule.batch_groups, self.run.schedule.executions_per_group
        first = self.options.train_seed + index * groups
        began = time.monotonic()
        outcomes = self.rollout([first + group for group in range(groups) for _ in range(size)])
        rolled = time.monotonic()
        settings, used, valid, sums = Settings.of(self.run), 0, 0, {}
        for group in range(groups):
            members = outcomes[group * size : (group + 1) * size]
            processed = process_group(
                GroupId(index * groups + group), [_attempt(m) for m in members], settings
            )
            used += bool(processed.micro_steps)
            valid += processed.valid
            for micro_step in processed.micro_steps:
                for key, value in self.trainer.accumulate(micro_step).items():
                    sums[key] = sums.get(key, 0.0) + value
        report = self.trainer.step(valid) if self.trainer.has_gradient else {}
        if report:
            self.engine.load(self.trainer.weights(), self.trainer.steps)
        self.say(
            "step",
            index + 1,
            outcomes,
            groups_used=used,
            tokens=sums.get("tokens", 0.0),
            targets=sums.get("targets", 0.0),
            clipped=sums.get("clipped", 0.0) / max(1.0, sums.get("targets", 0.0)),
            mismatch=sums.get("mismatch", 0.0) / max(1.0, sums.get("targets", 0.0)),
            surprise=sums.get("surprise", 0.0) / max(1.0, sums.get("targets", 0.0)),
            rollout_s=rolled - began,
            train_s=time.monotonic() - rolled,
            **report,
        )

    def evaluate(self, index: int) -> float:
        """Mean score over the held-out tasks, `evaluation_repeats` executions each."""
        first, tasks = self.options.heldout_seed, self.run.tasks.heldout
        seeds = [first + task for _ in range(self.run.tasks.evaluation_repeats) for task in range(tasks)]
        began = time.monotonic()
        outcomes = self.rollout(seeds)
        self.say("evaluation", index, outcomes, wall_s=time.monotonic() - began)
        if self.options.dump:
            self.options.dump.write_text("\n".join(map(self._transcript, outcomes)))
        return sum(outcome.score for outcome in outcomes) / len(outcomes)

    def say(self, kind: str, index: int, outcomes: list[Outcome], **more: float) -> None:
        """One JSON line."""
        count = len(outcomes)
        seconds = sorted(outcome.seconds for outcome in outcomes)
        records = [outcome.recorder.records for outcome in outcomes]
        line = {
            "kind": kind,
            "step": index,
            "score": sum(outcome.score for outcome in outcomes) / count,
            "solved": sum(outcome.score == 1 for outcome in outcomes) / count,
            "calls": sum(map(len, records)) / count,
            "max_calls": max(map(len, records)),
            "sampled": sum(outcome.recorder.sampled for outcome in outcomes) / count,
            "helpers": sum(
                r.role_hint is LeafRole.SUB_AGENT and len(r.prompt_ids) < 24 for rs in records for r in rs
            )
            / count,
            "right_edits": self._right_edits(outcomes),
            "refused": sum(bool(outcome.recorder.refused) for outcome in outcomes) / count,
            "gave_up": sum(outcome.last == "gave up" for outcome in outcomes) / count,
            "longest": max(len(r.prompt_ids) + len(r.output_ids) for rs in records for r in rs),
            "median_s": seconds[count // 2],
            "slowest_s": seconds[-1],
            **more,
            "elapsed_s": time.monotonic() - self.started,
        }
        print(
            json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in line.items()}),
            flush=True,
        )

    def _transcript(self, outcome: Outcome) -> str:
        """What the policy said, call by call, and how it ended."""
        said = [
            f"{r.role_hint}: {self.rendering.text(r.output_ids.tolist())!r}" for r in outcome.recorder.records
        ]
        asked = " ".join(
            f"{m.name}:{m.operator}{m.constant}{'' if m.written else '?'}" for m in outcome.task.modules
        )
        return "\n".join(
            [f"== {outcome.task.id} {asked}", *said, f"-- {outcome.score:.2f} {outcome.last!r}", ""]
        )

    def _right_edits(self, outcomes: list[Outcome]) -> float:
        """Share of edits that write what the module's comment asks for."""
        edits = right = 0
        for outcome in outcomes:
            wanted = {m.name: (m.operator, str(m.constant)) for m in outcome.task.modules}
            for record in outcome.recorder.records:
                for operator, constant, name in EDIT.findall(self.rendering.text(record.output_ids.tolist())):
                    edits += 1
                    right += wanted.get(name) == (operator, constant)
        return right / max(1, edits)


def _attempt(outcome: Outcome) -> Attempt:
    strands = Strands()
    for record in outcome.recorder.records:
        strands.add(record)
    return Attempt(ExecutionId(outcome.recorder.execution), outcome.score, "", build_tree(strands))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "gyre_hpc" / "models" / "patchkit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--evaluate-every", type=int, default=0, help="0 = before and after only")
    parser.add_argument("--heldout-seed", type=int, default=TUNING_HELDOUT)
    parser.add_argument("--train-seed", type=int, default=None)
    parser.add_argument("--dump", type=Path, help="write what the policy said in the latest evaluation")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    options = parser.parse_intermixed_args()
    if options.train_seed is None:
        options.train_seed = TUNING_TRAIN + options.seed * 100_000
    torch.set_num_threads(1)
    base = {"seed": options.seed, "model": {"path": str(options.model)}}
    run = to_run_config(OmegaConf.merge(base, OmegaConf.from_dotlist(options.overrides)))
    recipe = Recipe(run, options.model, options)
    before = recipe.evaluate(0)
    after = before
    for index in range(options.steps):
        recipe.step(index)
        last = index + 1 == options.steps
        if last or (options.evaluate_every and (index + 1) % options.evaluate_every == 0):
            after = recipe.evaluate(index + 1)
    seconds = time.monotonic() - recipe.started
    print(
        json.dumps(
            {"kind": "done", "seed": options.seed, "before": before, "after": after, "wall_s": seconds}
        )
    )


if __name__ == "__main__":
    main()
