"""The page of a report as text: what is in it, and that nothing in it does harm."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import sys
from html.parser import HTMLParser
from itertools import combinations

import numpy as np
import pytest
from tests.support.full_disk import files_end_at

import flockstep as fs
from flockstep.errors import FlockstepError, InvalidField
from flockstep.report.page import (
    COLOURS,
    DARK_COLOURS,
    DARK_SCHEME,
    SCHEME,
    TONES,
    CodeView,
    FigureView,
    Page,
    Section,
    TableView,
    TextView,
    Variant,
    VerdictView,
    render,
    write_page,
)

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"
TABLE = TableView("Scores", ["strategy", "score"], [["sync", 0.5], ["easgd", 0.25]])


class Read(HTMLParser):
    """What a page consists of: elements with their attributes, and the texts in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.elements[-1][0], data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def ids(self):
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def text(self, tag):
        return [text for name, text in self.texts if name == tag]

    def figures(self):
        """The data and layouts of all figures, as the page's script reads them."""
        found = []
        for (tag, attributes), text in zip(self._scripts(), self.text("script"), strict=True):
            assert tag == "script"
            if attributes.get("type") == "application/json":
                found.append(json.loads(text))
        return found

    def _scripts(self):
        return [element for element in self.elements if element[0] == "script"]


def figure(title="Curves", data=({"y": [1, 2]},), layout=None, table=TABLE, **fields):
    return FigureView(title, data, layout or {}, "A caption.", "Two lines rise.", table, **fields)


def page_of(*views, **fields):
    return Page("A study", sections=[Section("Results", views)], **fields)


def cells_of(*columns):
    """The cells of a table with these columns behind its first, as shown and as in the CSV."""
    rows = [["row", *row] for row in zip(*columns, strict=True)]
    table = TableView("T", ["name", *map(str, range(len(columns)))], rows)
    read = Read(render(page_of(table)))
    exact = [attributes.get("data-v") for attributes in read.all("td")]
    return list(zip(read.text("td"), exact, strict=True))


# --- What is where ---


def test_the_question_and_the_verdicts_come_before_everything_else():
    html = render(
        Page(
            "A study",
            "Which is best?",
            ["digits", "30 runs"],
            [VerdictView("sync wins", "good", "by far", "Better")],
            [Section("Results", [TABLE], "All of them."), Section("How to reproduce", [])],
            "The end.",
        )
    )
    body = html[html.index("<body") :]
    in_order = [
        "<h1>A study</h1>",
        "Which is best?",
        "30 runs",
        "sync wins",
        "by far",
        "Results</h2>",
        "All of them.",
        "easgd",
        "How to reproduce</h2>",
        "The end.",
    ]
    places = [body.index(text) for text in in_order]
    assert places == sorted(places)


def test_the_contents_link_to_every_section():
    read = Read(render(Page("P", sections=[Section("One", []), Section("Two & a half", [])])))
    links = [each["href"] for each in read.all("a")]
    assert links == ["#_main", "#one", "#two-a-half"]
    assert {link[1:] for link in links} <= set(read.ids())


@pytest.mark.parametrize("tone", TONES)
def test_a_verdict_has_a_mark_and_a_word_beside_its_colour(tone):
    mark, word = TONES[tone]
    html = render(Page("P", verdicts=[VerdictView("It is so.", tone)]))
    assert f'<span class="mark" aria-hidden="true">{mark}</span> {word}' in html
    assert "Odd</p>" in render(Page("P", verdicts=[VerdictView("It is so.", tone, word="Odd")]))


def test_headings_go_down_one_step_at_a_time():
    html = render(page_of(TABLE, figure(), TextView("Text", ["One.", "Two."]), CodeView("C", "x")))
    levels = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert levels == [1, 2, 3, 3, 3, 3]


def test_a_page_that_goes_on_says_so_and_a_final_one_does_not():
    assert "renews itself every minute." in render(Page("P", renews_every=60))
    assert "renews itself every 90 seconds." in render(Page("P", renews_every=90))
    assert "renews itself every 2 minutes." in render(Page("P", renews_every=120))
    final = render(Page("P"))
    assert "renews itself every" not in final
    assert 'http-equiv="refresh"' not in final


