"""Limits of memory are kept, what is spilled is the same, and plans say beforehand what
is measured.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import gate
from tl_coupling.jacobians import Jacobian, decomposed, fill_pairs
from tl_coupling.jacobians.budget import (
    DEFAULT_OPTIONS,
    Batch,
    Budget,
    JacobianOptions,
    MapSizes,
    format_bytes,
    n_bytes,
)
from tl_coupling.jacobians.decomposed import taken_together
from tl_coupling.jacobians.jacobian_cache import StoredMatrices
from tl_coupling.studies.surveys import Settings, measure_prompts
from tl_coupling.studies.surveys.units import Folder, Unit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("3GiB", 3 * 2**30), ("1.5 MB", 1_500_000), (" 2KiB ", 2048)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert n_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "3 apples", "1.2.3MB", "-4", 0, "0.1B"])
def test_what_is_no_size(tiny_trace: tlc.Trace, text: int | str) -> None:
    with pytest.raises(
        ValueError, match="`max_memory` must be a number of bytes, or a text such as"
    ):
        tlc.depth_coupling(tiny_trace, k=4, max_memory=text)


def test_sizes_in_words() -> None:
    assert [format_bytes(size) for size in (5, 2048, 3 * 2**20, 2**40)] == [
        "5 B",
        "2 KiB",
        "3 MiB",
        "1 TiB",
    ]


def test_at_work_are_a_jacobian_and_the_svds_of_others() -> None:
    """Four rows of 8 bytes at a time, and an SVD of 12 matrices in each thread; their
    own matrices are there, and one that waits.
    """
    budget = Budget(
        result=0,
        spectra=0,
        jacobians=0,
        matrix=100,
        seed_bytes=8,
        n_seeds=4,
        n_svds=3,
    )
    assert budget.working == (4 * 8 + 100) + 3 * 12 * 100 + 4 * 100
    assert replace(budget, n_svds=1).working == (4 * 8 + 100) + 12 * 100 + 2 * 100


@pytest.mark.parametrize(("n_threads", "expected"), [(1, 1), (2, 1), (8, 4), (64, 30)])
def test_as_many_svds_at_once_as_threads_beside_the_one_of_the_jacobians(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch, n_threads: int, expected
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    sizes = MapSizes.from_trace(tiny_trace, n_rows=30, n_columns=30, k=4)
    block = tiny_trace.blocks[0].call.module
    assert Budget.from_block(block, sizes, DEFAULT_OPTIONS).n_svds == expected


@pytest.mark.parametrize(("n_that_fit", "expected"), [(0, 1), (3, 3), (math.inf, 4)])
def test_no_more_svds_at_once_than_fit_into_half_of_what_is_free(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch, n_that_fit: float, expected
) -> None:
    of_one = 12 * 4 * tiny.D_MODEL**2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(
        "tl_coupling.jacobians.budget.free_memory", lambda _: 2 * n_that_fit * of_one
    )
    sizes = MapSizes.from_trace(tiny_trace, n_rows=30, n_columns=30, k=4)
    block = tiny_trace.blocks[0].call.module
    assert Budget.from_block(block, sizes, DEFAULT_OPTIONS).n_svds == expected


def test_a_plan_says_what_the_budget_decides(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory is scarce: fewer SVDs at a time, Jacobians in a file."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("tl_coupling.jacobians.budget.free_memory", lambda _: 0.0)
    n_layers = tiny.N_LAYERS
    sizes = MapSizes.from_trace(tiny_trace, n_layers, n_layers, k=4)
    block = tiny_trace.blocks[0].call.module
    budget = Budget.from_block(block, sizes, DEFAULT_OPTIONS)
    assert budget.n_svds == 1
    planned = tlc.plan(tiny_trace, 4)
    assert planned.working == budget.spectra + budget.working
    assert planned.jacobians == budget.jacobians
    assert planned.spilled
    assert not budget.keeps_in_memory


@pytest.mark.parametrize(("n_beside", "expected"), [(0, 1), (3, 4), (100, 101)])
@pytest.mark.parametrize("is_kept", [False, True])
def test_within_a_limit_as_many_jacobians_share_work_as_fit_beside_the_rest(
    tiny_trace: tlc.Trace, n_beside: int, expected: int, is_kept: bool
) -> None:
    sizes = MapSizes.from_trace(tiny_trace, n_rows=8, n_columns=8, k=4)
    sizes = replace(sizes, rows_are_columns=is_kept)
    block = tiny_trace.blocks[0].call.module
    budget = Budget.from_block(block, sizes, DEFAULT_OPTIONS)
    limit = budget.working_and_result + budget.jacobians + n_beside * budget.matrix
    options = JacobianOptions(max_memory=limit)
    assert Budget.from_block(block, sizes, options).n_sharing == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keeps_in_memory", [True, False])
def test_stored_matrices_give_back_what_was_put(
    dtype: torch.dtype, keeps_in_memory: bool
) -> None:
    matrices = torch.randn(5, 3, 3, dtype=dtype)
    stored = StoredMatrices(5, matrices[0], keeps_in_memory)
    for i in (0, 1, 4, 3, 2):
        stored.put(i, matrices[i].mT)
    assert (stored._file is None) is keeps_in_memory
    for i in (4, 0, 2, 1, 3):
        assert torch.equal(stored[i], matrices[i].mT)


def least(trace: tlc.Trace, compare, **options) -> int:
    """The least memory that a comparison says it needs."""
    with pytest.raises(
        ValueError,
        match=r"^`max_memory` must be at least .* for this comparison, got 1 B$",
    ) as caught:
        compare(trace, max_memory=1, **options)
    return int(1.01 * n_bytes(str(caught.value).split("least ")[1].split(" for")[0]))


@pytest.mark.parametrize(
    ("compare", "options"),
    [
        (tlc.depth_coupling, {"k": 4}),
        (tlc.self_coupling, {"k": 4, "layer": 0}),
        (tlc.self_coupling, {"k": 4, "layer": 0, "other_layer": 1}),
        (tlc.context_coupling, {"k": 4, "layer": 0, "other_layer": 1}),
    ],
)
def test_with_the_least_memory_the_result_is_the_same(
    tiny_trace: tlc.Trace, monkeypatch, compare, options
) -> None:
    expected = compare(tiny_trace, **options)
    kept: list[bool] = []
    make = StoredMatrices.__init__

    def noted(
        self: StoredMatrices, n: int, like: torch.Tensor, keeps_in_memory: bool
    ) -> None:
        kept.append(keeps_in_memory)
        make(self, n, like, keeps_in_memory)

    monkeypatch.setattr(StoredMatrices, "__init__", noted)
    result = compare(
        tiny_trace, max_memory=least(tiny_trace, compare, **options), **options
    )
    assert kept == [False] * (expected.row_layers == expected.col_layers)
    torch.testing.assert_close(
        result.coupling(), expected.coupling(), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        result.singular_values, expected.singular_values, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("options", [{}, {"other_layer": 1}])
def test_no_matrix_is_kept_while_the_next_is_computed(
    tiny_trace: tlc.Trace, monkeypatch, options
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    compute = decomposed.jacobians_of

    def noted(decompose, J: torch.Tensor, *given):
        seen.append(weakref.ref(J))
        return decompose(J, *given)

    def computed(*given, **named) -> Iterator[Jacobian]:
        jacobians = compute(*given, **named)
        while (jacobian := next(jacobians, None)) is not None:
            yield jacobian._replace(J=jacobian.J.clone())
            assert not [reference for reference in seen if reference() is not None]

    for name in ("svd", "singular_values"):
        monkeypatch.setattr(decomposed, name, partial(noted, getattr(decomposed, name)))
    monkeypatch.setattr(decomposed, "jacobians_of", computed)
    limit = least(tiny_trace, tlc.self_coupling, layer=0, k=4, **options)
    tlc.self_coupling(tiny_trace, 0, k=4, max_memory=limit, **options)
    assert len(seen) == tiny_trace.n_pos * (1 + bool(options))


def test_matrices_without_room_in_memory_are_in_a_file(
    tiny_trace: tlc.Trace, monkeypatch
) -> None:
    expected = tlc.depth_coupling(tiny_trace, k=4)
    make = torch.Tensor.new_empty

    def scarce(self: torch.Tensor, *size, **options) -> torch.Tensor:
        if size == (tiny.N_LAYERS, tiny.D_MODEL, tiny.D_MODEL):
            raise torch.OutOfMemoryError("out of memory")
        return make(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", scarce)
    assert torch.equal(tlc.depth_coupling(tiny_trace, k=4).matrices, expected.matrices)


@pytest.fixture(scope="module")
def streamed(folder_model: Path) -> nn.Module:
    return tlc.load_model(str(folder_model), memory="stream")


def test_prompts_share_a_sweep(
    streamed: nn.Module, folder_model: Path, monkeypatch
) -> None:
    from tl_coupling.models.weights import streaming

    prompts = [tiny.TOKENS, tiny.TOKENS[:5], tiny.TOKENS[2:]]
    resident = tlc.load_model(str(folder_model))
    expected = tlc.mean_depth_coupling(
        (tlc.trace(resident, prompt) for prompt in prompts), k=4
    )
    reads: list[str] = []
    read = streaming.Stored.read
    monkeypatch.setattr(
        streaming.Stored,
        "read",
        lambda self: (reads.append(self.tensor.name), read(self))[1],
    )
    result = tlc.mean_depth_coupling(
        [tlc.trace(streamed, prompt) for prompt in prompts], k=4
    )
    assert len(reads) == len(set(reads))
    assert torch.equal(result.coupling(), expected.coupling())
    assert torch.equal(result.spread(), expected.spread())
    monkeypatch.setattr(decomposed, "MOST_PROMPTS", 2)
    assert [
        len(group)
        for group in taken_together(
            (tlc.trace(streamed, prompt), []) for prompt in prompts
        )
    ] == [2, 1]
    assert [
        len(group)
        for group in taken_together(
            (tlc.trace(resident, prompt), []) for prompt in prompts
        )
    ] == [1, 1, 1]


def test_a_plan_of_a_name_a_model_and_a_trace(
    streamed: nn.Module, folder_model: Path
) -> None:
    trace = tlc.trace(streamed, tiny.TOKENS)
    of_name = tlc.plan(str(folder_model), 4, len(tiny.TOKENS), memory="stream")
    of_trace = tlc.plan(trace, 4)
    assert (
        of_name.flops == of_trace.flops == tlc.plan(streamed, 4, len(tiny.TOKENS)).flops
    )
    assert (
        of_name.block
        == of_trace.block
        == 4 * sum(p.numel() for p in streamed.blocks[0].parameters())
    )
    assert of_trace.streamed
    assert not tlc.plan(str(folder_model), 4).streamed
    n, d, k = tiny.N_LAYERS, tiny.D_MODEL, 4
    assert of_trace.result == 4 * n * n * k * k
    assert of_trace.jacobians == 4 * n * d * d
    assert of_trace.flops["pairs"] == 2 * n * n * (k * d * d + k * k * d)
    assert "weights, on disk" in str(of_trace)
    with pytest.raises(
        ValueError, match="`memory` and `dtype` are for a model given by its"
    ):
        tlc.plan(streamed, memory="stream")
    with pytest.raises(ValueError, match="`dtype` are for a model given by its name"):
        tlc.plan(streamed, dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "float64", "float32"])
def test_a_plan_of_a_name_in_a_dtype_is_that_of_the_model_loaded_in_it(
    folder_model: Path, dtype: torch.dtype | str
) -> None:
    loaded = tlc.load_model(str(folder_model), device="cpu", dtype=dtype)
    of_name = tlc.plan(str(folder_model), 4, 8, dtype=dtype)
    of_loaded = tlc.plan(loaded, 4, 8)
    parts = ("block", "result", "jacobians", "working", "flops")
    assert {part: getattr(of_name, part) for part in parts} == {
        part: getattr(of_loaded, part) for part in parts
    }
    in_float32 = tlc.plan(str(folder_model), 4, 8).weights
    itemsize = next(loaded.parameters()).element_size()
    assert 4 * of_name.weights == itemsize * in_float32


class NoModules(nullcontext):
    """In place of torch's tracker of modules, which puts hooks on tensors: the gate
    takes these for hooks that change gradients, and looks closer.
    """

    parents = ("Global",)


def counted(function, *given) -> tuple[object, int]:
    """What a function returns, and the flops of its matrix products as torch counts
    them.
    """
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    with counter:
        result = function(*given)
    return result, counter.get_total_flops()


@pytest.fixture
def one_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many moves the slope check takes depends on how stiff a block is: here the
    first decides.
    """

    def converges(deviations, scale, size):
        deviations([0.01])
        return np.ones(len(scale), dtype=bool)

    monkeypatch.setattr(gate, "converges", converges)


