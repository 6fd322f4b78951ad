"""Models by each covariate, and the line through them."""

import numpy as np
import pandas
import pytest

from tl_coupling.generalization import (
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
    assert size.fit == linear_fit(table, "log10(params_billion)", "score")


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