def test_a_figure_is_there_as_a_table_and_as_data_for_each_variant():
    variants = [Variant(name, [{"y": [1]}], {}, TABLE) for name in ("steps", "seconds", "bytes")]
    view = FigureView.of("Curves", variants, "A caption.", "A line.", switch="Against")
    assert view.contents == variants
    read = Read(render(page_of(view)))
    assert len(read.figures()) == 3
    assert len(read.all("table")) == 3
    choices = [each["value"] for each in read.all("button") if each["data-does"] == "choose"]
    assert choices == ["0", "1", "2"]


def test_many_variants_are_a_list_to_select_from():
    variants = [Variant(f"task {i}", [{"y": [1]}], {}, TABLE) for i in range(7)]
    read = Read(render(page_of(FigureView.of("Curves", variants, "", ""))))
    assert read.text("option") == [f"task {i}" for i in range(7)]


# --- Escaping ---


def test_nothing_that_a_page_is_given_becomes_markup():
    table = TableView(HOSTILE, [HOSTILE, "n"], [[HOSTILE, 1.0]], HOSTILE)
    hostile = figure(
        HOSTILE,
        [{"name": HOSTILE, "y": [1]}],
        {"title": {"text": HOSTILE}},
        table,
        name=HOSTILE,
        variants=[Variant(HOSTILE + "2", [], {}, table)],
        switch=HOSTILE,
    )
    views = [table, hostile, TextView(HOSTILE, [HOSTILE]), CodeView(HOSTILE, HOSTILE, HOSTILE)]
    page = Page(
        HOSTILE,
        HOSTILE,
        [HOSTILE],
        [VerdictView(HOSTILE, "good", HOSTILE, HOSTILE)],
        [Section(HOSTILE, views, HOSTILE)],
        HOSTILE,
    )
    read = Read(render(page))
    assert not read.all("img")
    harmless = Read(
        render(page_of(TABLE, figure(name="a", variants=[Variant("b", [], {}, TABLE)])))
    )
    assert len(read.all("script")) == len(harmless.all("script"))
    assert not [name for _, each in read.elements for name in each if name.startswith("on")]
    assert read.figures()[0]["data"][0]["name"] == HOSTILE
    assert read.text("h1") == [HOSTILE]


def test_only_the_pages_own_scripts_may_run_and_nothing_may_be_fetched():
    read = Read(render(page_of(figure())))
    (policy,) = [each["content"] for each in read.all("meta") if "http-equiv" in each]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    scripts = [
        text
        for attributes, text in zip(read.all("script"), read.text("script"), strict=True)
        if "type" not in attributes
    ]
    (packed,) = [text for text in read.text("script") if text.startswith("H4sI")]
    for script in [*scripts, gzip.decompress(base64.b64decode(packed)).decode()]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(scripts) == 2


# --- Numbers ---


def test_figures_have_six_digits_and_null_for_what_is_no_number():
    data = [{"x": [1 / 3, 123456789.123, 2.0, 5], "y": [math.nan, math.inf, -math.inf, None]}]
    html = render(page_of(figure(data=data, layout={"height": 300.0})))
    assert '"x":[0.333333,123457000,2,5],"y":[null,null,null,null]' in html
    assert Read(html).figures()[0]["layout"] == {"height": 300}


def test_arrays_are_data_and_other_things_are_not():
    data = [{"y": np.array([0.5, 1.5]), "x": (np.int64(1), np.float32(0.25)), "visible": True}]
    (drawn,) = Read(render(page_of(figure(data=data)))).figures()
    assert drawn["data"] == [{"y": [0.5, 1.5], "x": [1, 0.25], "visible": True}]
    with pytest.raises(InvalidField, match="'data' must be texts, numbers, lists and mappings"):
        render(page_of(figure(data=[{"y": object()}])))


def test_a_template_of_the_caller_gives_way_to_that_of_the_page():
    (drawn,) = Read(render(page_of(figure(layout={"template": {"layout": {}}})))).figures()
    assert drawn["layout"] == {}


