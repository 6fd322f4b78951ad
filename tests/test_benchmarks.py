"""That every benchmark runs, on models of a few thousand weights, and that what it
counts is right.
"""

import argparse
import importlib
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig

import pages
import tl_coupling as tlc
from benchmarks import (
    across_tokens,
    beside_coupling,
    chance,
    depth_coupling,
    engines,
    expected,
    floor,
    gpu,
    jacobians,
    largest,
    lens,
    released_algorithm,
    stages,
    statistics,
    streaming,
    table,
    training,
)
from benchmarks.questions import QUESTIONS
from benchmarks.stages import random_model
from findings import findings
from tl_coupling.studies.generalization import paper_table1


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def test_depth_coupling_agrees_with_the_released_algorithm(
    folder_model, tmp_path, monkeypatch, capsys
):
    def here(worker: str, options: argparse.Namespace, n_tokens: int) -> dict:
        measured = depth_coupling.WORKERS[worker](
            options.model, n_tokens, torch.device("cpu"), options.repeats
        )
        return {"load_average_before": 0.0} | measured

    monkeypatch.setattr(released_algorithm, "KS", (2, 4))
    monkeypatch.setattr(depth_coupling, "in_own_process", here)
    arguments = [
        "--model",
        folder_model,
        "--tokens",
        4,
        6,
        "--ours-alone",
        6,
        "--device",
        "cpu",
        "--out",
        tmp_path,
    ]
    depth_coupling.main(list(map(str, arguments)))
    both, alone = read(tmp_path, "depth_coupling")["runs"]
    assert both["largest_difference"] < 1e-4
    assert both["ratio"]["end to end"] > 0
    assert "maps" not in both["ours"]
    assert alone.keys() == {"tokens", "shapes", "ours"}
    table.main(["--results", str(tmp_path)])
    assert "end to end" in capsys.readouterr().out
    assert "| end to end |" in (tmp_path / "table.md").read_text()


@pytest.mark.filterwarnings("ignore:.* tokens are '<s>'")
def test_the_floor_is_the_sum_of_its_parts(folder_model, tmp_path, capsys):
    arguments = ["--model", folder_model, "--tokens", 4, "--k", 4, "--prompts", 2]
    floor.main(list(map(str, [*arguments, "--repeats", 1, "--out", tmp_path])))
    results = read(tmp_path, "floor")
    for measured in (*results["runs"], results["survey"]):
        total = sum(measured["floor"].values())
        assert measured["ratio"] == pytest.approx(measured["seconds"] / total)
        assert min(measured["floor"].values()) > 0
    assert "ratio" in capsys.readouterr().out


def test_the_lens_of_the_benchmark_is_the_one_that_it_is_timed_beside(
    folder_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(lens, "SKIPPED", 2)
    arguments = ["--model", folder_model, "--tokens", 5, 6, "--out", tmp_path]
    lens.main(list(map(str, arguments)))
    prompts = read(tmp_path, "lens")["prompts"]
    assert [prompt["n_valid"] for prompt in prompts] == [2, 3]
    for prompt in prompts:
        assert prompt["largest_difference"] < 1e-5
        seconds = prompt["seconds"]
        assert prompt["ratio"] == seconds["fit"] / seconds["product_lens"]
    assert f"{prompts[0]['ratio']:.1f}" in capsys.readouterr().out


def test_what_else_is_measured_is_timed_beside_coupling(
    folder_model, tmp_path, monkeypatch, capsys
):
    # Its tokenizer knows no word of the others, so that they would be one prompt.
    monkeypatch.setattr(beside_coupling, "STEERED", ["w1 w2 w3", "w4 w5"])
    arguments = ["--model", folder_model, "--tokens", 4, "--k", 4, "--repeats", 1]
    beside_coupling.main(list(map(str, [*arguments, "--out", tmp_path])))
    seconds = read(tmp_path, "beside_coupling")["seconds"]
    assert list(seconds) == list(beside_coupling.measures(4))
    assert min(seconds.values()) > 0
    ratio = seconds["dynamics.products"] / seconds["depth_coupling"]
    assert f"{ratio:.1f}" in capsys.readouterr().out


def test_streaming_is_measured_beside_memory_and_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr(streaming, "in_own_process", streaming.measured)
    out = tmp_path / "out"
    arguments = ["--shape", "tiny", "--tokens", "6", "--k", "4", "--compare"]
    streaming.main([*arguments, "--accelerate", "--out", str(out)])
    results = read(out, "streaming_tiny")
    assert results["largest_difference"] < 1e-5
    assert results["difference_of_accelerate"] < 1e-5
    ours, accelerate, in_memory = results["runs"]
    # Of the embedding only rows are read, and each weight of a block once.
    assert 0 < ours["read_bytes"] < results["weights_bytes"]
    assert accelerate["read_bytes"] > 2 * results["weights_bytes"]
    assert in_memory["read_bytes"] == 0
    for run in (ours, accelerate, in_memory):
        parts = {**run["seconds"]}
        total = parts.pop("all")
        assert sum(parts.values()) == pytest.approx(total)


def test_what_to_expect_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64}
    config = GPTNeoXConfig(**shape, num_hidden_layers=2, num_attention_heads=2)
    config.architectures = ["GPTNeoXForCausalLM"]
    monkeypatch.setattr(expected, "configuration", lambda name: config)
    figures = expected.measured("pythia-160m", n_tokens=4, k=2, repeats=1)
    assert (figures["n_layers"], figures["d_model"]) == (2, 32)
    assert figures["seconds"] > 0
    weights = 2 * (4 * 32**2 + 2 * 32 * 64)
    assert figures["peak_mib"] * 2**20 > 4 * weights
    assert figures["planned_tflop"] * 1e12 > 2 * 4 * weights


RESULTS = Path(table.__file__).parent / "results"


def test_each_committed_file_stands_under_one_question_with_all_its_tables() -> None:
    results = table.read(RESULTS)
    names = [name for question in QUESTIONS for name in question.commands]
    assert sorted(names) == sorted(results)
    page = table.page(results)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [f"## {question.text}" for question in QUESTIONS]
    for figures in results.values():
        for drawn in table.tables_of(figures):
            assert table.markdown(drawn) in page


def test_answers_have_the_figures_of_the_tables() -> None:
    page = table.page(table.read(RESULTS))

    def figures(name: str) -> dict:
        return json.loads((RESULTS / f"{name}.json").read_text())

    first = figures("depth_coupling")["runs"][0]
    seconds = [first[side]["seconds"]["end to end"] for side in ("released", "ours")]
    assert (
        f"by {seconds[0] / seconds[1]:.1f} × at {first['shapes']['n_pos']} tok" in page
    )
    widest = figures("jacobians")["runs"][-1]
    assert widest["shapes"]["d_model"] == 4096
    assert f"4096 takes {widest['seconds']['jacobians']:.1f} s" in page
    others = figures("beside_coupling")["seconds"]
    ratio = others["directions.steer"] / others["depth_coupling"]
    assert f"{ratio:.1f} times (`directions.steer`)" in page
    (block,) = [run for run in figures("gpu")["runs"] if run["shape"] == "llama-3-70b"]
    stages = sum(block["seconds"][name] for name in ("gate", "jacobian", "svd"))
    assert f"{stages:.3g} s on NVIDIA H100" in page


class Parsed(Exception):
    """A command's options were read."""


COMMANDS_OF_RESULTS = {
    name: command
    for question in QUESTIONS
    for name, command in question.commands.items()
}


