"""Views as data, and as a real browser without a network shows them."""

import itertools
import json
import math
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from circuitsvis.utils.render import RenderedHTML
from torch import Tensor

import browser
import tl_coupling as tlc
from tl_coupling.interactive import (
    circuitsvis_script,
    show_layers_by_token,
    show_token_coupling,
    show_tokens,
    visible_token,
)

HOSTILE = (
    "<s>",
    "</script>",
    "\n",
    "\"q'",
    "法国",
    "🇫🇷",
    "&amp;",
    " a b",
    "<img src=x onerror=window.hit=1>",
    "‮abc",
    "",
)
PAGE = (
    '<!doctype html><meta charset="utf-8"><meta name="viewport" '
    'content="width=device-width"><title>views</title>'
)


class Widgets(HTMLParser):
    """The circuitsvis elements of a piece of HTML: (name, props)."""

    def __init__(self, source: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-circuitsvis" in given:
            self.found.append(
                (str(given["data-circuitsvis"]), json.loads(str(given["data-props"])))
            )


def token_map(
    matrices: Tensor,
    rows: list[int],
    cols: list[int],
    tokens: tuple[str, ...] | None,
    kind: str = "self",
) -> tlc.CouplingMap:
    k = matrices.shape[-1]
    return tlc.CouplingMap(
        matrices=matrices,
        singular_values=torch.linspace(2, 1, k).expand(len(rows), k),
        frobenius_norms=torch.full((len(rows),), 5.0),
        d_model=32,
        row_layers=(3,) * len(rows),
        col_layers=(4,) * len(cols),
        row_positions=tuple(rows),
        col_positions=tuple(cols),
        kind=kind,
        orientation="ujv",
        provenance={"model": "m"} | ({"str_tokens": list(tokens)} if tokens else {}),
    )


@pytest.fixture
def square() -> tlc.CouplingMap:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        matrices = torch.randn(3, 3, 4, 4, dtype=torch.float64) + 3 * torch.eye(
            4, dtype=torch.float64
        )
    matrices[2, 0] = 0
    return token_map(matrices, [0, 1, 2], [0, 1, 2], HOSTILE)


def naive_coupling(A: Tensor) -> float:
    total = sum(float(A[i, j]) ** 2 for i in range(len(A)) for j in range(len(A)))
    off = sum(
        float(A[i, j]) ** 2 for i in range(len(A)) for j in range(len(A)) if i != j
    )
    return 1 - math.sqrt(off / total)


def test_a_view_is_circuitsvis_and_asks_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a view opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    view = show_tokens(["a", "b"], torch.tensor([1.0, 2.0]))
    assert isinstance(view, RenderedHTML)
    sources = {
        view._repr_html_(),
        view.__html__(),
        view.show_code(),
        view.local_src,
        view.cdn_src,
    }
    assert len(sources) == 1
    source = sources.pop()
    assert "unpkg" not in source
    assert "sourceMappingURL" not in source
    assert "src=" not in source.split("<script", 1)[0]
    assert source.count("<script type=") == source.count("</script") == 1


def test_a_view_is_saved_as_a_page_and_printed_in_a_line(tmp_path: Path) -> None:
    view = show_tokens(["é", "<b>"], torch.tensor([1.0, 2.0]))
    assert str(view) == repr(view) == "<View with 1 circuitsvis widgets>"
    path = view.save(tmp_path / "tokens.html")
    source = path.read_bytes().decode("utf-8")
    assert source.startswith(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    )
    assert '<meta name="viewport"' in source
    assert view.body in source
    with pytest.raises(OSError, match=r"cannot write .*tokens\.html"):
        view.save(tmp_path / "no-such-folder" / "tokens.html")


def test_bodies_are_the_same_for_the_same_data() -> None:
    first, again = (
        show_tokens(["a", "b"], torch.tensor([1.0, 2.0])).body for _ in range(2)
    )
    assert first == again


@pytest.mark.filterwarnings("ignore:.*is 0 for 1 matrices")
def test_a_token_map_holds_the_coupling_of_every_pair(square: tlc.CouplingMap) -> None:
    view = show_token_coupling({"a": square, "b": square}, k=(2, 4))
    widgets = Widgets(view.body).found
    assert 4 * (1 - math.sqrt(1 / 2)) > 1, (
        "so the colours reach to 1, the bound, as they do for every small k"
    )
    assert [name for name, _ in widgets] == ["AttentionPattern"] * 4
    for (_, props), k in zip(widgets, (2, 4, 2, 4), strict=True):
        assert props["maskUpperTri"] is False
        for row, col in itertools.product(range(3), repeat=2):
            cell = props["attention"][row][col]
            if (row, col) == (2, 0):
                assert cell == {"text": "undefined", "shade": -1}
            else:
                expected = naive_coupling(square.matrices[row, col, :k, :k])
                assert float(cell["text"]) == pytest.approx(expected, rel=1e-3)
                assert cell["shade"] == pytest.approx(expected, abs=1e-4)


def test_the_colours_reach_to_the_largest_value_or_to_four_times_the_null() -> None:
    for noise, full in ((0.01, None), (10.0, 4 * (1 - math.sqrt(7 / 8)))):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            A = noise * torch.randn(2, 2, 8, 8) + torch.eye(8)
        coupling = torch.tensor(
            [[naive_coupling(A[i, j]) for j in range(2)] for i in range(2)]
        )
        ((_, props),) = Widgets(
            show_token_coupling(token_map(A, [0, 1], [0, 1], None)).body
        ).found
        shades = torch.tensor(
            [[cell["shade"] for cell in row] for row in props["attention"]]
        )
        torch.testing.assert_close(
            shades, coupling / (full or coupling.max()), atol=1e-4, rtol=0
        )


def test_tokens_and_values_are_text_where_scripts_do_not_run() -> None:
    text = re.sub(
        r"<[^>]*>", "", show_tokens(["It", " is"], torch.tensor([1.0, 2.5])).body
    )
    assert "It 1 · is 2.5" in text


def test_a_selection_keeps_its_positions_and_leaves_the_other_pairs_out() -> None:
    A = torch.ones(2, 3, 2, 2) + torch.eye(2)
    (_, props), *rest = Widgets(
        show_token_coupling(token_map(A, [5, 1], [1, 7, 3], HOSTILE)).body
    ).found
    assert not rest
    assert [token.split(":")[0] for token in props["tokens"]] == ["5", "1", "7", "3"]
    texts = [[cell["text"] for cell in row] for row in props["attention"]]
    value = f"{naive_coupling(A[0, 0]):.4g}"
    assert texts[0] == texts[1] == ["not compared", value, value, value]
    assert texts[2] == texts[3] == ["not compared"] * 4


def test_tokens_without_text_go_by_their_position() -> None:
    (_, props), *_ = Widgets(
        show_token_coupling(
            token_map(torch.ones(2, 2, 2, 2), [4, 6], [4, 6], None)
        ).body
    ).found
    assert props["tokens"] == ["4", "6"]


def test_an_unbounded_measure_is_coloured_up_to_its_largest_value(
    square: tlc.CouplingMap,
) -> None:
    (_, props), *_ = Widgets(
        show_token_coupling(square, measure="miscoupling").body
    ).found
    values = square.miscoupling()
    for row, col in itertools.product(range(3), repeat=2):
        expected = float(values[row, col] / values.max())
        assert props["attention"][row][col]["shade"] == pytest.approx(
            expected, abs=1e-4
        )


@pytest.mark.parametrize(
    ("values", "shades"),
    [
        ([1.0, 2.0, 3.0], [0, 0.5, 1]),
        ([-1.0, 0.0, 4.0], [-0.25, 0, 1]),
        ([-4.0, 0.0, 1.0], [-1, 0, 0.25]),
        ([2.0, 2.0, 2.0], [0, 0, 0]),
        ([1.0, math.nan, 3.0], [0, None, 1]),
        ([1.0, math.inf, 3.0], [0, 1, 1]),
        ([-math.inf, 0.0, -3.0], [-1, 0, -1]),
        ([math.nan] * 3, [None] * 3),
    ],
)
def test_shades_of_tokens(values: list[float], shades: list[float | None]) -> None:
    ((name, props),) = Widgets(
        show_tokens(list("abc"), torch.tensor(values)).body
    ).found
    assert name == "ColoredTokens"
    assert [cell["shade"] for cell in props["values"]] == shades
    texts = [cell["text"] for cell in props["values"]]
    assert texts == [
        "undefined" if math.isnan(value) else f"{value:.4g}".replace("-", "−")
        for value in values
    ]


@pytest.mark.parametrize(
    ("values", "ends", "colors"),
    [
        ([1.0, 3.0], ("1", "3"), ["white", "#b2182b"]),
        ([-1.0, 4.0], ("−4", "4"), ["#2166ac", "white", "#b2182b"]),
    ],
)
def test_a_color_bar_has_its_ends_labelled(
    values: list[float], ends: tuple[str, str], colors: list[str]
) -> None:
    body = show_tokens(["a", "b"], torch.tensor(values)).body
    (bar,) = re.findall(r'<span class="tlc-bar">(.*?)</span>', body)
    (gradient,) = re.findall(r"linear-gradient\(to right, (.*?)\)", bar)
    assert gradient.split(", ") == colors
    assert tuple(re.sub("<.*?>", "", bar).split()) == ends


def test_layers_by_token_share_one_scale_and_begin_with_the_first() -> None:
    values = torch.arange(6.0).reshape(3, 2)
    body = show_layers_by_token(["a", "b"], values, layers=["x", "y", "z"]).body
    assert re.findall(r"<b>(\w)</b>", body) == ["x", "y", "z"]
    shades = [
        [cell["shade"] for cell in props["values"]] for _, props in Widgets(body).found
    ]
    assert shades == [[0.0, 0.2], [0.4, 0.6], [0.8, 1.0]]


def test_of_many_layers_some_are_shown_and_all_are_behind_a_click() -> None:
    body = show_layers_by_token(["a"], torch.arange(30.0)[:, None]).body
    shown, behind = body.split("<details>")
    assert re.findall(r"<b>(\d+)</b>", shown) == [str(i) for i in range(0, 30, 3)]
    assert re.findall(r"<b>(\d+)</b>", behind) == [str(i) for i in range(30)]
    assert "<summary>all 30 rows</summary>" in behind
    few = show_layers_by_token(["a"], torch.arange(10.0)[:, None]).body
    assert "<details>" not in few


def test_named_values_by_layer_share_one_scale() -> None:
    body = show_layers_by_token(
        ["a"], {"x": torch.tensor([[0.0]]), "y": torch.tensor([[1.0], [4.0]])}
    ).body
    assert [props["values"][0]["shade"] for _, props in Widgets(body).found] == [
        0.0,
        0.25,
        1.0,
    ]


def test_names_are_text_not_html(square: tlc.CouplingMap) -> None:
    for view in (
        show_tokens(["a"], {"<b id=x>": torch.tensor([1.0])}),
        show_layers_by_token(
            ["a"], {"<b id=x>": torch.ones(1, 1)}, layers=["<b id=x>"]
        ),
        show_token_coupling({"<b id=x>": square}, measure="miscoupling"),
    ):
        assert "&lt;b id=x&gt;" in view.body
        assert "<b id=x>" not in view.body


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("\n", "↵"),
        (" the", " the"),
        ("", "∅"),
        ("\x00", "\\x00"),
        ("‮x", "\\u202ex"),
        ("👩‍🚀é", "👩‍🚀é"),
    ],
)
def test_visible_tokens(token: str, shown: str) -> None:
    assert visible_token(token) == shown


