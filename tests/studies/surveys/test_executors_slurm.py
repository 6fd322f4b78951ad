"""Jobs that submitit hands to a real SLURM of one node on this machine."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xarray

import slurm_cluster
import tiny
from tl_coupling.prompts import Prompt
from tl_coupling.studies.surveys import Settings, Survey, open_survey, run_survey
from tl_coupling.studies.surveys.executors import Preemptible, slurm_executor

submitit = pytest.importorskip("submitit")
needs_slurm = pytest.mark.skipif(
    slurm_cluster.why_not() is not None, reason=str(slurm_cluster.why_not())
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with slurm_cluster.local_slurm(tmp_path_factory.mktemp("slurm")):
        yield


COSTS = ["seconds", "peak_memory"]


def wait_until(ready: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, f"{what} was wanted within {timeout:.0f} s"
        time.sleep(0.05)


def processes_of(cluster: Path) -> list[int]:
    """Daemons, jobs and commands alike: all that were started with its
    configuration.
    """
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_CONF={cluster}/".encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


def test_without_its_commands_the_error_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_cluster, "_path", lambda: str(tmp_path))
    with pytest.raises(
        OSError, match=r"wanted munged, slurmctld, .*slurmd slurm-client munge$"
    ):
        slurm_cluster.local_slurm(tmp_path / "cluster").__enter__()
    assert not (tmp_path / "cluster").exists()


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_the_cluster_leaves_no_process_and_no_variable_behind(tmp_path: Path) -> None:
    variables, cluster = dict(os.environ), tmp_path / "cluster"
    stubborn = f"trap '' TERM; touch {tmp_path}/runs; while :; do sleep 0.1; done"

    def block_that_fails() -> None:
        with slurm_cluster.local_slurm(cluster):
            subprocess.run(
                ["sbatch", "--quiet", "--output=/dev/null", f"--wrap={stubborn}"],
                check=True,
            )
            wait_until((tmp_path / "runs").exists, "the job")
            assert len(processes_of(cluster)) > 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block_that_fails()
    wait_until(lambda: not processes_of(cluster), "the end of all processes", timeout=2)
    assert dict(os.environ) == variables


# How submitit hears of preemption, and how a cluster preempts that sends no such
# signal.
PREEMPTIONS = (["scancel", "--signal=USR2"], ["scontrol", "requeue"])


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_preempted_jobs_go_on_where_they_were(slurm: None, tmp_path: Path) -> None:
    # Defined here, so that its code travels with the job.
    def work(folder: Path, n: int) -> int:
        """Writes files one after another, pauses until it may go on, and leaves alone
        those that exist.
        """
        with (folder / "starts").open("a") as starts:
            starts.write("start\n")
        for i in range(n):
            while i == 2 and not (folder / "go on").exists():
                time.sleep(0.05)
            if not (folder / f"{i}").exists():
                (folder / f"{i}").write_text(f"{i * i}")
        return sum(int((folder / f"{i}").read_text()) for i in range(n))

    folders = [tmp_path / command[0] for command in PREEMPTIONS]
    executor = submitit.AutoExecutor(folder=tmp_path / "log", cluster="slurm")
    with executor.batch():
        for folder in folders:
            folder.mkdir()
        jobs = [executor.submit(Preemptible(work), folder, 4) for folder in folders]
    wait_until(
        lambda: all((folder / "1").exists() for folder in folders), "the first files"
    )
    written = [modified(folder, "[01]") for folder in folders]
    for command, job in zip(PREEMPTIONS, jobs, strict=True):
        subprocess.run([*command, job.job_id], check=True)
    wait_until(
        lambda: all((f / "starts").read_text() == "start\n" * 2 for f in folders),
        "the second starts",
    )
    assert not any(job.done(force_check=True) for job in jobs)
    for folder in folders:
        (folder / "go on").touch()
    assert [job.result() for job in jobs] == [0 + 1 + 4 + 9] * 2
    assert [modified(folder, "[01]") for folder in folders] == written


def modified(folder: Path, files: str) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(files)}


def queue() -> list[str]:
    command = ["squeue", "--noheader", "--array", "--format=%i"]
    return sorted(
        subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.split()
    )


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    models = {}
    for seed, architecture in enumerate(("llama", "gpt_neox", "llama")):
        folder = tmp_path_factory.mktemp(architecture)
        tiny.huggingface_model(architecture, seed).save_pretrained(folder)
        tiny.save_tokenizer(folder)
        models[f"{architecture}-{seed}"] = str(folder)
    prompts = [Prompt("w3 w14 w15 w92", "a", "sums"), Prompt("w5 w6 w7", "b")]
    return Survey(models, prompts, settings=Settings(k=(2, 4)))


@pytest.fixture
def executor(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Values depend on the number of threads; jobs inherit the variable.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # submitit asks for states every 2 s at first and every 10 min at last, and looks 15
    # s for the result of a job that died, in case the disk is slow.
    monkeypatch.setattr(submitit.SlurmJob.watcher, "_delay_s", 1)
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 1)
    wait_until(lambda: not queue(), "the end of earlier jobs")
    return slurm_executor(tmp_path / "log")


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_a_rerun_of_a_survey_does_what_killed_and_cancelled_jobs_did_not(
    survey: Survey, executor: Any, tmp_path: Path
) -> None:
    here = run_survey(survey)
    # One after the other: while the second runs, the first is finished and the third
    # waits.
    executor.update_parameters(slurm_array_parallelism=1)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run_survey, survey, tmp_path / "results", executor)
        wait_until(
            lambda: logs(tmp_path).count("Loading pickle") == 2,
            "the start of the second job",
        )
        running, waiting = queue()
        subprocess.run(["scancel", waiting], check=True)
        subprocess.run(["scancel", "--signal=KILL", running], check=True)
        with pytest.warns(UserWarning, match="2 of 3 units failed"):
            partial = first.result()
    names = list(survey.models)
    assert list(partial["model"]) == names[:1]
    failed = json.loads(partial.attrs["failed"])
    assert sorted(failed) == sorted(f"{name}@main" for name in names[1:])
    assert all(
        error.startswith("UncompletedJobError: Job ") for error in failed.values()
    )
    partial.close()
    finished = modified(tmp_path / "results", "*.nc")
    assert list(finished) == [f"{names[0]}@main.nc"]

    executor.update_parameters(slurm_array_parallelism=2)
    data = run_survey(survey, tmp_path / "results", executor).load()
    assert logs(tmp_path).count("Loading pickle") == 4
    assert modified(tmp_path / "results", "*.nc").items() >= finished.items()
    xarray.testing.assert_equal(data.drop_vars(COSTS), here.drop_vars(COSTS))
    assert data.attrs == here.attrs


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "log").glob("*.out"))


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_an_interrupted_survey_leaves_no_job_behind(
    survey: Survey, executor: Any, tmp_path: Path
) -> None:
    seen = []

    def interrupt(units: Any) -> Any:
        seen.extend(queue())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_survey(survey, tmp_path / "results", executor, interrupt)
    assert len(seen) == 3
    wait_until(lambda: not queue(), "the end of the jobs")


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_the_command_hands_its_units_to_the_cluster(
    survey: Survey, executor: Any, call: Any, tmp_path: Path
) -> None:
    here = run_survey(replace(survey, models=dict(list(survey.models.items())[:1])))
    ((name, path),) = [
        (model, path) for model, path in survey.models.items() if model in here["model"]
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(
            json.dumps({"id": p.id, "task": p.task, "prompt": p.prompt})
            for p in survey.prompts
        )
    )
    options = {"model": f"{name}={path}", "prompts": prompts, "k": [2, 4]}
    slurm = "partition=local,cpus_per_task=1,timeout_min=5"
    output = call("survey", **options, slurm=slurm, out=tmp_path / "out").out
    data = open_survey(tmp_path / "out" / "units").load()
    xarray.testing.assert_equal(data.drop_vars(COSTS), here.drop_vars(COSTS))
    assert f"{float(here['mean_coupling'].sel(k=2).mean()):.3f}" in output
    assert list((tmp_path / "out" / "jobs").glob("*_submission.sh"))


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_parameters_that_slurm_does_not_take_are_said(
    slurm: None, tmp_path: Path
) -> None:
    for options in ({"prtition": "local"}, {"timeout_min": "12h"}):
        with pytest.raises(
            ValueError, match=f"SLURM does not accept .*{next(iter(options))}.*: "
        ) as caught:
            slurm_executor(tmp_path, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.long("starts a cluster")
@pytest.mark.xdist_group("slurm")
@needs_slurm
def test_work_that_slurm_refuses_is_one_line(
    survey: Survey, executor: Any, tmp_path: Path
) -> None:
    executor.update_parameters(slurm_partition="nowhere")
    with pytest.raises(
        OSError, match=r"^the work could not be submitted \(FailedJobError: .*nowhere"
    ) as caught:
        run_survey(survey, tmp_path / "results", executor)
    assert "\n" not in str(caught.value)


def test_a_machine_without_slurm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match="there is no SLURM here: wanted its command `sbatch`"
    ):
        slurm_executor(tmp_path)