WIDE = {"hidden_size": 128, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        pytest.param(
            "llama",
            WIDE | {"head_dim": 16, "intermediate_size": 320},
            id="gated, shared keys",
        ),
        pytest.param("gpt2", {"n_embd": 128, "n_head": 8}, id="joint"),
        pytest.param(
            "phi3",
            WIDE | {"num_key_value_heads": 4, "intermediate_size": 512},
            id="joint and gated",
        ),
        pytest.param("gpt_neox", WIDE | {"intermediate_size": 512}, id="parallel"),
        pytest.param(
            "llama",
            {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 16},
            id="wide",
        ),
    ],
)
@pytest.mark.usefixtures("one_move")
def test_a_plan_counts_the_products_that_are_taken(
    architecture: str, changes: dict, tokenizer_folder: Path
) -> None:
    model, k = (
        tiny.bridge(tiny.huggingface_model(architecture, **changes), tokenizer_folder),
        4,
    )
    trace, of_trace = counted(tlc.trace, model, 2 * tiny.TOKENS)
    _, of_gate = counted(
        lambda: [block.refer_to([trace.n_pos - 1]) for block in trace.blocks]
    )
    J, of_jacobians = counted(tlc.block_jacobians, trace)
    spectra, of_svd = counted(tlc.svd, J, k + 1)
    A = J.new_empty(trace.n_layers, trace.n_layers, k, k)
    _, of_pairs = counted(fill_pairs, A, J, spectra.top(k), "ujv")
    planned = tlc.plan(trace, k).flops
    assert planned["trace"] == pytest.approx(of_trace, rel=0.01)
    assert planned["gate"] == pytest.approx(of_gate, rel=0.01)
    assert planned["jacobians"] == pytest.approx(of_jacobians, rel=0.05)
    assert planned["pairs"] == of_pairs
    # How many steps an iteration takes is not known before.
    assert planned["svd"] == pytest.approx(of_svd, rel=0.8)