def test_no_token_is_read_as_html() -> None:
    class Reader(HTMLParser):
        tags, text = 0, ""

        def handle_starttag(self, *_: Any) -> None:
            self.tags += 1

        def handle_endtag(self, *_: Any) -> None:
            self.tags += 1

        def handle_data(self, data: str) -> None:
            self.text += data

    for token in ("<s>", "</s>", "<!--", "<?x", "&lt;", "&#60;", "a<b>c"):
        reader = Reader()
        reader.feed(visible_token(token))
        reader.close()
        assert reader.tags == 0
        assert reader.text.replace("\u2060", "") == token


def test_bad_input_says_what_was_wanted(square: tlc.CouplingMap) -> None:
    depth = token_map(square.matrices, [0, 0, 0], [0, 0, 0], HOSTILE, kind="depth")
    one = torch.tensor([1.0])
    for call, message in (
        (lambda: show_token_coupling(depth), "kind 'depth': use `plot_coupling`"),
        (lambda: show_token_coupling({}), "at least one map"),
        (lambda: show_token_coupling(square, k=()), "one k"),
        (lambda: show_token_coupling(square, k=9), r"`k` must lie in \[1, 4\]"),
        (
            lambda: show_tokens(["a", "b"], one),
            r"shape \[2\], the last axis for tokens, got \[1\]",
        ),
        (lambda: show_tokens(["a"], {}), "at least one tensor"),
        (
            lambda: show_layers_by_token(["a", "b"], torch.ones(2, 1)),
            r"shape \[n_rows 2\], .* got \[2, 1\]",
        ),
        (lambda: show_layers_by_token(["a"], torch.ones(0, 1)), r"\[n_rows 1\]"),
        (lambda: show_layers_by_token(["a"], {}), "`values` is empty"),
        (
            lambda: show_layers_by_token(["a"], torch.ones(2, 1), layers=[1]),
            r"shape \[1 1\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_script_can_stand_inside_an_element() -> None:
    assert "</script" not in circuitsvis_script().lower()
    assert "<!--" not in circuitsvis_script()


@pytest.fixture(scope="module")
def chromium() -> Any:
    with browser.chromium() as driver:
        yield driver


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.filterwarnings("ignore:.*is 0 for 1 matrices")
def test_views_of_hostile_tokens_in_a_browser(
    chromium: Any, tmp_path: Path, square: tlc.CouplingMap, width: int
) -> None:
    values = torch.linspace(-1, 3, len(HOSTILE))
    values[3] = math.nan
    views = (
        show_token_coupling(square, k=(2, 4)),
        show_tokens(HOSTILE, {"signed": values}),
        show_layers_by_token(HOSTILE, {"by layer": values.expand(3, -1)}),
    )
    page = tmp_path / "views.html"
    page.write_text(
        PAGE + "".join(view._repr_html_() for view in views), encoding="utf-8"
    )
    browser.open_page(chromium, page, width)
    assert browser.requested(chromium) == [page.as_uri()]
    assert browser.complaints(chromium) == []
    assert not browser.scrolls_sideways(chromium)
    assert browser.spilling(chromium) == []
    assert chromium.execute_script("return window.hit ?? null") is None
    assert (
        chromium.execute_script("return document.querySelectorAll('canvas').length")
        == 2
    )
    rows = chromium.execute_script(
        "return [...document.querySelectorAll('.colored-tokens')]"
        ".map(row => [...row.children].filter(e => e.tagName == 'SPAN').map(e => e.textContent))"
    )
    shown = [visible_token(token).replace(" ", "\u00a0") for token in HOSTILE]
    assert rows == [shown] * 4

    for index in (0, 3, 8):
        token = chromium.execute_script(
            "const t = document.querySelectorAll('.colored-tokens')[0].children[arguments[0]];"
            "t.scrollIntoView({block: 'center'}); const box = t.getBoundingClientRect();"
            "return [box.left + Math.min(8, box.width / 2), box.top + box.height / 2]",
            index,
        )
        browser.move_to(chromium, *token)
        value = f"{float(values[index]):.4g}".replace("-", "−")
        expected = "undefined" if index == 3 else value
        tooltip = "return document.querySelector('.colored-tokens > div')?.textContent ?? null"
        browser.wait(
            chromium,
            f"return ({tooltip.removeprefix('return ')})?.endsWith({json.dumps(expected)})",
        )
        browser.move_to(chromium, 1, 1)
        browser.wait(chromium, f"return ({tooltip.removeprefix('return ')}) === null")


@pytest.mark.long("shows a page in a browser")
@pytest.mark.filterwarnings("ignore:.*is 0 for 1 matrices")
def test_the_pointer_over_a_map_reads_every_pair(
    chromium: Any, tmp_path: Path, square: tlc.CouplingMap
) -> None:
    page = tmp_path / "map.html"
    show_token_coupling(square).save(page)
    browser.open_page(chromium, page, 1280)
    chromium.execute_script(
        "const draw = CanvasRenderingContext2D.prototype.fillText; window.texts = [];"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest)"
        "{ texts.push(String(text)); return draw.call(this, text, ...rest); }"
    )
    left, top, width, height = chromium.execute_script(
        "const b = document.querySelector('canvas').getBoundingClientRect(); "
        "return [b.left, b.top, b.width, b.height]"
    )
    places = [
        (left + width * (i + 2.5) / 10.5, top + height * (j + 0.3) / 14)
        for i, j in itertools.product(range(8), range(10))
    ]
    colors = [
        chromium.execute_script(
            (
                "return "
                "[...document.querySelector('canvas').getContext('2d').getImageData(...arguments, "
                "1, 1).data]"
            ),
            round(x - left),
            round(y - top),
        )
        for x, y in places
    ]
    seen, shown_as = {}, {}
    for place, color in zip(places, colors, strict=True):
        browser.move_to(chromium, *place)
        texts = "\n".join(chromium.execute_script("return texts.splice(0)"))
        # The last one: on its way the pointer may have crossed another cell.
        if found := re.findall(
            r"\((\d), (\d)\)\nColumn: (.*)\nRow: (.*)\nValue: (.*)", texts
        ):
            dest, src, src_token, dest_token, value = found[-1]
            seen[int(dest), int(src)] = value
            shown_as[int(dest), int(src)] = color[:3]
            assert (src_token, dest_token.strip()) == tuple(
                visible_token(HOSTILE[int(i)]) for i in (src, dest)
            )
    expected = {
        (row, col): "undefined"
        if (row, col) == (2, 0)
        else f"{naive_coupling(square.matrices[row, col]):.4g}"
        for row, col in itertools.product(range(3), repeat=2)
    }
    assert seen == expected
    # Undefined is grey; the larger a value, the less blue is left in its red.
    assert shown_as.pop((2, 0)) == [187, 187, 187]
    by_value = sorted(shown_as, key=lambda pair: float(seen[pair]))
    assert by_value == sorted(shown_as, key=lambda pair: -shown_as[pair][2])


@pytest.mark.long("shows a page in a browser")
def test_colours_of_tokens(chromium: Any, tmp_path: Path) -> None:
    page = tmp_path / "tokens.html"
    values = torch.tensor([-4.0, 0.0, 2.0, 4.0, math.nan])
    show_tokens(list("abcde"), values).save(page)
    browser.open_page(chromium, page, 1280)
    blue, white, pale, red, undefined = chromium.execute_script(
        "return [...document.querySelectorAll('.colored-tokens > "
        "span > span')].map(e => getComputedStyle(e))"
        ".map(style => [style.backgroundColor, style.backgroundImage, style.color])"
    )
    assert (red[0], white[0], blue[0]) == (
        "rgb(178, 24, 43)",
        "rgb(255, 255, 255)",
        "rgb(33, 102, 172)",
    )
    assert 24 < int(re.findall(r"\d+", pale[0])[1]) < 255
    assert "gradient" in undefined[1]
    assert undefined[2] == "rgb(17, 17, 17)"


@pytest.mark.long("shows a page in a browser")
def test_every_token_can_be_read_on_its_colour(chromium: Any, tmp_path: Path) -> None:
    page = tmp_path / "tokens.html"
    values = torch.linspace(-1, 1, 201)
    show_tokens(["word"] * len(values), values).save(page)
    browser.open_page(chromium, page, 1280)
    looks = chromium.execute_script(
        "return [...document.querySelectorAll('.colored-tokens > "
        "span > span')].map(e => getComputedStyle(e))"
        ".map(style => [style.backgroundColor, style.color])"
    )
    assert len(looks) == len(values)
    assert min(contrast(*look) for look in looks) >= 4.5


def contrast(background: str, letters: str) -> float:
    """Return the contrast of two colours, "rgb(…)", as WCAG 2 defines it."""
    luminances = []
    for color in (background, letters):
        levels = [int(level) / 255 for level in re.findall(r"\d+", color)]
        linear = [
            level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4
            for level in levels
        ]
        weighed = zip((0.2126, 0.7152, 0.0722), linear, strict=True)
        luminances.append(sum(weight * level for weight, level in weighed))
    darker, lighter = sorted(luminances)
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_known_pairs() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(
        4.54, abs=0.005
    )


def test_circuitsvis_no_longer_chooses_the_colour_of_letters() -> None:
    script = circuitsvis_script()
    assert "brightness()<" not in script
    assert script.count("isDark(") > 1


@pytest.mark.parametrize(
    "code",
    [0x00, 0x1F, 0x7F, 0x9F, 0xD800, 0xDFFF, 0x2028, 0x202E, 0x2066, 0x2069, 0x061C],
)
def test_what_has_no_shape_is_shown_by_its_number(code: int) -> None:
    shown = visible_token(chr(code))
    assert shown == chr(code).encode("unicode_escape").decode()


@pytest.mark.parametrize("code", [0x20, 0x7E, 0xA0, 0xD7FF, 0x2027, 0x202F, 0x206A])
def test_what_stands_beside_it_is_shown_as_it_is(code: int) -> None:
    assert visible_token(chr(code)) == chr(code)
