"""A sweep that downloads: over connections that break, from a hub that is on this
machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import xarray

import tiny
from fake_hub import FakeHub, commit_of, output_of
from tl_coupling.studies.surveys import Settings, checkpoint_sweep

PYTHIA = "EleutherAI/pythia-14m"
WEIGHTS = "model.safetensors"
STEPS = (0, 1, 2, 4)
BACKENDS = [
    "bridge",
    pytest.param("hooked", marks=tiny.needs_hooked_transformer),
]

# Twice in one process: what a first sweep left undone, a second one does.
_SWEEPS = """
import json, sys, warnings
from tl_coupling.studies.surveys import checkpoint_sweep
from tl_coupling.studies.surveys import Settings

name, checkpoints, backend, folder = json.loads(sys.argv[1])
for i in range(2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = checkpoint_sweep(
            name,
            checkpoints,
            ["w3 w14 w15 w92", "w5 w6 w7"],
            settings=Settings(k=(2, 4)),
            folder=folder,
            backend=backend,
        )
    data.to_netcdf(f"{folder}/../sweep{i}.nc")
    said = [str(w.message) for w in caught if "failed and are left out" in str(w.message)]
    print(json.dumps({"said": said, "failed": json.loads(data.attrs["failed"])}))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for seed, revision in enumerate(("main", *(f"step{step}" for step in STEPS))):
        tiny.huggingface_model("gpt_neox", seed).save_pretrained(folder / revision)
        tiny.save_tokenizer(folder / revision)
    return folder


@pytest.fixture(scope="module")
def undisturbed(saved: Path) -> xarray.Dataset:
    """The same models, from their folders."""
    prompts = ["w3 w14 w15 w92", "w5 w6 w7"]
    return checkpoint_sweep(
        saved, prompts=prompts, settings=Settings(k=(2, 4)), backend="bridge"
    )


@pytest.fixture
def server(saved: Path) -> Iterator[FakeHub]:
    with FakeHub({PYTHIA: {folder.name: folder for folder in saved.iterdir()}}) as hub:
        yield hub


def ask(
    hub: FakeHub, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    try:
        with urlopen(
            Request(hub.url + path, method=method, headers=headers), timeout=10
        ) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except HTTPError as error:
        return error.code, dict(error.headers), b""


def sweep_twice(
    hub: FakeHub, tmp_path: Path, checkpoints: list[Any], backend: str
) -> list[dict[str, Any]]:
    """What two sweeps report, one after the other."""
    (tmp_path / "results").mkdir()
    arguments = json.dumps([PYTHIA, checkpoints, backend, str(tmp_path / "results")])
    lines = output_of(hub, tmp_path, _SWEEPS, arguments)
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_files_come_whole_with_the_headers_of_a_hub(
    server: FakeHub, saved: Path
) -> None:
    content = (saved / "step1" / WEIGHTS).read_bytes()
    for revision in ("step1", commit_of(PYTHIA, "step1")):
        status, headers, body = ask(server, f"/{PYTHIA}/resolve/{revision}/{WEIGHTS}")
        assert (status, body) == (200, content)
        assert headers["X-Repo-Commit"] == commit_of(PYTHIA, "step1")
        assert headers["X-Linked-Size"] == str(len(content))
    status, headers, body = ask(
        server, f"/{PYTHIA}/resolve/step1/{WEIGHTS}", Range="bytes=100-"
    )
    assert (status, body) == (206, content[100:])
    assert headers["Content-Range"] == f"bytes 100-{len(content) - 1}/{len(content)}"
    status, headers, body = ask(
        server, f"/{PYTHIA}/resolve/step1/{WEIGHTS}", method="HEAD"
    )
    assert (status, headers["Content-Length"], body) == (200, str(len(content)), b"")
    assert len(
        {
            ask(server, f"/{PYTHIA}/resolve/step{s}/{WEIGHTS}", "HEAD")[1]["ETag"]
            for s in STEPS
        }
    ) == len(STEPS)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"/{PYTHIA}/resolve/step1/nothing.json", "EntryNotFound"),
        (f"/{PYTHIA}/resolve/step3/{WEIGHTS}", "RevisionNotFound"),
        (f"/nobody/nothing/resolve/main/{WEIGHTS}", "RepoNotFound"),
        ("/api/models/nobody/nothing", "RepoNotFound"),
        (f"/api/models/{PYTHIA}/revision/step3", "RevisionNotFound"),
    ],
)
def test_what_is_not_there_is_said_as_a_hub_says_it(
    server: FakeHub, path: str, code: str
) -> None:
    status, headers, _ = ask(server, path)
    assert (status, headers["X-Error-Code"]) == (404, code)


