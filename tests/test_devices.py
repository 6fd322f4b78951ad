"""No computation leaves the device that the model is on; where there is no GPU, on a
device that tests make up.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
import tl_coupling as tlc

HERE, PACKAGE = Path(__file__).parent, Path(tlc.__file__).parent
FACTORIES = {
    "Generator",
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
}
FACTORIES |= {
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
# Calls that name no device, for a reason.
ON_THE_CPU = {
    # What a model is given, which is moved to it.
    "torch.as_tensor(batch[input_name])": "a prompt",
    "torch.as_tensor(value)": "an input beside it",
    "torch.tensor([ids[:_N_TOKENS]])": "token ids",
    "torch.eye(len(J), dtype=torch.float64)": "beside a matrix that was moved to the CPU",
    # Directions: their sums over prompts and their draws are on the CPU.
    "torch.tensor(is_matched)": "moved where it is used",
    "torch.tensor(token_ids)": "indices of a table",
    "torch.zeros(1)": "of a table",
    "torch.randn(n, d, generator=generator)": "drawn on the CPU, and moved",
    (
        "torch.randn(J.shape[1], N_PROBES, generator=generator, dtype=J.dtype)"
    ): "drawn on the CPU, and moved",
    "torch.randn(span.shape[1], rank, generator=generator)": "drawn, and moved",
    "torch.zeros(2, 2, d, d, dtype=torch.float64)": "a sum over prompts",
    "torch.zeros(2, len(indices), d, d)": "a sum over prompts",
    "torch.ones(n_layers, dtype=torch.float64)": "weights of such a sum",
    "torch.eye(d)": "draws are made on the CPU",
    (
        "torch.randint(n_draws, (2000, n_others), generator=generator)"
    ): "draws of shares that were moved to the CPU",
    "torch.tensor([0.025, 0.975], dtype=means.dtype)": "of these draws",
    "torch.full((2, rank), torch.nan)": "of such sums",
    "torch.tensor(energies)": "of such sums",
    # A subspace of one's own has the tensors of one that was found, empty.
    "torch.zeros(2, n_layers, d, 0)": "of such sums",
    "torch.zeros(2, 0, rank)": "of such sums",
    "torch.zeros(0, rank)": "of such sums",
    "torch.zeros(n_layers, d)": "of such sums",
    "torch.full((2, n_layers, 3), torch.nan)": "of such sums",
    "torch.eye(rank)": "beside a basis that was moved to the CPU",
    # Intervals and tables.
    "torch.tensor(intervals, dtype=torch.float64)": "of draws on the CPU",
    "torch.full((int(distances.max()) + 1, 2), torch.nan)": "of draws on the CPU",
    "torch.tensor(quantile_interval(means))": "of draws on the CPU",
    "torch.eye(n_layers, dtype=torch.bool)": "beside draws on the CPU",
    "torch.tensor(self.full.null())": "a number of a table",
    "torch.tensor(self.null(measure))": "a number of a table",
    (
        "torch.randn(d, width + _N_PROBES, generator=generator)"
    ): "drawn on the CPU, and moved",
    # Random numbers are the same on every device.
    "torch.Generator()": "drawn on the CPU and moved",
    (
        "torch.tensor(math.sqrt(1 - 1 / k), dtype=torch.float64)"
    ): "a single number goes with any device",
    (
        "torch.randn(J.shape[-2], width, generator=generator, dtype=J.dtype)"
    ): "moved in the next line",
    (
        "torch.randn(X.shape, generator=generator, dtype=torch.float64)"
    ): "drawn on the CPU, and moved",
    (
        "torch.randn(stream.shape[-1], generator=generator, dtype=torch.float64)"
    ): "moved in the next line",
    (
        "torch.randn(size, dtype=torch.float64, generator=generator)"
    ): "moved in the next line",
    "torch.eye(self.n_prompts, dtype=torch.bool)": "moved where it is used",
    (
        "torch.triu_indices(self.n_prompts, self.n_prompts, 1)"
    ): "indices of values on the CPU",
    "torch.zeros(d_model, d_model)": "of a lens, which is on the CPU",
    "torch.tensor(self.row_layers)": "their distances are moved",
    "torch.tensor(self.col_layers)": "their distances are moved",
    "torch.empty(self._size, dtype=self._like.dtype)": "read from a file and moved",
    (
        "torch.randn(*batch, d, columns or d, generator=generator, dtype=torch.float64)"
    ): "drawn on the CPU, as nulls are",
    "torch.randn(2, d_model, k, generator=generator, dtype=torch.float64)": (
        "nulls are drawn on the CPU"
    ),
    "torch.arange(n)": "nulls are drawn on the CPU",
    "torch.arange(_N_SUMS)": "nulls are drawn on the CPU",
    (
        "torch.randint(n_draws, (len(some), n_draws), generator=generator)"
    ): "nulls are drawn on the CPU",
    (
        "torch.randint(n_draws, (len(some), n_independent), generator=generator)"
    ): "nulls are drawn on the CPU",
    "torch.as_tensor(batch[name])": "token ids go to the model when it runs",
    "torch.arange(n_cols)": "nulls are drawn on the CPU",
    "torch.as_tensor(np.asarray(values, float))": "a comparison is held on the CPU",
    "torch.tensor(triplets.steps)": "a single number goes with any device",
    (
        "torch.tensor([*prefix, *text, *suffix], dtype=torch.long)"
    ): "token ids go to the model when it runs",
    "torch.empty(1, 0, 0, 1)": "only its shape is read",
    "torch.randn(d, d, generator=generator, dtype=X.dtype)": "moved in the next line",
    (
        "torch.zeros(n_steps, n_steps, dtype=torch.float64)"
    ): "Lanczos' small matrix is decomposed on the CPU",
    (
        "torch.tensor("
        "[block.largest_symmetric for block in blocks], dtype=torch.float64)"
    ): "eigenvalues are computed on the CPU",
    "torch.eye(len(S))": "eigenvalues are computed on the CPU",
    (
        "torch.tensor([draw.shuffled for draw in draws], dtype=torch.float64)"
    ): "results are on the CPU",
    "torch.tensor(layer_values, dtype=torch.float64)": "results are on the CPU",
    "torch.randperm(len(self.J), generator=generator)": "an order, as numbers",
    (
        "torch.full((n_draws + 1, n_layers, n_layers), torch.nan)"
    ): "results are on the CPU",
    "torch.zeros(n_layers, dtype=torch.float64)": "numbers beside the matrices",
    "torch.ones(1)": "a single number goes with any device",
    "torch.empty(0)": "only its dtype and device are read",
    "torch.zeros(len(self.X), dtype=torch.bool)": "part of an error message",
    "torch.tensor(numbers, dtype=x.dtype)": "drawn",
    (
        "torch.full((len(influence.layers), run.trace.n_pos), "
        "torch.nan, dtype=influence.frobenius_norm.dtype)"
    ): "drawn",
}


def without_a_device(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every call that makes a tensor or generator on torch's default
    device and leaves it there.
    """

    def calls(node: ast.AST, moved: bool) -> Iterator[ast.Call]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, ast.unparse(node.func.value)
            named = any(keyword.arg == "device" for keyword in node.keywords)
            if owner == "torch" and name in FACTORIES and not (named or moved):
                yield node
            yield from calls(node.func, moved or name == "to")
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "func", None):
                # An index is not moved with what it picks from.
                yield from calls(
                    child,
                    moved
                    and not (isinstance(node, ast.Subscript) and child is node.slice),
                )

    yield from (
        (node.lineno, ast.unparse(node)) for node in calls(ast.parse(source), False)
    )


def test_what_makes_a_tensor_names_its_device():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, call in without_a_device(path.read_text())
        if call not in ON_THE_CPU
    }
    assert not found, "give it `device=`, or a place in ON_THE_CPU with the reason"


def test_a_call_without_a_device_is_found():
    source = (
        "a = torch.arange(3)\nb = torch.zeros(3, device=x.device)\nc "
        "= torch.tensor([1]).abs().to(x)\n"
    )
    source += "def f(x):\n    return x[torch.ones(3, dtype=torch.bool)].to(x)\n"
    assert [line for line, _ in without_a_device(source)] == [1, 5]


@pytest.mark.long("runs a copy of the main tests in a process")
@pytest.mark.both_lines
def test_the_main_path_on_a_second_device():
    """In a process of its own, because torch knows a device for good. What depends on
    the line twice, the rest once.
    """
    chosen = (
        ["-k", "jacobians and (llama or hooked)"] if tiny.HAS_HOOKED_TRANSFORMER else []
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        HERE / "support" / "on_second_device.py",
        *chosen,
    ]
    done = subprocess.run(
        command, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