def test_a_plan_of_other_blocks_counts_all_their_weights(
    tokenizer_folder: Path,
) -> None:
    model = tiny.bridge(tiny.huggingface_model("mixtral"), tokenizer_folder)
    weights = sum(
        p.numel() for block in model.blocks for p in block.parameters() if p.ndim > 1
    )
    assert tlc.plan(model, 4).flops["jacobians"] == 2 * tiny.D_MODEL * weights


@pytest.mark.usefixtures("one_move")
def test_weights_in_half_precision_are_gated_twice(tokenizer_folder: Path) -> None:
    model = tiny.bridge(
        tiny.huggingface_model("llama", dtype=torch.bfloat16), tokenizer_folder
    )
    in_float32 = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    _, of_gate = counted(
        lambda: [block.refer_to([trace.n_pos - 1]) for block in trace.blocks]
    )
    assert tlc.plan(trace, 4).flops["gate"] == pytest.approx(of_gate, rel=0.01)
    assert tlc.plan(in_float32, 4, trace.n_pos).flops["gate"] < 0.9 * of_gate


# Two blocks' worth of code warms up on the tiny model; the peak is that of a model of
# 12 blocks, 256 wide.
MEASURE = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import tl_coupling as tlc
from benchmarks.timing import resident
torch.set_num_threads(1)
warm = tlc.load_model(sys.argv[2] + "/warm", memory="stream")
tlc.depth_coupling(tlc.trace(warm, [1, 2, 3]), k=4)
Path("/proc/self/clear_refs").write_text("5")
before = resident()
model = tlc.load_model(sys.argv[1], memory="stream")
trace = tlc.trace(model, list(range(1, 17)))
result = tlc.depth_coupling(trace, k=10, progress=False)
print(json.dumps([resident(peak=True) - before, tlc.plan(trace, k=10).peak / 2**20]))
"""


@pytest.mark.long("streams a large model")
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="needs Linux to measure a peak of memory",
)
def test_the_peak_is_a_small_part_of_the_weights_and_as_planned(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    for folder, more in (
        (tmp_path / "warm", {}),
        (tmp_path / "model", sizes | {"num_hidden_layers": 24}),
    ):
        tiny.huggingface_model("llama", **more).save_pretrained(folder)
        tiny.save_tokenizer(folder)
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "model"),
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    peak, planned = json.loads(done.stdout.splitlines()[-1])
    weights = (
        sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
        / 2**20
    )
    assert weights > 150
    assert peak < 0.3 * weights
    assert planned / 2.5 < peak < 2.5 * planned


UNITS = [
    Unit(f"u{i}", {"prompt": prompt})
    for i, prompt in enumerate(("w3 w14 w15", "w9 w2 w6 w5", "w8 w9"))
]

# The survey of the test below, slow enough to be killed in it.
SLOW_SURVEY = """
import sys, time
import tl_coupling as tlc
from tl_coupling.studies.surveys import Settings, measure_prompts
from tl_coupling.studies.surveys.units import Folder, Unit

