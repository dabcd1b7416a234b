"""The workload of paced runs: lengths and scores come from (task, seed) alone."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from gyre_hpc import models
from gyre_hpc.bench import paced, scripted_agent
from gyre_hpc.bench.schedule import ENTRANTS
from gyre_hpc.composition import compose
from gyre_hpc.config import TasksConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.executions.evaluation import read_score
from gyre_hpc.executions.tasks import task_source
from gyre_hpc.report import metrics as m

FAMILY = "gyre_hpc.bench.paced/PacedFamily"


def length(task: int, seed: int) -> float:
    return scripted_agent.draw_seconds(task, seed, mean=6.0, task_sigma=0.25, execution_sigma=0.45)


def test_lengths_have_the_stated_mean_and_a_long_tail() -> None:
    lengths = [length(task, 4 * task + member) for task in range(500) for member in range(4)]
    assert statistics.mean(lengths) == pytest.approx(6.0, rel=0.05)
    assert statistics.median(lengths) < 0.95 * statistics.mean(lengths)
    assert 0.01 < statistics.mean(seconds > 13.2 for seconds in lengths) < 0.1


def test_members_of_a_group_differ_in_length_and_score_and_every_run_draws_the_same() -> None:
    lengths = [length(7, seed) for seed in range(4)]
    scores = [scripted_agent.draw_score(7, seed) for seed in range(4)]
    assert len(set(lengths)) == len(set(scores)) == 4
    assert lengths == [length(7, seed) for seed in range(4)]
    assert all(0 <= score <= 1 for score in scores)


def test_recorded_lengths_have_the_mean_a_long_tail_and_time_outs_that_cluster(tmp_path: Path) -> None:
    paced.write_recorded_lengths(tmp_path / "lengths", mean_s=6.0, limit_s=13.2)
    queries = json.loads((tmp_path / "lengths").read_text())
    lengths = [
        [scripted_agent.recorded_seconds(task, 4 * task + member, queries) for member in range(4)]
        for task in range(1_000_000, 1_000_000 + len(queries))
    ]
    cut = [[second >= 13.2 for second in group] for group in lengths]
    assert statistics.mean(min(13.2, second) for group in lengths for second in group) == pytest.approx(
        6.0, rel=0.05
    )
    share = statistics.mean(one for group in cut for one in group)
    assert 0.02 < share < 0.2
    groups_cut = statistics.mean(any(group) for group in cut)
    assert groups_cut < 0.8 * (1 - (1 - share) ** 4), "independent time-outs would meet more groups"


def test_turns_and_pauses_add_up_to_the_length() -> None:
    pauses = scripted_agent.draw_pauses(3, 1, seconds=6.0, turn_s=1.2, call_s=0.64)
    assert len(pauses) == 5
    assert sum(pauses) + 5 * 0.64 == pytest.approx(6.0)
    assert scripted_agent.draw_pauses(3, 1, seconds=0.1, turn_s=1.2, call_s=0.64) == [0.0]


class Endpoint(BaseHTTPRequestHandler):
    """Answers like the gateway; the first request fails."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, object]]]
    fails: ClassVar[int]
    url: ClassVar[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        failing = len(self.bodies) < self.fails
        self.bodies.append({"path": self.path, **body})
        answer = {"choices": [{"message": {"role": "assistant", "content": f"answer {len(self.bodies)}"}}]}
        data = b"later" if failing else json.dumps(answer).encode()
        self.send_response(503 if failing else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def endpoint() -> Iterator[type[Endpoint]]:
    class Fresh(Endpoint):
        bodies: ClassVar[list[dict[str, object]]] = []
        fails = 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Fresh.url = f"http://127.0.0.1:{server.server_port}/x/key"
    yield Fresh
    server.shutdown()
    thread.join()


def arguments(script: paced.Script, url: str, workspace: Path) -> list[str]:
    words = script.command()[4:]
    filled = {"{base_url}": url, "{workspace}": str(workspace), "{instruction}": "Task 17", "{seed}": "4"}
    return [filled.get(word, word) for word in words]


def test_the_program_plays_its_script_through_the_endpoint(
    endpoint: type[Endpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_agent, "BACK_OFF_S", 0.0)
    script = paced.Script(mean_s=0.06, turn_s=0.02, answer_tokens=2, tokens_per_s=1000.0)
    seconds = scripted_agent.draw_seconds(17, 4, 0.06, script.task_sigma, script.execution_sigma)
    turns = max(1, round(seconds / 0.02))
    assert scripted_agent.main(arguments(script, endpoint.url, tmp_path)) == 0
    assert len(endpoint.bodies) == turns + 1, "one request was refused and repeated"
    assert endpoint.bodies[0]["path"] == "/x/key/v1/chat/completions"
    assert [body["max_tokens"] for body in endpoint.bodies] == [2] * (turns + 1)
    roles = [message["role"] for message in endpoint.bodies[-1]["messages"]]  # type: ignore[attr-defined]
    assert roles == ["system", "user"] + ["assistant", "user"] * (turns - 1)


def test_an_endpoint_that_keeps_failing_ends_the_program_with_3_and_the_score_is_there_already(
    endpoint: type[Endpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_agent, "BACK_OFF_S", 0.0)
    endpoint.fails = 100
    assert scripted_agent.main(arguments(paced.Script(), endpoint.url, tmp_path)) == 3
    written = (tmp_path / scripted_agent.SCORE_FILE).read_text()
    assert read_score(written).score == scripted_agent.draw_score(17, 4)


def test_the_family_is_found_by_its_name_and_reads_the_score_the_program_wrote() -> None:
    task = task_source(TasksConfig(family=FAMILY)).task(f"{FAMILY}:1000003")
    assert task.instruction.split()[-1] == "1000003"
    assert task.evaluator(Path("/hidden")) == ["/bin/cat", "{workspace}/score.json"]


def test_the_random_policy_is_a_complete_model_folder(tmp_path: Path) -> None:
    paced.write_random_policy(tmp_path / "policy")
    assert models.resolve(str(tmp_path / "policy")) == tmp_path / "policy"


def test_every_entrant_has_the_same_mean_staleness_devices_and_work(tmp_path: Path) -> None:
    script = paced.Script()
    runs = [compose([*paced.overrides(script, tmp_path, tmp_path), *one.overrides]) for one in ENTRANTS]
    points = {run.schedule.extra_dispatch + (run.schedule.steps_per_burst - 1) / 2 for run in runs}
    assert points == {1.0}
    assert {run.schedule.policy for run in runs} == {"gyre", "colocate", "async"}
    for run in runs:
        assert run.engine.tokens_per_s / run.engine.capacity == script.tokens_per_s
        cluster = dataclasses.replace(run.cluster, standalone=0)
        assert (run.engine, run.trainer, cluster, run.harness, run.seed) == (
            runs[0].engine,
            runs[0].trainer,
            runs[0].cluster,
            runs[0].harness,
            runs[0].seed,
        )
        assert run.harness.command == script.command()


def sleeper(arguments: list[str], root: Path) -> psutil.Popen:
    """Instead of a run: steps are there at once, then nothing more happens."""
    folder = root / "paced-1"
    folder.mkdir(parents=True)
    (root / paced.OUTPUT).write_text("last words")
    writer = m.MetricsWriter(folder / "metrics.jsonl")
    writer.write(m.Step(1.0, 1, 0.5, 2, 8, 8, 100, (0, 0), {}, 1.0))
    writer.close()
    return psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_a_run_whose_time_is_over_fails_or_counts_as_far_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced, "start", sleeper)
    monkeypatch.setattr(paced, "POLL_S", 0.02)
    told: list[int] = []
    cut = paced.run([], tmp_path / "a", 0.5, told=lambda steps, _: told.append(steps), may_cut=True)
    assert cut.cut and cut.folder == tmp_path / "a" / "paced-1"
    assert set(told) == {1} and [type(line) for line in cut.lines] == [m.Step]
    with pytest.raises(GyreError, match="last words"):
        paced.run([], tmp_path / "b", 0.1)


def test_cpu_shares_of_a_run_end_with_its_last_sample() -> None:
    run = paced.Run([], [paced.Load(0, 0.0, 0.0, 0.0), paced.Load(3, 4.0, 2.0, 10.0)])
    assert run.cpu_shares(0, 6) == (0.4, 0.2)
