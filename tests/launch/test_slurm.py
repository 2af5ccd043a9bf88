"""The script of `launch slurm` without a SLURM: what stands in it, what it does with stand-ins for srun and scontrol.

In a real SLURM it is run by tests/launch/test_slurm_cluster.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.planning import described
from launch.slurm import Request, script, signal_seconds, time_seconds, write
from tests.command_line import run_command
from tests.ranks import root

PLAN: dict[str, Any] = {
    "global_batch_size": 512,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "tokens_per_step": 1_048_576,
    "checkpoint": {"bytes": 8_000_000_000},
    "verdict": {
        "fits": True,
        "needed_bytes": 31_200_000_000,
        "device_memory_bytes": 80_000_000_000,
        "device_memory_is": "as given",
    },
}
GPUS = Request(nodes=2, gpus_per_node="a100:8", time="12:00:00", options={"partition": "gpu", "qos": None})
CPUS = Request(ranks_per_node=2)


def text(request: Request = GPUS, run: str = "runs/0.5b", **changes: Any) -> str:
    facts: dict[str, Any] = {"directory": Path("/shared/zerohalf"), "python": "/shared/zerohalf/.venv/bin/python"}
    return script(Path("recipes/0.5b.toml"), Path(run), request, PLAN, **{**facts, **changes})


def directives(script_text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script_text.splitlines() if line.startswith("#SBATCH")]


def refused(script_text: str, *options: str) -> str:
    """What bash or shellcheck has against a script; "" for nothing."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    commands = (["bash", "-n"], [str(shellcheck), *options, "-"])
    done = [
        subprocess.run(command, input=script_text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    return "".join(one.stdout for one in done if one.returncode != 0)


def test_the_script_says_what_it_will_do_and_asks_slurm_for_it() -> None:
    whole = text()
    head = whole[: whole.index("#SBATCH")]
    for line in (
        "world size       16 = 2 × 8 GPUs",
        "touch runs/0.5b/stop",
        *(line for _, line in described(PLAN, 16)),
    ):
        assert line in head
    assert directives(whole) == [
        *("--job-name=0.5b", "--partition=gpu", "--time=12:00:00", "--nodes=2", "--ntasks-per-node=8"),
        *("--gpus-per-node=a100:8", "--cpus-per-task=4", "--signal=USR1@240", "--requeue", "--open-mode=append"),
        "--output=/shared/zerohalf/runs/0.5b/logs/slurm-%j.log",
        "--export=HOME,LANG,LOGNAME,PATH,SHELL,USER",
    ]
    assert whole.count("srun ") == 1
    assert "--resume auto --grace-seconds 240" in whole
    assert "DS_ACCELERATOR" not in whole


def test_ranks_on_cpus_say_so() -> None:
    whole = text(CPUS)
    assert "export DS_ACCELERATOR=cpu\n" in whole
    assert not any("gpu" in line for line in directives(whole))
    assert "--ntasks-per-node=2" in directives(whole)


def test_what_is_asked_for_stands_in_it() -> None:
    request = Request(
        **{**vars(GPUS), "job_name": "a job", "options": {"mem": "0"}, "requeue": False, "cpus_per_task": 12},
    )
    whole = text(request)
    assert {"--job-name='a job'", "--mem=0", "--no-requeue", "--cpus-per-task=12"} <= set(directives(whole))
    assert "scontrol requeue" not in whole
    request = Request(
        nodes=1,
        gpus_per_node="2",
        sbatch=("gres=gpu:2", "exclusive"),
        setup=("module load cuda", 'source "/a b/activate"'),
        environment=("HF_TOKEN", "NCCL_DEBUG=a b"),
    )
    whole = text(request, arguments=("--set", "seed=3"))
    assert directives(whole)[-3:] == [
        "--export=HOME,LANG,LOGNAME,PATH,SHELL,USER,HF_TOKEN", "--gres=gpu:2", "--exclusive",
    ]  # fmt: skip
    assert "--gpus-per-node=2" not in directives(whole)
    assert 'set -eo pipefail\nmodule load cuda\nsource "/a b/activate"\nset -u\n' in whole
    assert "export NCCL_DEBUG='a b'\n" in whole
    assert whole.count("--set seed=3") == 1


@pytest.mark.parametrize(
    "request_",
    [GPUS, CPUS, Request(ranks_per_node=1, requeue=False, setup=("module load cuda",), environment=("A=b c",))],
)
def test_bash_and_shellcheck_have_nothing_against_it(request_: Request) -> None:
    assert refused(text(request_)) == ""
    hostile = text(request_, run="a 'b' \"c\" $(touch d) `e`; #%j", directory=Path("/x y"))
    assert refused(hostile, "--exclude=SC2016") == ""  # in single quotes, as it is meant


def test_shellcheck_would_see_it() -> None:
    assert "SC2086" in refused(text().replace('mkdir -p -- "$logs"', "mkdir -p -- $logs"))


# ---------------------------------------------------------------- what it does


SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$HERE/srun-arguments"
printf '%s\\n' "$MASTER_ADDR:$MASTER_PORT" > "$HERE/meeting"
log=$(printf '%s\\n' "$@" | sed -n 's/^--output=//p')
while [[ $1 != bash ]]; do shift; done
for rank in 0 1; do
  log_of_rank=$(sed "s/%%/\\t/g; s/%5t/0000$rank/; s/%j/$SLURM_JOB_ID/g; s/\\t/%/g" <<< "$log")
  SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" > "$log_of_rank" 2>&1 || code=$?
done
source "$HERE/then"
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf '%s\\n' node-7 node-8; else echo "$*" >> "$HERE/scontrol-arguments"; fi
"""
# In the place of Python: tells who it is, and what it was called with.
RANK = """#!/bin/bash
echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, cores $OMP_NUM_THREADS"
printf '%s\\n' "$@"
[[ ! -e $HERE/fails-$RANK ]] || { cat "$HERE/fails-$RANK"; exit 3; }
"""


class Job:
    """A script in a folder with stand-ins."""

    def __init__(self, folder: Path, request: Request = CPUS) -> None:
        self.here = folder / "stand-ins"
        self.here.mkdir()
        for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("python", RANK)):
            (self.here / name).write_text(content)
            (self.here / name).chmod(0o755)
        self.run = folder / "a 'b' \"c\" $(touch d) `touch e`; #%j"
        self.script = folder / "script"
        arguments = ("--set", "data.path=$(touch f) *")
        python = str(self.here / "python")
        self.script.write_text(
            script(
                Path("my recipe.toml"), self.run, request, PLAN, directory=folder, python=python, arguments=arguments
            )
        )

    def start(self, then: str = "", starts: int = 0) -> subprocess.CompletedProcess[str]:
        """As SLURM starts it; `then` is what happens behind the ranks."""
        (self.here / "then").write_text(then)
        environment = {"PATH": f"{self.here}:{os.environ['PATH']}", "HERE": str(self.here), "SLURM_JOB_ID": "70123"}
        environment |= {"SLURM_JOB_NODELIST": "node-[7-8]", "SCRIPT": str(self.script), "RUN": str(self.run)}
        environment |= {"SLURM_RESTART_COUNT": str(starts)} if starts else {}
        return subprocess.run(["bash", str(self.script)], env=environment, capture_output=True, text=True)

    @property
    def requeued(self) -> bool:
        said = self.here / "scontrol-arguments"
        return said.exists() and said.read_text() == "requeue 70123\n"


FINISHED = 'echo \'{"state": "finished", "attempt": 1}\' > "$RUN/status.json"\n'
STOPPED = FINISHED.replace("finished", "stopped")


def test_every_rank_knows_who_it_is_and_names_are_only_names(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = job.start(FINISHED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    logs = [job.run / "logs" / "job-70123-start-0" / f"rank-0000{rank}.log" for rank in (0, 1)]
    for rank, log in enumerate(logs):
        who, *argv = log.read_text().splitlines()
        assert who == f"rank {rank} of 2, {rank} of 2 here, cores 1"
        assert argv == [
            *("-m", "pretrain", "run", "my recipe.toml", "--run", str(job.run), "--resume", "auto"),
            *("--grace-seconds", "240", "--set", "data.path=$(touch f) *"),
        ]
    assert (job.here / "meeting").read_text() == f"node-7:{10_000 + 70_123 % 20_000}\n"
    assert "--kill-on-bad-exit=1" in (job.here / "srun-arguments").read_text()
    assert not job.requeued
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["script", "stand-ins", job.run.name])


@pytest.mark.parametrize("then", [STOPPED, ""], ids=["saved", "before it began"])
def test_stopped_by_a_signal_it_goes_back_into_the_queue(tmp_path: Path, then: str) -> None:
    job = Job(tmp_path)
    done = job.start(then, starts=99)
    assert (done.returncode, done.stdout) == (0, "stopped by a signal: back into the queue\n")
    assert job.requeued


def test_not_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = job.start(STOPPED, starts=100)
    assert (done.returncode, job.requeued) == (1, False)
    assert done.stderr.startswith("error: stopped after 100 starts again")


def test_not_where_nobody_wants_it(tmp_path: Path) -> None:
    job = Job(tmp_path, Request(ranks_per_node=2, requeue=False))
    done = job.start(STOPPED)
    assert (done.returncode, done.stdout, job.requeued) == (
        0,
        "stopped by a signal; to go on, submit it again\n",
        False,
    )


def test_not_where_slurm_ends_it(tmp_path: Path) -> None:
    """Then SLURM itself puts it back, or somebody has cancelled it."""
    job = Job(tmp_path)
    done = job.start(f'kill -TERM "$PPID"\n{STOPPED}')
    assert (done.returncode, done.stdout, job.requeued) == (0, "ended by SLURM (srun: 0)\n", False)


def test_the_stop_file_is_for_good(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = job.start(f'{STOPPED}touch "$RUN/stop"\n')
    assert (done.returncode, job.requeued) == (0, False)
    assert done.stdout == f"stopped by {job.run}/stop; to go on, submit it again\n"
    (job.here / "srun-arguments").unlink()
    done = job.start(FINISHED, starts=1)  # it was waiting to start again meanwhile
    assert (done.returncode, done.stdout) == (0, f"{job.run}/stop is there: not started again\n")
    assert not (job.here / "srun-arguments").exists()
    assert job.start(FINISHED).stdout == "finished\n"  # submitted again


def test_a_failure_is_the_jobs_with_its_reason(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (job.here / "fails-0").write_text("error: another rank is gone, and this one cannot go on without it\n")
    (job.here / "fails-1").write_text("Traceback (most recent call last):\n  …\ntorch.OutOfMemoryError: too much\n")
    done = job.start(FINISHED)
    assert (done.returncode, done.stdout, job.requeued) == (3, "", False)
    first, second = done.stderr.splitlines()
    assert first == f"error: a rank failed (srun: 3); the ranks' logs: {job.run}/logs/job-70123-start-0"
    assert second.endswith("/rank-00001.log:torch.OutOfMemoryError: too much")


def test_what_cannot_be_set_up_fails_before_any_rank_starts(tmp_path: Path) -> None:
    job = Job(tmp_path, Request(ranks_per_node=2, setup=("false",)))
    assert job.start(FINISHED).returncode == 1
    assert not (job.here / "srun-arguments").exists()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"gpus_per_node": None}, "either --gpus-per-node G"),
        ({"ranks_per_node": 2}, "either --gpus-per-node G"),
        ({"gpus_per_node": "0"}, "--gpus-per-node 0: give"),
        ({"gpus_per_node": "a100"}, "--gpus-per-node a100: give"),
        ({"nodes": 0}, "--nodes 0"),
        ({"cpus_per_task": 0}, "--cpus-per-task 0"),
        ({"max_requeues": -1}, "--max-requeues -1"),
        ({"signal_seconds": 0}, "--signal-seconds 0"),
        ({"signal_seconds": 70_000, "time": None}, "at most 65535"),
        ({"time": "12h"}, "--time 12h: give"),
        ({"time": "5"}, "--time 5 leaves nothing to train in: the ranks are told to save 240 s"),
        ({"time": "1\n"}, "--time: it must be one line"),
        ({"job_name": "a\nrm -rf b"}, "--job-name: it must be one line"),
        ({"options": {"qos": "a\x1b"}}, "--qos: it must be one line"),
        ({"setup": ("a\nb",)}, "--setup: it must be one line"),
        ({"sbatch": ("Reservation=x",)}, "--sbatch Reservation=x: give a long option"),
        ({"sbatch": ("--exclusive",)}, "--sbatch --exclusive: give a long option"),
        ({"sbatch": ("nodes=3",)}, "--sbatch nodes=3: the script sets nodes itself"),
        ({"environment": ("1A",)}, "--env"),
        ({"environment": ("RANK=0",)}, "--env RANK"),
        ({"environment": ("HF_TOKEN=hf_123",)}, "--env HF_TOKEN=…: a secret would stand in the script"),
        ({"environment": ("PGPASSWORD=123",)}, "--env PGPASSWORD=…: a secret would stand in the script"),
    ],
)
def test_what_makes_no_job_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        text(Request(**{**vars(GPUS), **changes}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hf_123" not in str(caught.value)


@pytest.mark.parametrize("run", ["a\nb", "a\\b", "a\x00b"])
def test_names_that_cannot_stand_in_a_script_are_refused(run: str) -> None:
    with pytest.raises(LaunchError, match="--run"):
        text(run=run)


@pytest.mark.parametrize(
    "given, seconds",
    [
        *(("90", 5_400), ("1:30", 90), ("2:00:00", 7_200), ("1-12", 129_600), ("1-0:30", 88_200), ("1-0:0:5", 86_405)),
        *(("UNLIMITED", 0), ("infinite", 0)),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(given: str, seconds: int) -> None:
    assert time_seconds(given) == seconds


def test_the_signal_comes_early_enough_to_save() -> None:
    """Of 8 GB at 100 MB/s twice, and a minute; a small checkpoint has two."""
    assert signal_seconds(GPUS, PLAN) == 240
    assert signal_seconds(GPUS, {"checkpoint": {"bytes": 10**6}}) == 120
    assert signal_seconds(Request(ranks_per_node=1, signal_seconds=7), PLAN) == 7


def test_a_script_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    write("one", path)
    with pytest.raises(LaunchError, match=r"job\.sbatch is there already"):
        write("two", path)
    assert path.read_text() == "one"


# ---------------------------------------------------------------- the verb


def launch_slurm(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_command("launch", "slurm", *arguments)


def test_the_verb_plans_for_all_ranks_and_writes(tmp_path: Path) -> None:
    recipe, run, output = "pretrain/recipes/debug.toml", tmp_path / "run", tmp_path / "job.sbatch"
    options = ("--nodes", "2", "--ranks-per-node", "2", "--run", run, "--change", "data", "--no-check-data")
    done = launch_slurm(recipe, *options, "--device-memory", "16GB", "--output", output)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sbatch {output}\n", "")
    written = output.read_text()
    assert "16 sequences = 4 × 1 micro-step × 4 ranks" in written
    assert "fits: a rank needs " in written
    assert f"cd -- {shlex.quote(str(root()))}\n" in written
    assert f"{shlex.quote(sys.executable)} -m pretrain run {recipe} --run" in written
    assert "--change data ||" in written
    assert (run / "logs").is_dir()
    assert refused(written) == ""


@pytest.mark.parametrize(
    "options, says",
    [
        (("--nodes", "3", "--gpus-per-node", "1", "--no-check-data"), "use 12 or 24"),
        (("--gpus-per-node", "1", "--device-memory", "1GB", "--no-check-data"), "does not fit"),
        (("--gpus-per-node", "1", "--device-memory", "auto", "--no-check-data"), "--device-memory auto would be this"),
        (("--gpus-per-node", "1", "--set", "data.path=nowhere"), "nowhere"),
    ],
)
def test_what_cannot_run_is_one_line_and_nothing_is_written(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "job.sbatch"
    done = launch_slurm("pretrain/recipes/debug.toml", *options, "--run", run, "--output", output)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []
