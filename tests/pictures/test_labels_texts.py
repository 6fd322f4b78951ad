"""Every text of every picture can be read: none leaves the canvas or lies on another.

Each `plot_*` draws the example of its docstring, and results that have been hard.
"""

import doctest
import io
from contextlib import nullcontext

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

import tl_coupling as tlc
from drawn_texts import drawn_texts, mixed_up, smallest_letters, unreadable
from made_up_results import random_map
from tl_coupling.comparisons import CouplingMap
from tl_coupling.pictures import labels

PLOTS = [name for name in tlc.plots.__all__ if name.startswith("plot_")]

# Pixels of a page on a telephone.
TELEPHONE = 358

pytestmark = pytest.mark.usefixtures("pyplot_untouched")


@pytest.mark.parametrize("name", PLOTS)
def test_the_example_of_each_plot_can_be_read(name, request, monkeypatch):
    monkeypatch.chdir(request.getfixturevalue("_example_folder"))
    names = request.getfixturevalue("_example_names")
    example = doctest.DocTestFinder(recurse=False).find(
        getattr(tlc.plots, name), name, globs=dict(names)
    )[0]
    said = io.StringIO()
    doctest.DocTestRunner().run(example, out=said.write, clear_globs=False)
    figures = [plt.figure(number) for number in plt.get_fignums()]
    assert figures, said.getvalue()
    problems = [problem for figure in figures for problem in unreadable(figure)]
    assert problems == []
    assert [problem for figure in figures for problem in mixed_up(figure)] == []
    assert min(smallest_letters(figure, TELEPHONE) for figure in figures) >= 9


PROMPT = "What is the capital of France ? The capital is"


def france(kind: str, n: int, **provenance) -> CouplingMap:
    """Return a map of n tokens of a prompt, or of n layers."""
    tokens = [f" {word}" for word in (PROMPT.split() * 4)[:n]]
    return random_map(
        layers=range(n),
        k=10,
        kind=kind,
        str_tokens=tokens,
        prompt=" ".join(tokens),
        model="organisation-of-some/model-with-a-long-name-7b",
        **provenance,
    )


@pytest.mark.parametrize("n", [5, 10, 16, 40])
@pytest.mark.parametrize("kind", ["depth", "self", "context"])
def test_maps_and_matrices_can_be_read_alone_and_beside_the_twin(kind, n):
    """With `tokens --untrained` the label below the matrices was cut."""
    ends = {"fixed": "output", "position": 4} if kind == "context" else {}
    result = france(kind, n, **ends)
    with tlc.plots.off_screen():
        for untrained in (None, result):
            drawn = [
                tlc.plot_coupling(result, untrained=untrained).figure,
                tlc.plot_coupling_matrices(result, untrained=untrained),
            ]
            for figure in drawn:
                assert unreadable(figure) == []
                assert smallest_letters(figure, TELEPHONE) >= 9


def test_lines_of_layers_can_be_read():
    maps = {"trained": france("depth", 30), "untrained": france("depth", 30)}
    plots = [
        tlc.plots.plot_locality,
        tlc.plots.plot_singular_values,
        tlc.plots.plot_inverse_singular_values,
        lambda maps: tlc.plots.plot_adjacency(maps["trained"]),
    ]
    with tlc.plots.off_screen():
        for plot in plots:
            assert unreadable(plot(maps).figure) == []


def test_what_cannot_be_read_is_found():
    figure = Figure(figsize=(2, 2))
    figure.text(0.9, 0.5, "cut at the edge")
    figure.text(0.1, 0.1, "first")
    figure.text(0.12, 0.1, "second")
    # Turned, these boxes overlap and their letters do not.
    figure.text(0.2, 0.6, "turned", rotation=45)
    figure.text(0.35, 0.6, "beside", rotation=45)
    assert unreadable(figure) == [
        "cut: 'cut at the edge'",
        "one across the other: 'first', 'second'",
    ]


def test_what_is_written_otherwise_is_found():
    figure = Figure(figsize=(5, 3))
    texts = {
        "ρ = .46": "a decimal without its 0",
        "ρ -0.46": "a hyphen for a minus",
        "K = 8": "K for k",
        "qwen2.5-q4_k_m": "the name of a file",
        "out/real/a.gguf": "the name of a file",
    }
    right = "ρ −0.46, k = d/8, 2.5-fold, SmolLM2-135M, layers 3-5, $10^{-1}$"
    for row, words in enumerate([*texts, right]):
        figure.text(0.1, row / 8, words)
    expected = {f"{what}: {words!r}" for words, what in texts.items()}
    assert set(mixed_up(figure)) == expected | {"the name of a file: 'out/real/a.gguf'"}


def test_the_smallest_letters_are_those_of_the_smallest_text():
    figure = Figure(figsize=(4.6, 2))
    figure.text(0.1, 0.1, "small", fontsize="small")
    figure.text(0.1, 0.5, "medium", fontsize="medium")
    # 8.33 points, of 72 in an inch of 358 / 4.6 pixels.
    assert smallest_letters(figure, TELEPHONE) == pytest.approx(9.005, abs=0.01)


def test_a_title_has_a_small_second_line_until_it_is_replaced():
    wide = Figure(figsize=(8, 4)).subplots()
    ax = tlc.plot_coupling(france("depth", 5), ax=wide)
    (first, head, _), (second, small, _) = sorted(
        (text for text in drawn_texts(ax.figure) if text[0] in ax.get_title()),
        key=lambda text: -text[1].y0,
    )[:2]
    assert first.startswith("Depth coupling · k = 10 · mean")
    assert "model-with-a-long-name-7b" in second
    assert head.height > 1.2 * small.height
    assert head.y0 > small.y1
    ax.set_title("mine")
    texts = [words for words, *_ in drawn_texts(ax.figure)]
    assert "mine" in texts
    assert second not in texts


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("owner/name-1.7B", "owner/name-1.7B"),
        ("models/width16/step2", "width16/step2"),
        ("/home/somebody/models/width16/step2", "width16/step2"),
        ("out/real/qwen/qwen2.5-0.5b-q4_k_m.gguf", "qwen2.5-0.5b-q4_k_m"),
        ("qwen2.5-0.5b-q4_k_m.gguf", "qwen2.5-0.5b-q4_k_m"),
    ],
)
def test_titles_have_names_and_no_paths(model: str, shown: str) -> None:
    assert labels.short_path(model) == shown
    (title,) = labels.heading("What", [{"model": model}]).splitlines()[1:]
    assert title == shown


def test_letters_stay_text_in_a_pdf_outside_the_style_of_papers():
    for surroundings in (nullcontext, tlc.plots.off_screen, tlc.plots.paper_style):
        with surroundings():
            figure = tlc.plot_coupling(france("depth", 5)).figure
        pdf = io.BytesIO()
        figure.savefig(pdf, format="pdf")
        assert b"/Type3" not in pdf.getvalue()
        assert b"/TrueType" in pdf.getvalue() or b"/CIDFontType2" in pdf.getvalue()


def test_trained_and_untrained_have_colours_and_markers_of_their_own():
    maps = {"trained": france("depth", 5), "untrained": france("depth", 5)}
    trained, untrained, _ = tlc.plots.plot_locality(maps).lines
    assert trained.get_color() == labels.TRAINED
    assert untrained.get_color() == labels.UNTRAINED
    assert trained.get_marker() != untrained.get_marker()
    looks = {tuple(labels.numbered_look(i).values()) for i in range(49)}
    assert len(looks) == 49