def test_the_api_lists_what_is_there(server: FakeHub) -> None:
    info = json.loads(ask(server, f"/api/models/{PYTHIA}/revision/step2")[2])
    assert info["sha"] == commit_of(PYTHIA, "step2")
    listed = json.loads(
        ask(server, f"/api/models/{PYTHIA}/tree/step2?recursive=true")[2]
    )
    assert WEIGHTS in {entry["rfilename"] for entry in info["siblings"]} & {
        entry["path"] for entry in listed
    }
    branches = json.loads(ask(server, f"/api/models/{PYTHIA}/refs")[2])["branches"]
    assert {branch["name"] for branch in branches} == {
        "main",
        *(f"step{step}" for step in STEPS),
    }


_DOWNLOAD = """
import sys
from huggingface_hub import hf_hub_download
print(hf_hub_download(sys.argv[1], sys.argv[2], revision="step1"))
"""


def test_the_hubs_own_client_resumes_what_broke(
    server: FakeHub, saved: Path, tmp_path: Path
) -> None:
    server.faults["step1", WEIGHTS] = ["drop"]
    (path,) = output_of(server, tmp_path, _DOWNLOAD, PYTHIA, WEIGHTS)
    assert Path(path).read_bytes() == (saved / "step1" / WEIGHTS).read_bytes()
    assert server.requests.count(f"GET step1/{WEIGHTS}") == 2


def test_the_hubs_own_client_checks_sizes_and_nothing_else(
    server: FakeHub, saved: Path, tmp_path: Path
) -> None:
    """A limit of any sweep: wrong bytes in the right number are taken for the model,
    and stay in the cache.
    """
    server.faults["step1", WEIGHTS] = ["wrong"]
    sent = [
        Path(output_of(server, tmp_path, _DOWNLOAD, PYTHIA, WEIGHTS)[0]).read_bytes()
        for _ in range(2)
    ]
    right = (saved / "step1" / WEIGHTS).read_bytes()
    half = len(right) // 2
    assert (
        sent[0] == sent[1] == right[:half] + bytes(255 - byte for byte in right[half:])
    )


@pytest.mark.long("downloads over a loopback hub, in processes")
@pytest.mark.both_lines
@pytest.mark.parametrize("named", ["steps", "revisions"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sweep_survives_a_bad_connection_and_a_rerun_completes_it(
    server: FakeHub,
    undisturbed: xarray.Dataset,
    tmp_path: Path,
    backend: str,
    named: str,
) -> None:
    checkpoints: list[int | str] = list(STEPS)
    if named != "steps":
        checkpoints = [f"step{step}" for step in STEPS]
    server.faults = {
        ("step1", WEIGHTS): ["drop", "drop"],
        ("step2", WEIGHTS): ["short"],
        ("step4", WEIGHTS): ["error"],
    }
    first, second = sweep_twice(server, tmp_path, checkpoints, backend)
    assert not any(server.faults.values())

    assert list(first["failed"]) == [str(c) for c in checkpoints[2:]]
    short, error = first["failed"].values()
    assert "Consistency check failed" in short
    assert "500" in error
    assert all(
        "the hub failed or broke off the download; finished files are kept, try again"
        in message
        for message in (short, error)
    )
    assert len(first["said"]) == 1
    assert first["said"][0].startswith(
        f"2 of 4 checkpoints of {PYTHIA} failed and are left out: {checkpoints[2]}: ModelError: "
    )
    assert second == {"said": [], "failed": {}}

    sweeps = [xarray.load_dataset(tmp_path / f"sweep{i}.nc") for i in range(2)]
    assert [sweep["checkpoint"].values.tolist() for sweep in sweeps] == [
        checkpoints[:2],
        checkpoints,
    ]
    for sweep, n in zip(sweeps, (2, 4), strict=True):
        expected = undisturbed.isel(checkpoint=slice(n)).assign_coords(
            checkpoint=checkpoints[:n]
        )
        if backend == "bridge":
            xarray.testing.assert_equal(sweep, expected)
        else:
            # Another implementation of the same model: equal to rounding.
            xarray.testing.assert_allclose(sweep, expected, rtol=1e-4, atol=1e-5)
    # Two broken connections were taken up where they broke, the others asked for once a
    # sweep; nothing came twice.
    n_downloads = [server.requests.count(f"GET step{step}/{WEIGHTS}") for step in STEPS]
    assert n_downloads == [1, 3, 2, 2]


@pytest.mark.long("downloads over a loopback hub, in processes")
def test_a_step_that_the_hub_does_not_have_fails_alone(
    server: FakeHub, undisturbed: xarray.Dataset, tmp_path: Path
) -> None:
    """Step 8 is one that Pythia published, but not here."""
    for sweep in sweep_twice(server, tmp_path, [1, 8], "bridge"):
        assert list(sweep["failed"]) == ["8"]
        assert "at checkpoint 8" in sweep["failed"]["8"]
    sweep = xarray.load_dataset(tmp_path / "sweep1.nc")
    xarray.testing.assert_equal(sweep, undisturbed.sel(checkpoint=[1]))
