"""datatrove's executors run our units: the same bytes. Scripts stand for SLURM's commands, and run what they get."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.executors import Executor, Work, run_parts
from data_pipeline.prepare import Options, PrepareError, prepare
from tests.data_pipeline.conftest import real_texts
from tests.data_pipeline.test_parts import data
from tests.data_pipeline.test_prepare import write_jsonl

OPTIONS = Options(validation_fraction=0.2, unit_bytes=20_000, deduplicate=True)
ROOT = Path(__file__).resolve().parents[2]

SBATCH = """#!{python}
import os, re, subprocess, sys
folder = os.environ["FAKE_SLURM"]
script = open(sys.argv[-1]).read()
job = len(os.listdir(folder)) + 1
with open(os.path.join(folder, f"{{job:02d}}.sh"), "w") as file:
    file.write("# sbatch " + " ".join(sys.argv[1:-1]) + "\\n" + script)
if "launch_pickled_pipeline" in script:
    last = int(re.search(r"--array=0-([0-9]+)", script)[1])
    for task in range(last + 1):
        environment = dict(os.environ, SLURM_ARRAY_TASK_ID=str(task), RUN_OFFSET="0", SLURM_NODELIST="localhost")
        subprocess.run(["bash"], input=script.encode(), env=environment, check=True, stdout=sys.stderr)
print(f"Submitted batch job {{job}}")
"""
SRUN = '#!/bin/sh\nshift 3\nexec "$@"\n'  # srun -l -n 1 COMMAND...; two blanks count as one
SCONTROL = "#!/bin/sh\necho localhost\n"


@pytest.fixture
def work(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Paths are relative: tasks run elsewhere must find them all the same."""
    texts = real_texts(12)
    write_jsonl(tmp_path / "x.jsonl", [*texts, *texts[:4]], bad_lines=True)
    monkeypatch.chdir(tmp_path)
    inputs = {"x": [Path("x.jsonl")]}
    prepare(inputs, tokenizer_folder, tmp_path / "whole", OPTIONS)
    return Work(inputs, tokenizer_folder, Path("out"), OPTIONS, False, tmp_path)


def run_and_compare(work: Work, executor: Executor) -> None:
    assert run_parts(work, executor, tasks=3, workers=2, logs=work.folder / "logs", slurm={})
    report = prepare(work.inputs, work.tokenizer, work.out, work.options)
    assert report.units_done_before == report.units > 6
    assert data(work.folder / "out") == data(work.folder / "whole")


def test_processes_of_this_machine(work: Work) -> None:
    run_and_compare(work, "datatrove")


@pytest.mark.soak  # half a minute for a cluster to start and end
def test_a_ray_cluster(work: Work) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    try:
        run_and_compare(work, "ray")
    finally:
        ray.shutdown()


def test_the_scripts_for_slurm_run_and_wait_for_each_other(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array a pass, the second after the first, and behind them the job that writes the manifests."""
    bin_folder, jobs = tmp_path / "bin", tmp_path / "jobs"
    bin_folder.mkdir()
    jobs.mkdir()
    for name, script in (("sbatch", SBATCH.format(python=sys.executable)), ("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(script)
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{Path('/usr/bin')}:{Path('/bin')}")
    monkeypatch.setenv("FAKE_SLURM", str(jobs))
    slurm = {"partition": "cpu", "time": "1:00:00", "mem-per-cpu": "2G", "account": "texts"}
    assert not run_parts(work, "slurm", tasks=2, workers=1, logs=tmp_path / "logs", slurm=slurm)
    assert data(tmp_path / "out") == data(tmp_path / "whole")
    scripts = [path.read_text() for path in sorted(jobs.iterdir())]
    arrays = [script for script in scripts if "launch_pickled_pipeline" in script]
    assert [re.search("--job-name=(.+)", script)[1] for script in arrays] == [  # type: ignore[index]
        "prepare-hash", "prepare-tokenize", "prepare-end",
    ]  # fmt: skip
    for script, array in zip(arrays, ("0-1%1", "0-1%1", "0-0"), strict=True):
        for line in (f"array={array}", "partition=cpu", "time=1:00:00", "mem-per-cpu=2G", "account=texts"):
            assert f"#SBATCH --{line}\n" in script
        assert f"cd {tmp_path} && export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}" in script
        assert subprocess.run(["bash", "-n"], input=script.encode(), check=False).returncode == 0
    numbers = [scripts.index(script) + 1 for script in arrays]
    assert "--dependency" not in arrays[0]
    assert f"--dependency=afterok:{numbers[0]}" in arrays[1]
    assert f"--dependency=afterok:{numbers[1]}" in arrays[2]


def test_a_task_that_fails_is_told(work: Work) -> None:
    strict = Work(work.inputs, work.tokenizer, work.out, Options(unit_bytes=20_000), True, work.folder)
    with pytest.raises(PrepareError, match=r"x\.jsonl:\d+: .* \(--strict\)"):
        run_parts(strict, "datatrove", tasks=2, workers=2, logs=work.folder / "logs", slurm={})
    assert not (work.folder / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tasks", "3"], "--executor"),
        (["--executor", "ray"], "--tasks"),
        (["--executor", "cloud", "--tasks", "3"], "no executor 'cloud'"),
        (["--executor", "slurm", "--tasks", "3"], "partition=VALUE is missing"),
        (["--executor", "slurm", "--tasks", "3", "--slurm", "partition"], "KEY=VALUE"),
        (["--executor", "ray", "--tasks", "3", "--slurm", "partition=x"], "not ray"),
        (["--executor", "ray", "--tasks", "3", "--units", "1/3"], "one of the two"),
        (["--executor", "datatrove", "--tasks", "0"], "--tasks"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    work: Work, run_command: Callable[..., tuple[int, str, str]], arguments: list[str], words: str
) -> None:
    command = ["prepare", "x.jsonl", "--tokenizer", work.tokenizer, "--out", "out", *arguments]
    code, _, err = run_command(*command)
    assert (code, err.count("\n")) == (2, 1), err
    assert words in err
    assert not (work.folder / "out").exists()
