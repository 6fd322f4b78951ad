"""Models by each covariate, and the line through them."""

import numpy as np
import pandas
import pytest

from tl_coupling.studies.generalization import (
    covariate_lines,
    linear_fit,
    paper_table1,
)


def test_each_covariate_has_its_points_and_its_line():
    table = paper_table1()
    lines = {line.covariate: line for line in covariate_lines(table, "score")}
    assert list(lines) == [
        "log10(params_billion)",
        "n_layers",
        "d_model",
        "log10(training_tokens)",
    ]
    size = lines["log10(params_billion)"]
    np.testing.assert_array_equal(size.x, np.log10(table["params_billion"]))
    np.testing.assert_array_equal(size.y, table["score"])
    fit = linear_fit(table, "log10(params_billion)", "score", families="family")
    assert size.fit == fit
    # Models of 16 families; as if all were independent p would be 0.0021.
    assert size.fit.p == pytest.approx(0.076, abs=0.001)
    assert linear_fit(table, "log10(params_billion)", "score").p < 0.003


def test_parameters_are_drawn_once():
    table = paper_table1()
    both = table.assign(n_parameters=1e9 * table["params_billion"])
    names = [line.covariate for line in covariate_lines(both, "score")]
    assert names[0] == "log10(n_parameters)"
    assert "log10(params_billion)" not in names


def test_a_covariate_that_cannot_be_fitted_is_left_out_unless_it_was_asked_for():
    of_one_depth = paper_table1().query("n_layers == 32")
    usual = [line.covariate for line in covariate_lines(of_one_depth, "score")]
    assert "n_layers" not in usual
    assert "d_model" in usual
    with pytest.raises(ValueError, match="'n_layers' is the same for all"):
        covariate_lines(of_one_depth, "score", ["n_layers"])


def test_what_is_explained_is_no_covariate():
    table = pandas.DataFrame({"n_layers": [1, 2, 4, 8], "d_model": [8, 16, 16, 64]})
    assert [line.covariate for line in covariate_lines(table, "n_layers")] == [
        "d_model"
    ]
