"""`gyre submit` with a stand-in for sbatch: what Slurm is given, what is frozen, what a person is told."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from gyre_hpc.cli import main
from gyre_hpc.composition import compose
from gyre_hpc.config import load_run_config, save_run_config
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.job.profiles import resubmitted, site_overrides
from gyre_hpc.launch.job.submit import submit
from gyre_hpc.layout import RunLayout

QUICKSTART = ["experiment=quickstart", "cluster=devcluster"]
SITE = Path(__file__).parents[2] / "slurm" / "sites" / "example.yaml"
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """The command line in this process: exit code and both outputs."""
    monkeypatch.setenv("COLUMNS", "60")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that keeps its environment and the script, and takes every job as number 77."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, body in {
        "srun": "",
        "sbatch": f'env -0 > {folder}/env; cp "$1" {folder}/script; echo "Submitted batch job 77"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_dry_run_needs_no_slurm_and_leaves_nothing(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    code, out, _ = say("submit", *QUICKSTART, f"root={tmp_path}/runs", "--dry-run")
    assert code == 0 and out.startswith("#!/bin/bash\n")
    assert f"--output={tmp_path}/runs/quickstart-" in out
    assert "2 nodes x 3 CPUs, 4096 MiB: controller, gateway, runner, processor; 2 cells" in out
    assert "requeue the job, which goes on" in out
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_nothing_is_left_behind(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("gyre_hpc.launch.job.staging.check_staged", lambda *given: None)
    code, _, err = say("submit", *QUICKSTART, f"root={tmp_path}/runs")
    assert code == 2 and "--dry-run" in err
    assert list(tmp_path.iterdir()) == []


def test_a_submission_freezes_the_run_and_tells_how_to_watch_it(
    say: Say, tmp_path: Path, sbatch: Path
) -> None:
    code, out, err = say("submit", *QUICKSTART, f"root={tmp_path}/runs", "seed=3")
    assert code == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert load_run_config(run).seed == 3
    assert (run / "package" / "gyre_hpc" / "models" / "__init__.py").is_file()
    assert (run / "frozen.json").is_file() and (run / "model" / "model.safetensors").is_file()
    script, log = run / "jobs" / "77_submission.sh", run / "jobs" / "77.log"
    assert script.read_text() == (sbatch / "script").read_text()
    assert f"resume={run}" in script.read_text().splitlines()[-1]
    assert [path.name for path in (run / "jobs").iterdir()] == [script.name]
    for told in ("job     77", f"run     {run}", f"log     {log}", "squeue -j 77", f"tail -F {log}"):
        assert told in out
    assert f"gyre report {run}" in out and f"gyre submit resume={run}" in out


def test_what_an_enclosing_job_left_does_not_reach_sbatch_and_is_kept_here(
    say: Say, tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {
        "SLURM_MEM_PER_CPU": "17",
        "SBATCH_QOS": "nonsense",
        "PMIX_RANK": "0",
        "SQUEUE_STATES": "PD",
        "SLURM_CONF": "/etc/s.conf",
    }
    for name, value in (left | {"MINE": "kept"}).items():
        monkeypatch.setenv(name, value)
    assert say("submit", *QUICKSTART, f"root={tmp_path}/runs")[0] == 0
    seen = {word.partition("=")[0] for word in (sbatch / "env").read_text().split("\0")}
    assert {"SLURM_CONF", "MINE", "PATH"} <= seen
    assert seen.isdisjoint({"SLURM_MEM_PER_CPU", "SBATCH_QOS", "PMIX_RANK", "SQUEUE_STATES"})
    assert os.environ["SBATCH_QOS"] == "nonsense"


TAKES_AND_FAILS = """#!/bin/bash
echo taken >> {folder}/taken; echo "${{@: -1}}" >> {folder}/scripts
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1
"""


def given_words(folder: Path, squeue: str) -> None:
    """An sbatch that takes the job, and whose answer is lost; squeue as told."""
    (folder / "sbatch").write_text(TAKES_AND_FAILS.format(folder=folder))
    (folder / "squeue").write_text(f"#!/bin/bash\n{squeue}\n")
    (folder / "squeue").chmod(0o755)


def test_a_job_that_slurm_took_though_sbatch_failed_is_not_submitted_again(
    tmp_path: Path, sbatch: Path
) -> None:
    layout = RunLayout(tmp_path)
    given_words(sbatch, f'echo "12|/other.sh"; echo "13+0|$(tail -1 {sbatch}/scripts)"; echo "13+1|"')
    taken = submit("#!/bin/bash\n", layout)
    assert taken.job == "13" and (sbatch / "taken").read_text() == "taken\n"
    assert [path.name for path in layout.jobs.iterdir()] == ["13_submission.sh"]


def test_while_slurm_does_not_say_nothing_is_submitted_twice(tmp_path: Path, sbatch: Path) -> None:
    layout = RunLayout(tmp_path)
    given_words(sbatch, "echo 'Unable to contact slurm controller' >&2; exit 1")
    for _ in range(3):
        with pytest.raises(SlurmCommandFailed):
            submit("#!/bin/bash\n", layout)
    assert (sbatch / "taken").read_text() == "taken\n"
    given_words(sbatch, f'echo "13|$(tail -1 {sbatch}/scripts)"')
    assert submit("#!/bin/bash\n", layout).job == "13"
    assert (sbatch / "taken").read_text() == "taken\n"
    given_words(sbatch, "true")
    with pytest.raises(SlurmCommandFailed, match="Socket timed out"):
        submit("#!/bin/bash\n", layout)
    assert (sbatch / "taken").read_text() == "taken\n" * 2, "a later submission is one of its own"
    assert [path.name for path in layout.jobs.iterdir()] == ["13_submission.sh"]


def test_what_sbatch_says_against_a_job_is_told_and_the_run_can_be_submitted_again(
    say: Say, tmp_path: Path, sbatch: Path
) -> None:
    good = (sbatch / "sbatch").read_text()
    (sbatch / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    code, out, err = say("submit", *QUICKSTART, f"root={tmp_path}/runs")
    assert code == 1 and out == "" and "invalid partition" in err and "gyre submit resume=" in err
    (run,) = (tmp_path / "runs").iterdir()
    (sbatch / "sbatch").write_text(good)
    code, out, err = say("submit", f"resume={run}", "cluster.job.partition=other")
    assert code == 0, err
    assert "#SBATCH --partition=other" in (sbatch / "script").read_text()
    assert load_run_config(run).cluster.job.partition == "other", "what the controller goes by"
    assert [path.name for path in (run / "jobs").iterdir()] == ["77_submission.sh"]


def test_a_run_is_taken_over_by_force_only_when_asked(say: Say, tmp_path: Path, sbatch: Path) -> None:
    assert say("submit", *QUICKSTART, f"root={tmp_path}/runs")[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert "resume_force" not in (sbatch / "script").read_text()
    assert say("submit", f"resume={run}", "resume_force=true")[0] == 0
    assert (sbatch / "script").read_text().endswith(f"controller resume={run} resume_force=true\n")
    assert not load_run_config(run).resume_force


def test_two_submissions_in_one_second_make_two_runs(
    say: Say, tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-120000")
    for _ in range(2):
        assert say("submit", *QUICKSTART, f"root={tmp_path}/runs")[0] == 0
        assert "quickstart-20260101-120000" in (sbatch / "script").read_text()
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"quickstart-20260101-120000", "quickstart-20260101-120000-2"}


def test_a_missing_model_is_named_before_anything_is_written(say: Say, tmp_path: Path, sbatch: Path) -> None:
    code, _, err = say("submit", *QUICKSTART, f"root={tmp_path}/runs", "model.path=/nowhere")
    assert code == 2 and "/nowhere" in err
    assert not (tmp_path / "runs").exists() and not (sbatch / "script").exists()


def test_a_local_run_is_not_submitted(say: Say, tmp_path: Path) -> None:
    code, _, err = say("submit", "experiment=quickstart", f"root={tmp_path}")
    assert code == 2 and "cluster.kind=local" in err and "cluster=slurm" in err


def test_the_controller_runs_only_inside_a_job(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "use gyre train" in say("controller", "experiment=quickstart", f"root={tmp_path}/runs")[2]
    assert "gyre submit ARGUMENTS" in say("controller", *QUICKSTART, f"root={tmp_path}/runs")[2]
    assert list(tmp_path.iterdir()) == []


def test_stage_lists_what_is_there_and_what_is_missing(say: Say, tmp_path: Path) -> None:
    code, out, err = say("stage", *QUICKSTART, f"root={tmp_path}")
    assert code == 0 and err == "" and "patchkit" in out
    code, out, err = say("stage", *QUICKSTART, f"root={tmp_path}", "harness.command=[no-such-agent]")
    assert code == 2 and "missing: harness.command: program 'no-such-agent'" in out and "fix: " in err


def test_a_run_that_goes_on_may_change_its_job_only() -> None:
    config = compose(QUICKSTART)
    changed = resubmitted(config, ["cluster.job.time=12:00:00", "++cluster.job.env.NAME='a b'"])
    assert (changed.cluster.job.time, changed.cluster.job.env) == ("12:00:00", {"NAME": "a b"})
    with pytest.raises(ConfigError, match="seed=4 would count for nothing"):
        resubmitted(config, ["cluster.job.time=12:00:00", "seed=4"])


@pytest.mark.parametrize("time", ["30", "43200", "1:2", "tomorrow"])
def test_a_time_limit_that_yaml_may_have_read_as_a_number_is_refused(time: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.job.time={time}"):
        compose([f"cluster.job.time={time}"])


def test_a_margin_that_leaves_no_time_is_refused() -> None:
    compose(["cluster.job.time=00:03:01"])
    compose(["cluster.job.time=1-0", "cluster.job.margin_s=86399"])
    with pytest.raises(ConfigError, match="margin_s=180 is not below"):
        compose(["cluster.job.time=00:03:00"])


def test_a_frozen_time_limit_is_read_back_as_text(tmp_path: Path) -> None:
    save_run_config(compose(["cluster.job.time=12:30:00"]), tmp_path)
    assert load_run_config(tmp_path).cluster.job.time == "12:30:00"


def test_a_site_profile_gives_way_to_the_command_line(say: Say, tmp_path: Path) -> None:
    keys = ["experiment=quickstart", "cluster=slurm", f"root={tmp_path}", "cluster.job.account=other"]
    keys += ["--dry-run", "--site", str(SITE)]
    out = say("submit", *keys)[1]
    assert "--account=other" in out and "--partition=gpu" in out and "export NCCL_SOCKET_IFNAME=ib0" in out


@given(st.lists(st.text(st.sampled_from("a'\"\\,[]{}:= $#")), max_size=3), st.booleans())
@settings(max_examples=50, deadline=None)
def test_values_of_a_site_profile_arrive_as_they_are(words: list[str], flag: bool) -> None:
    words = [word.replace("{", "") for word in words]  # ${ is an interpolation, in a profile too
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site.yaml"
        site.write_text(yaml.safe_dump({"job": {"setup": words, "exclusive": flag}}))
        overrides = site_overrides(site)
    config = OmegaConf.create({"cluster": {"job": {}}})
    for override in OverridesParser.create().parse_overrides(overrides):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    assert (config.cluster.job.setup, config.cluster.job.exclusive) == (words, flag)


def test_a_wrong_key_of_a_site_profile_is_named_with_the_file(say: Say, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("job: {partitoin: gpu}\n")
    code, _, err = say("submit", *QUICKSTART, "--site", str(site), "--dry-run")
    assert code == 2 and str(site) in err and "cluster.job.partition" in err
    with pytest.raises(MissingInput, match=r"example\.yaml"):
        site_overrides(tmp_path / "none.yaml")


def test_the_changes_of_a_checkout_are_frozen(say: Say, tmp_path: Path, sbatch: Path) -> None:
    """The patch applies to the commit that frozen.json names."""
    assert say("submit", *QUICKSTART, f"root={tmp_path}/runs")[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    here = ["git", "-C", str(SITE.parent)]
    changes = subprocess.run([*here, "diff", "HEAD", "--quiet"], check=False).returncode
    assert (run / "dirty.diff").exists() == (changes == 1)