def test_a_column_of_numbers_has_the_decimals_that_all_of_them_need():
    assert cells_of([0.94321987, 0.5, 0.25]) == [
        ("0.9432", "0.94321987"),
        ("0.5000", "0.5"),
        ("0.2500", "0.25"),
    ]
    assert cells_of([0.5, 0.25]) == [("0.50", "0.5"), ("0.25", None)]
    assert cells_of([12340.4, 20000.6]) == [("12,340", "12340.4"), ("20,001", "20000.6")]
    assert cells_of([128.0, 4096.0]) == [("128", "128.0"), ("4,096", "4096.0")]


def test_numbers_of_very_different_size_keep_their_own_digits():
    shown = [text for text, _ in cells_of([12345.678, 0.1, 1.5e-9, 1e300])]
    assert shown == ["12,346", "0.1", "1.5e-09", "1e+300"]
    assert [text for text, _ in cells_of([1.25e-9, 3e-9])] == ["1.25e-09", "3e-09"]
    assert [text for text, _ in cells_of([10**20, 1])] == ["1e+20", "1"]


def test_whole_numbers_texts_and_what_is_missing():
    assert cells_of([1234567, "0.5000", None, True]) == [
        ("1,234,567", "1234567"),
        ("0.5000", None),
        ("–", ""),
        ("yes", None),
    ]
    assert cells_of([math.nan, math.inf, -math.inf]) == [
        ("NaN", "nan"),
        ("∞", "inf"),
        ("-∞", "-inf"),
    ]


def test_columns_with_numbers_are_aligned_to_the_right():
    table = TableView("T", ["a", "b", "c"], [["x", 1, "y"], ["z", "none", None]])
    read = Read(render(page_of(table)))
    assert [each.get("class") for each in read.all("td")] == ["n", "brief", "n", "brief"]
    assert [each["scope"] for each in read.all("th")] == ["col"] * 3 + ["row"] * 2


# --- Keys ---


def test_every_id_is_there_once_whatever_the_titles_are():
    views = [TABLE, TABLE, figure(), figure(), TextView("Results", []), CodeView("Ω", "x")]
    page = Page("P", sections=[Section("Results", views), Section("Results", [figure("!")])])
    ids = Read(render(page)).ids()
    assert len(ids) == len(set(ids))
    assert {"results", "results-2", "results-3", "scores", "scores-2", "curves-2"} <= set(ids)
    labels = [each["aria-label"] for each in Read(render(page)).all("div") if "tabindex" in each]
    assert len(set(labels)) == len(labels) == len(Read(render(page)).all("table"))


def test_a_given_key_stays_and_others_step_aside():
    given = TableView("Other", ["a"], [["x"]], key="scores")
    read = Read(render(page_of(TABLE, given)))
    assert [each["id"] for each in read.all("table")] == ["scores-2_table", "scores_table"]


def test_what_comes_later_changes_no_key():
    before = Read(render(page_of(TABLE, figure()))).ids()
    after = Read(render(page_of(TABLE, figure(), TABLE, figure()))).ids()
    assert [each for each in after if each in before] == before


@pytest.mark.parametrize("key", ["A b", "a_b", "-a", "ä", 'a"'])
def test_a_key_is_plain(key):
    view = TableView("T", ["a"], [], key=key)
    with pytest.raises(InvalidField, match="'key' must be small letters, digits and single hyph"):
        render(page_of(view))


def test_a_key_is_given_once():
    view = TableView("T", ["a"], [], key="t")
    with pytest.raises(InvalidField, match=r"'key' must be used once \(it is used 2 times\)"):
        render(page_of(view, figure(table=view)))


# --- Rules of views ---


def test_views_say_what_is_wrong_with_them():
    with pytest.raises(InvalidField, match="'rows' must have a value for each of the 2 columns"):
        TableView("T", ["a", "b"], [[1]])
    with pytest.raises(InvalidField, match="'tone' must be one of"):
        VerdictView("x", "splendid")
    with pytest.raises(InvalidField, match="'log_axes' must be one of"):
        figure(log_axes="z")
    with pytest.raises(InvalidField, match="'name' must be different texts"):
        figure(name="a", variants=[Variant("a", [], {}, TABLE)])
    with pytest.raises(InvalidField, match="'name' must be different texts"):
        figure(variants=[Variant("a", [], {}, TABLE)])
    with pytest.raises(InvalidField, match="'contents' must be at least one"):
        FigureView.of("T", [], "", "")
    with pytest.raises(InvalidField, match="'renews_every' must be at least 1"):
        Page("P", renews_every=0)