model_name, folder, *prompts = sys.argv[1:]

def measure(unit):
    time.sleep(2)
    model = tlc.load_model(model_name, memory="stream")
    return measure_prompts(model, unit.subject["prompt"], Settings(k=(4,)), progress=False)

units = [Unit(f"u{i}", {"prompt": prompt}) for i, prompt in enumerate(prompts)]
Folder(folder, {"what": "prompts"}).run(units, measure, progress=False)
"""


@pytest.mark.long("kills processes")
def test_a_survey_of_a_streamed_model_that_is_killed_resumes(
    folder_model: Path, tmp_path: Path
) -> None:
    def measure(unit: Unit) -> xarray.Dataset:
        model = tlc.load_model(str(folder_model), memory="stream")
        settings = Settings(k=(4,))
        return measure_prompts(model, unit.subject["prompt"], settings, progress=False)

    def statuses(folder: Path) -> list[str]:
        survey = Folder(folder, {"what": "prompts"})
        return [unit.status for unit in survey.run(UNITS, measure, progress=False)]

    prompts = [str(unit.subject["prompt"]) for unit in UNITS]
    command = [sys.executable, "-c", SLOW_SURVEY, str(folder_model)]
    (tmp_path / "killed").mkdir()
    killed = subprocess.Popen(
        [*command, str(tmp_path / "killed"), *prompts],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while not (tmp_path / "killed" / "u0.json").exists() and killed.poll() is None:
        time.sleep(0.02)
    killed.kill()
    assert killed.wait() < 0
    (tmp_path / "whole").mkdir()
    assert statuses(tmp_path / "whole") == ["computed"] * 3
    assert statuses(tmp_path / "killed") == ["kept", "computed", "computed"]
    for unit in UNITS:
        resumed = xarray.load_dataset(tmp_path / "killed" / f"{unit.key}.nc")
        undisturbed = xarray.load_dataset(tmp_path / "whole" / f"{unit.key}.nc")
        assert resumed.equals(undisturbed)
        assert '"memory": "stream"' in resumed.attrs["provenance"]


def test_a_batch_keeps_to_its_number_and_to_the_memory(tiny_trace) -> None:
    def batch(n_connections: int = 2, **options: object) -> tuple[int, int]:
        return Batch.that_fits(
            tiny_trace,
            n_connections,
            JacobianOptions(**options),  # type: ignore[arg-type]
        )

    # On a CPU one by one, unless it is asked for.
    assert batch() == (1, 1)
    assert batch(max_memory="1TB") == (1, 1)
    assert batch(batch=1) == (1, 1)
    assert batch(batch=2) == (2, 1)
    assert batch(batch=7) == (2, 3)
    assert batch(8, batch=7) == (7, 1)
    assert batch(batch=7, max_memory="1TB") == (2, 3)
    assert batch(batch=7, max_memory="1KB") == (1, 1)
    sizes = [
        batch(4, batch=40, max_memory=2**exponent).n_connections
        * batch(4, batch=40, max_memory=2**exponent).n_prompts
        for exponent in range(10, 40)
    ]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, 40)
    assert len(set(sizes)) > 3


@pytest.mark.parametrize("method", ["jacobians", "products"])
def test_minutes_are_work_by_rate(tiny_trace: tlc.Trace, method) -> None:
    planned = tlc.plan(tiny_trace, 4, method=method, rate=0.25)
    assert planned.minutes == pytest.approx(planned.work / 0.25e12 / 60)
    seconds = 60 * planned.minutes
    assert re.search(rf"at 0.25 Tflop/s, at least +{seconds:.3g} seconds", str(planned))
    slowly = tlc.plan(tiny_trace, 4, method=method, rate=0.25 * seconds / 6000)
    assert re.search(r"Tflop/s, at least +100 minutes", str(slowly))
    without = tlc.plan(tiny_trace, 4, method=method)
    assert without.minutes is None
    assert "Tflop/s" not in str(without)
    if method == "jacobians":
        assert planned.work == sum(planned.flops.values())
    else:
        # Rows count eight times: all but the trace, the gate and the pairs' products.
        n, d, k = tiny.N_LAYERS, tiny.D_MODEL, 4
        products_of_pairs = 2.0 * n**2 * k**2 * d
        flops = planned.flops
        rows = flops["triplets"] + flops["pairs"] - products_of_pairs
        others = flops["trace"] + flops["gate"] + products_of_pairs
        assert planned.work == pytest.approx(8 * rows + others)


def test_a_measured_rate_is_that_of_this_machine(tiny_trace: tlc.Trace) -> None:
    """Beside a product of other matrices, timed here."""
    measured = tlc.plan(tiny_trace, 4, rate="measured").rate
    X = torch.randn(1024, 1024)
    X @ X
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        X @ X
        seconds.append(time.perf_counter() - start)
    rate = 2 * 1024**3 / min(seconds) / 1e12
    # Other processes share the cores.
    assert rate / 8 < measured < 8 * rate


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), "fast"])
def test_other_rates_are_refused(tiny_trace: tlc.Trace, rate) -> None:
    with pytest.raises((ValueError, TypeError), match="`rate`"):
        tlc.plan(tiny_trace, 4, rate=rate)


def test_a_plan_says_what_to_reduce_where_it_does_not_fit(
    streamed: nn.Module, folder_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1000.0
    # The function `plan` goes by the name of its module.
    module = sys.modules["tl_coupling.jacobians.plan"]
    monkeypatch.setattr(module, "free_memory", lambda _: free)
    of_name = tlc.plan(str(folder_model), 4)
    assert of_name.available == free
    assert not of_name.fits()
    assert of_name.fits(of_name.peak)
    assert not of_name.fits(of_name.peak - 1)
    assert of_name.fits("1GiB")
    assert "does not fit in 1e+03 B: " in str(of_name)
    # Of a model that is loaded, the weights are no longer to be found room for.
    loaded = tlc.trace(tlc.load_model(str(folder_model), device="cpu"), tiny.TOKENS)
    of_loaded = tlc.plan(loaded, 4)
    assert of_loaded.available == free + of_loaded.weights
    assert tlc.plan(streamed, 4).available == free
    free = float("inf")
    assert "does not fit" not in str(tlc.plan(str(folder_model), 4))


@pytest.mark.parametrize(
    ("part", "advice"),
    [
        ("weights", 'memory="stream"'),
        ("jacobians", "`max_memory`, which keeps Jacobians in a file"),
        ("result", "fewer layers"),
        ("working", "`chunk_size`"),
    ],
)
def test_the_advice_is_about_the_largest_part(
    tiny_trace: tlc.Trace, part: str, advice: str
) -> None:
    planned = tlc.plan(tiny_trace, 4)
    large = replace(planned, available=2.0**30, **{part: 2**40})
    last_line = str(large).splitlines()[-1]
    assert last_line.startswith("  does not fit in 1 GiB: ")
    assert advice in last_line
    # Weights in 16 bits, whose blocks are copied, are not told to be.
    is_told = "16 bits" in str(replace(large, block=2**20)).splitlines()[-1]
    assert not is_told
    assert ("16 bits" in last_line) == (part == "weights")
