"""The map to explore as a widget: what Python and the reader choose is the same."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import browser
import tl_coupling as tlc
from tl_coupling.interactive.explorer_data import ExplorerData

pytest.importorskip("anywidget", reason="anywidget is not installed")
traitlets = pytest.importorskip("traitlets")

# A model of Backbone's kind, as JupyterLab gives it to a widget: changes that are set are
# told to listeners, and go to Python when they are saved.
MODEL = """
const makeModel = values => {
  const listeners = {}, saved = [];
  let changed = {};
  const set = changes => { for (const [name, value] of Object.entries(changes)) {
    if (JSON.stringify(values[name]) === JSON.stringify(value)) continue;
    values[name] = value; changed[name] = value;
    (listeners[`change:${name}`] || []).forEach(listener => listener());
  } };
  return {get: name => values[name], set, saved,
    save_changes: () => { saved.push(changed); changed = {}; },
    on: (event, listener) => { (listeners[event] ||= []).push(listener); }};
};
"""


@pytest.fixture
def result(tiny_trace: tlc.Trace) -> tlc.CouplingMap:
    return tlc.depth_coupling(tiny_trace, k=4)


def test_pair_and_k_are_set_and_observed(result: tlc.CouplingMap) -> None:
    widget = tlc.explore(result, k=3)
    numbers = ExplorerData.of(result, 3, 16).numbers
    values = result.coupling(3)
    assert widget.k == 3
    # Of two layers, the pair with the larger value.
    assert widget.pair == max([(0, 1), (1, 0)], key=lambda pair: float(values[pair]))
    assert widget.numbers["runs"] == numbers["runs"]
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), ["pair", "k"])
    other = widget.pair[::-1]
    widget.pair = other
    widget.k = 2
    assert seen == [other, 2]
    assert repr(widget).endswith(f"; pair {other}, k = 2>")


def test_what_the_map_does_not_have_is_refused(result: tlc.CouplingMap) -> None:
    widget = tlc.explore(result)
    before = widget.pair
    with pytest.raises(traitlets.TraitError, match=r"rows 0 to 1 and columns 0 to 1"):
        widget.pair = (0, 2)
    with pytest.raises(traitlets.TraitError, match="`k` must be 1 to 4, got 5"):
        widget.k = 5
    with pytest.raises(traitlets.TraitError, match="`run` must be 0 to 0"):
        widget.run = 1
    assert (widget.pair, widget.k) == (before, 4)


def test_pairs_are_named_by_layers_and_positions(tiny_trace: tlc.Trace) -> None:
    tokens = tlc.self_coupling(tiny_trace, 0, 1, positions=(2, 5, 7), k=4)
    widget = tlc.explore(tokens)
    widget.pair = (7, 2)
    with pytest.raises(
        traitlets.TraitError, match="two tokens of the map, rows 2, 5, 7"
    ):
        widget.pair = (0, 2)


def test_the_layers_of_the_pair_are_decoded_once_each(
    tiny_trace: tlc.Trace, result: tlc.CouplingMap
) -> None:
    assert tlc.explore(result).directions == {}
    layers = []

    def decode(layer: int) -> tlc.directions.Decoded:
        layers.append(layer)
        return tlc.directions.decode(tiny_trace, layer, 4)

    widget = tlc.explore(result, decode=decode)
    widget.pair = (0, 0)
    widget.pair = (0, 1)
    widget.pair = (1, 0)
    assert sorted(layers) == [0, 1]
    assert set(widget.directions) == {"0", "1"}
    decoded = tlc.directions.decode(tiny_trace, 1, 4)
    first_tokens = [decoded.texts[token] for token in decoded.tokens[-1, 0, 0].tolist()]
    shown = widget.directions["1"][0]
    assert all(text.strip() in shown for text in first_tokens[:3])


def test_a_place_without_widgets_shows_a_picture(result: tlc.CouplingMap) -> None:
    data, _ = tlc.explore(result)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_without_anywidget_a_line_says_what_to_install(
    result: tlc.CouplingMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "tl_coupling.interactive.widget", None
    )
    with pytest.raises(ImportError, match=r'pip install "tl-coupling\[notebook\]"'):
        tlc.explore(result)


@pytest.fixture(scope="module")
def chromium() -> Any:
    with browser.chromium() as driver:
        yield driver


@pytest.mark.long("shows a page in a browser")
def test_the_browser_and_python_choose_the_same(
    chromium: Any, tmp_path: Path, result: tlc.CouplingMap
) -> None:
    widget = tlc.explore(result, k=3)
    values = {name: getattr(widget, name) for name in ("numbers", "directions", "pair")}
    values |= {"k": widget.k, "run": widget.run}
    module = widget._esm.replace("export default", "const widget =")
    page = tmp_path / "widget.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><style>{widget._css}</style>'
        f'<div id="place"></div><script>{MODEL}'
        f"{module}\nconst model = makeModel({json.dumps(values)});"
        "widget.render({model, el: document.querySelector('#place')});</script>",
        encoding="utf-8",
    )
    browser.open_page(chromium, page, 1000)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")

    def said() -> str:
        return str(
            chromium.execute_script(
                "return document.querySelector('[data-part=said]').textContent"
            )
        )

    row, column = widget.pair
    assert f"J₁ of layer {row}, top 3 singular vectors of layer {column}" in said()
    # Python sets the pair and k.
    chromium.execute_script(
        "model.set({pair: [arguments[0], arguments[1]]}); model.set({k: 2});",
        column,
        row,
    )
    assert f"J₁ of layer {column}, top 2 singular vectors of layer {row}" in said()
    assert f"{float(result.coupling(2)[column, row]):.3f}" in said()
    # The reader clicks on the first cell.
    chromium.execute_script(
        "const canvas = document.querySelector('[data-part=map]'), box = canvas."
        "getBoundingClientRect(); canvas.dispatchEvent(new MouseEvent('click', "
        "{clientX: box.left + 5, clientY: box.top + 5, bubbles: true}))"
    )
    assert chromium.execute_script("return model.saved.at(-1).pair") == [0, 0]
    assert chromium.execute_script("return model.get('k')") == 2
    # Python decodes.
    chromium.execute_script("model.set({directions: {0: ['one two']}})")
    shown = chromium.execute_script(
        "return document.querySelector('[data-part=directions]').textContent"
    )
    assert shown == "u1 of layer 0 writes one two"
    assert browser.complaints(chromium) == []