@pytest.mark.parametrize("name", COMMANDS_OF_RESULTS)
def test_the_command_of_a_file_of_results_can_be_typed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(parser, *arguments):
        raise Parsed(parse_args(parser, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    words = shlex.split(COMMANDS_OF_RESULTS[name].removeprefix("OMP_NUM_THREADS=1 "))
    assert words[:2] == ["python", "-m"]
    monkeypatch.setattr("sys.argv", words[2:])
    with pytest.raises(Parsed) as stopped:
        importlib.import_module(words[2]).main()
    (options,) = stopped.value.args
    figures = json.loads((RESULTS / f"{name}.json").read_text())
    assert words[2] == f"benchmarks.{figures['benchmark']}"
    # What was given is what was measured.
    if name == "large_shapes":
        assert options.shapes == [run["shape"] for run in figures["runs"]]
    if name == "largest":
        assert options.model == figures["runs"][0]["model"]
        assert options.tokens == figures["runs"][0]["n_pos"]
    if name.startswith("expected"):
        assert list(options.models) == [run["model"] for run in figures["runs"]]
        assert options.tokens == figures["n_pos"]
    assert Path(options.out).resolve() == Path("benchmarks/results").resolve()


def test_each_length_of_prompt_has_a_file_of_its_own() -> None:
    assert expected.file_name(64) == "expected"
    assert expected.file_name(1024) == "expected_1024"
    results = table.read(Path(expected.__file__).parent / "results")
    names = {
        figures["n_pos"]: name
        for name, figures in results.items()
        if figures["benchmark"] == "expected"
    }
    assert names
    assert all(expected.file_name(n_pos) == name for n_pos, name in names.items())


def test_the_page_on_long_prompts_has_the_committed_figures() -> None:
    results = table.read(Path(expected.__file__).parent / "results")
    page = (pages.ROOT / "docs/how-to/long-prompts.md").read_text()
    for name in ("expected_1024", "expected"):
        run = results[name]["runs"][0]
        assert run["model"] == "gpt2"
        assert f"{run['seconds']:.1f} seconds" in page
        assert f"{run['peak_mib'] / 2**10:.1f} GiB" in page


@pytest.mark.parametrize(
    ("name", "in_the_paper"),
    [("gpt2", "openai-community/gpt2"), ("pythia-1b", "EleutherAI/pythia-1b")],
)
def test_shapes_are_those_of_the_papers_table(name: str, in_the_paper: str) -> None:
    config = expected.configuration(name)
    known = paper_table1().set_index("model").loc[in_the_paper]
    assert config.num_hidden_layers == known.n_layers
    assert config.hidden_size == known.d_model


@pytest.mark.filterwarnings("ignore:this bridge was changed since it was made")
def test_jacobians_and_their_table_and_picture(folder_model, tmp_path, capsys):
    arguments = [
        "--model",
        folder_model,
        "--tokens",
        5,
        "--depths",
        1,
        "--widths",
        64,
        128,
    ]
    arguments += ["--k", 4, "--repeats", 1, "--device", "cpu", "--out", tmp_path]
    jacobians.main(list(map(str, arguments)))
    results = read(tmp_path, "jacobians")
    sizes = [
        [run["shapes"][name] for name in ("n_layers", "d_model", "n_pos")]
        for run in results["runs"]
    ]
    assert sizes == [[2, 32, 5], [1, 32, 5], [1, 64, 5], [1, 128, 5]]
    for run in results["runs"]:
        ratio = run["seconds"]["jacobians"] / sum(run["bare_products"].values())
        assert run["jacobians_over_bare"] == pytest.approx(ratio)
        assert run["jacobians_and_gate_over_bare"] > ratio
    assert {"date", "load_average", "cpu", "cpu_threads", "versions"} <= results[
        "environment"
    ].keys()
    capsys.readouterr()
    table.main(["--results", str(tmp_path)])
    rows = [
        line
        for line in (tmp_path / "table.md").read_text().splitlines()
        if line.startswith("| random |")
    ]
    assert [row.split(" | ")[2] for row in rows] == ["64", "128"]
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_every_run_and_its_ratio():
    def run(n_pos: int, **sides: float) -> dict:
        seconds = {
            side: {"seconds": {"end to end": value}} for side, value in sides.items()
        }
        return {"shapes": {"n_pos": n_pos}} | seconds

    runs = [run(10, released=12.0, ours=2.0), run(256, ours=4.0)]
    left, *_ = table.picture({"depth_coupling": {"model": "m", "runs": runs}}).axes
    drawn = [line.get_xydata().tolist() for line in left.lines[:2]]
    assert drawn == [[[10, 12]], [[10, 2], [256, 4]]]
    assert [text.get_text() for text in left.texts] == ["6.0 ×"]


def test_a_benchmark_without_tables_has_its_numbers_listed(monkeypatch):
    monkeypatch.setattr(table, "_module", lambda _: SimpleNamespace())
    results = {
        "benchmark": "b",
        "environment": {"cpu": "c"},
        "runs": [{"seconds": 1.23456, "tokens": [1, 2]}],
    }
    (listed,) = table.tables_of(results)
    assert "| runs, 0, seconds | 1.235 |" in table.markdown(listed)
    assert "tokens" not in table.markdown(listed)


def test_the_table_of_nothing_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        table.main(["--results", str(tmp_path)])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_lines_for_a_gpu_run_on_a_cpu(tmp_path):
    arguments = ["--device", "cpu", "--shapes", "tiny", "tiny-experts"]
    arguments += ["--tokens", "8", "--k", "4", "--peak-size", "64", "--whole", "tiny"]
    gpu.main([*arguments, "--out", str(tmp_path)])
    results = read(tmp_path, "large_shapes")
    runs = results["runs"]
    assert [run["shape"] for run in runs] == ["tiny", "tiny-experts"]
    assert results["whole"][0]["depth_coupling"] > 0
    for run in runs:
        assert all(seconds > 0 for seconds in run["seconds"].values())
        assert run["largest_difference_of_sigma"] < 1e-5
        assert run["planned_tflop_of_model"]["4"]["products"] > 0
    standard, experts = (run["share_of_peak"] for run in runs)
    assert standard > 0
    assert experts is None


def test_the_largest_of_every_way_are_the_same(folder_model, tmp_path):
    arguments = ["--model", str(folder_model), "--tokens", "6", "--k", "2"]
    largest.main([*arguments, "--layers", "1", "--out", str(tmp_path)])
    (run,) = read(tmp_path, "largest")["runs"]
    assert run["largest_difference"] < 1e-5
    assert all(seconds > 0 for seconds in run["seconds"].values())
    assert run["ratios"]["products"] == 1


def test_bare_products_count_what_they_do():
    cfg = SimpleNamespace(d_model=12, d_mlp=20, n_heads=3, d_head=4)
    products = stages.bare_products(cfg, n_pos=7)
    expected = {
        "MLP": 2 * 12 * 20 * 12,
        "attention output": 2 * 12 * 12 * 12,
        "keys": 2 * 3 * 4 * 7 * 4,
    }
    expected |= {"queries": 2 * 3 * 4 * 4 * 12, "MLP after attention": 2 * 12**3}
    for name, product in products.items():
        with FlopCounterMode(display=False) as counted:
            product.ready(torch.device("cpu"))()
        assert counted.get_total_flops() == product.flops == expected[name], name


def test_studies_whose_truth_is_known(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        statistics,
        "COVERED",
        tuple(
            design
            for design in statistics.COVERED
            if sum(design.sizes) == 12 and design.errors != "t with 3 df"
        ),
    )
    monkeypatch.setattr(
        statistics, "LOOKED_AT", (statistics.Design((2, 2, 1, 1, 1), True),)
    )
    arguments = [
        "--studies",
        150,
        "--resampled",
        4,
        "--resamples",
        50,
        "--looked-at",
        4,
        "--permutations",
        19,
        "--untrained",
        0,
    ]
    # With so few studies what is wanted may be missed: it is said then.
    status = statistics.main([*map(str, arguments), "--out", str(tmp_path)])
    results = read(tmp_path, "statistics")
    assert status == bool(statistics.missed(results))
    assert [row["design"] for row in results["coverage"]] == [
        "12 models",
        "12 models, variance .2 + x²",
        "12 models in 3 families of 4",
    ]
    alone, *others = (row["coverage"] for row in results["coverage"])
    # At 95 % three standard errors of 150 are 5 %.
    assert min(alone["of the study"], alone["textbook"]) > 0.9
    for coverage in others:
        assert coverage["of the study"] > 0.9 > coverage["textbook"]
    # It costs some width where the variance is equal.
    assert 1.05 < results["coverage"][0]["width"] < 1.4
    (false,) = results["familywise"]
    assert (false["design"], false["n_looks"]) == (
        "7 models in 5 families of 1 to 2",
        180,
    )
    assert false["false_positives"]["own p, any look"] == 1
    assert [row["reliability"] for row in results["attenuation"]] == [
        0.9,
        0.8,
        0.7,
        0.5,
    ]
    reliable = next(statistics.attenuations(20))
    assert reliable["share_corrected"] == 1
    assert reliable["coverage"] > 0.8
    found_ones = reliable["said"], reliable["raw"], reliable["corrected"]
    assert found_ones == pytest.approx((0.9, 0.9, 1), abs=0.06)
    wrong = {
        "coverage": [
            {"design": "d", "is_wanted": True, "coverage": {"of the study": 0.9}}
        ]
    }
    wrong["familywise"] = [
        {
            "design": "e",
            "is_wanted": True,
            "false_positives": {"max-statistic, any look": 0.07},
        }
    ]
    assert [miss.split(":")[0] for miss in statistics.missed(wrong)] == ["d", "e"]
    assert "coverage of the 95 %" in capsys.readouterr().out


@pytest.mark.long("simulates hundreds of maps")
def test_what_chance_gives_is_counted(monkeypatch):
    """The Jacobians of the benchmark are those of the package, by a way of its own."""
    for name, value in (
        ("N_LAYERS", (2,)),
        ("N_PROMPTS", 2),
        ("CARRIED_LAYERS", (3,)),
        ("CARRIED_KS", (2,)),
    ):
        monkeypatch.setattr(chance, name, value)
    untrained = list(chance.null_coverage(1))
    assert len(untrained) == 4
    assert {len(row["coverage"]) for row in untrained} == {4}
    (carried,) = chance.carried_coverage(n_seeds=1, n_means=60)
    assert carried["least"] > 0.8
    config = chance.configs(2)["GPTNeoXForCausalLM"]
    config.architectures = ["GPTNeoXForCausalLM"]
    model = random_model(config, "neox", torch.device("cpu"))
    tokens = torch.arange(1, 9)[None]
    expected = chance.block_jacobians(chance.untrained(config, 0), tokens)
    measured = tlc.block_jacobians(tlc.trace(model, tokens))
    assert torch.allclose(measured, expected, atol=1e-5 * float(expected.abs().max()))
    results = {
        "coverage": [],
        "familywise": [],
        "untrained": [{"design": "f", "coverage": {"1 × k = 2": 0.9}}],
        "carried": [{"design": "g", "coverage": 0.9}],
    }
    starts = [line.split(":")[0] for line in statistics.missed(results)]
    assert starts == ["f, 1 × k = 2", "carriers, g"]


def test_across_tokens(folder_model, tmp_path, monkeypatch):
    monkeypatch.setattr(across_tokens, "LAYERS", (0, 1))
    monkeypatch.setattr(across_tokens, "LONG", 3)
    across_tokens.main(
        [
            "--model",
            str(folder_model),
            "--tokens",
            "3",
            "--k",
            "4",
            "--out",
            str(tmp_path),
        ]
    )
    assert (
        read(tmp_path, "across_tokens")["run"][
            "largest_relative_difference_of_jacobians"
        ]
        < 1e-4
    )


def test_engines(folder_model, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "w1 w2 w3", "task": "t"}\n')
    arguments = [
        "--model",
        folder_model,
        "--prompts",
        prompts,
        "--per-task",
        1,
        "--k",
        4,
        "--engines",
        "here",
    ]
    # Set by the benchmark for good.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert engines.main([*map(str, arguments), "--out", str(tmp_path)]) == 0
    assert read(tmp_path, "engines")["engines"]["here"]["identical"]


def test_the_pages_say_what_the_committed_studies_cover():
    root = Path(statistics.__file__).parents[1]
    results = json.loads((root / "benchmarks/results/statistics.json").read_text())
    covered = {row["design"]: row["coverage"] for row in results["coverage"]}
    page = (root / "docs/how-to/statistics.md").read_text()
    table = page.split("| design |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 7
    for line in table:
        design, *cells = line.strip("| ").split(" | ")
        names = ("of the study", "bootstrap", "textbook")
        assert cells == [f"{covered[design][name]:.3f}" for name in names]
    of_six_or_more = [
        coverage["of the study"]
        for design, coverage in covered.items()
        if int(design.split()[0]) >= 6
    ]
    low, high = 100 * min(of_six_or_more), 100 * max(of_six_or_more)
    assert f"contain it in {low:.1f} to {high:.1f} % of" in findings()


def test_coupling_in_a_training_loop_is_timed_beside_a_step(tmp_path, capsys):
    arguments = ["--widths", 16, "--repeats", 1, "--out", tmp_path]
    training.main(list(map(str, arguments)))
    seconds = read(tmp_path, "training")["seconds"]["16"]
    assert min(seconds.values()) > 0
    assert list(seconds)[:2] == ["step", "measure"]
    assert "times a step" in capsys.readouterr().out
