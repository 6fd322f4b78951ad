"""Indices of formulas in the reference."""

import pytest

from sphinx_extensions import module


@pytest.mark.parametrize(
    ("formula", "drawn"),
    [
        ("J^l_{t1 t2} v", "J<l>(t1 t2) v"),
        ("A = U_{2,k}ᵀ J_1 V_{2,k}", "A = U(2,k)ᵀ J(1) V(2,k)"),
        ("U_2ᵀ ‖J_1‖_F² a_ij", "U(2)ᵀ ‖J(1)‖(F)² a(ij)"),
        ("X^{l+1} = X^l + f^l(X^l)", "X<l+1> = X<l> + f<l>(X<l>)"),
        # Names, and Python.
        ("null_p", "null_p"),
        ("√d_model · mean_t", "√d_model · mean_t"),
        ("x[:, 0]", "x[:, 0]"),
    ],
)
def test_indices_stand_below_and_above_the_line(formula: str, drawn: str) -> None:
    nodes = pytest.importorskip("docutils.nodes")
    docutils = pytest.importorskip("docutils.utils")
    document = docutils.new_document("page")
    document += nodes.paragraph("", "", nodes.literal("", formula))
    module("indices").set_indices(None, document, "api/spectra/index")
    marks = {"subscript": "({})", "superscript": "<{}>"}
    (code,) = document.findall(nodes.literal)
    assert drawn == "".join(
        marks.get(part.tagname, "{}").format(part.astext()) for part in code.children
    )


def test_pages_of_prose_keep_their_code() -> None:
    nodes = pytest.importorskip("docutils.nodes")
    docutils = pytest.importorskip("docutils.utils")
    document = docutils.new_document("page")
    document += nodes.paragraph("", "", nodes.literal("", "x_1 = 10^2"))
    module("indices").set_indices(None, document, "how-to/tables")
    assert not list(document.findall(nodes.superscript))