@pytest.mark.parametrize("library", ["jinja2", "plotly.offline"])
def test_without_its_libraries_it_says_what_to_install(monkeypatch, library):
    import flockstep.report.page as module

    module._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    name = library.split(".")[0]
    with pytest.raises(FlockstepError, match=f"pages need {name}: pip install {name}"):
        render(page_of(figure()))


# --- Files ---


def test_a_big_page_has_at_most_six_megabytes():
    random = np.random.default_rng(0)
    views = []
    for number in range(12):
        curves = random.random((100, 100))
        data = [{"x": list(range(100)), "y": curve, "name": f"run {i}"} for i, curve in
                enumerate(curves)]  # fmt: skip
        rows = [[f"run {i}", *map(float, curve[:10])] for i, curve in enumerate(curves)]
        table = TableView("Scores", ["run", *map(str, range(10))], rows)
        views.append(figure(f"Figure {number}", data, table=table))
    nbytes = len(render(page_of(*views)).encode())
    assert 3_000_000 < nbytes <= 6_000_000


def test_a_page_is_written_as_it_is_rendered_and_always_the_same(tmp_path):
    page = page_of(TABLE, figure("Größe ×"))
    write_page(page, tmp_path / "page.html")
    write_page(page, str(tmp_path / "again.html"))
    html = (tmp_path / "page.html").read_bytes()
    assert html.decode("utf-8") == render(page)
    assert html == (tmp_path / "again.html").read_bytes()
    assert b"\r" not in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "page.html"]


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("as it was")
    with (
        files_end_at(100_000),
        pytest.raises(InvalidField, match="'path' must be a file that can be written .*page.html"),
    ):
        write_page(page_of(TABLE), path)
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path / "missing" / "page.html", tmp_path):
        with pytest.raises(fs.FlockstepError, match="'path' must be a file that can be written"):
            write_page(page_of(TABLE), path)
    assert list(tmp_path.iterdir()) == []


# --- Colours ---

TO_XYZ = np.array([0.2126, 0.7152, 0.0722])
# Machado, Oliveira and Fernandes (2009): how colours look to those who lack one kind of cone.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116,
         1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940,
         0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367,
         0.303900]]
    ),
}  # fmt: skip
# Björn Ottosson's OKLab: equal distances look equally different.
CONES = np.array(
    [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
)
LAB = np.array(
    [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
)


def linear(colour):
    parts = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As the WCAG define it."""
    dark, light = sorted(float(TO_XYZ @ linear(colour)) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def difference(one, other, blindness):
    places = [
        LAB @ np.cbrt(CONES @ np.clip(BLINDNESS[blindness] @ linear(colour), 0, 1))
        for colour in (one, other)
    ]
    return float(np.linalg.norm(places[0] - places[1]))


@pytest.mark.parametrize(
    ("colours", "scheme"), [(COLOURS, SCHEME), (DARK_COLOURS, DARK_SCHEME)], ids=["light", "dark"]
)
def test_colours_stand_out_from_the_page(colours, scheme):
    assert len(colours) == 10
    for ground in (scheme["page"], scheme["surface"]):
        assert min(contrast(colour, ground) for colour in (*colours, scheme["axis"])) >= 3
        for name in ("text", "muted", "accent", "good", "bad"):
            assert contrast(scheme[name], ground) >= 4.5, name


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("colours", [COLOURS, DARK_COLOURS], ids=["light", "dark"])
def test_colours_are_told_apart_with_every_kind_of_colour_blindness(colours, blindness):
    """0.02 is about the least difference that people see."""
    for count, least in ((6, 0.06), (10, 0.04)):
        pairs = combinations(colours[:count], 2)
        assert min(difference(*pair, blindness) for pair in pairs) >= least, count
