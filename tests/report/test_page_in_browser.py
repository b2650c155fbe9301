"""The page of a report as people use it: in a browser, with a keyboard, on paper, on a phone."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.support.browser import opened, start_browser  # noqa: F401  a fixture

from flockstep.report.page import (
    COLOURS,
    DARK_COLOURS,
    DARK_SCHEME,
    CodeView,
    FigureView,
    Page,
    Section,
    TableView,
    TextView,
    Variant,
    VerdictView,
    write_page,
)

pytestmark = pytest.mark.cluster

NAMES = ["sync", "local_sgd(period=16)", "easgd"]
STEPS = [1, 10, 100, 1000]
# Texts that a CSV file must quote, and numbers that a table shows shorter than they are.
ROWS = [
    ['said "no", twice', 0.12345678901234567, 1234567, None],
    ["over\ntwo lines", 1e-300, -5, "–"],
    ["<b>&amp;</b>", 2 / 3, 0, "=1+1"],
]
RESULTS = TableView("Final results", ["strategy", "score", "bytes", "remark"], ROWS, "A note.")
FOCUSABLE = "a[href], button, select, [tabindex='0']"
VISIBLE = (
    f"""() => [...document.querySelectorAll("{FOCUSABLE}")].filter(e => e.checkVisibility())"""
)


def curves(by: str, count: int) -> Variant:
    """Curves against something, with as many traces as asked for."""
    data = [
        {
            "name": name,
            "x": STEPS,
            "y": [0.3 + 0.1 * i, 0.5, 0.7, 0.9 - 0.1 * i],
            "line": {"color": f"@{i}", "dash": ["solid", "dash", "dot"][i]},
        }
        for i, name in enumerate(NAMES[:count])
    ]
    layout = {"xaxis": {"title": {"text": by}}, "yaxis": {"title": {"text": "accuracy"}}}
    rows = [[step, *(trace["y"][i] for trace in data)] for i, step in enumerate(STEPS)]
    return Variant(by, data, layout, TableView(f"Against {by}", [by, *NAMES[:count]], rows))


def report(renews_every: int | None = None) -> Page:
    bars = [{"type": "bar", "x": [3, 1, 2], "y": NAMES, "orientation": "h"}]
    long_names = [
        {"name": f"local_sgd(period={p}, outer=nesterov(momentum=0.9))", "y": [p, 2 * p]}
        for p in (1, 4)
    ]
    wide = TableView(
        "Wide",
        ["run", *(f"column {i}" for i in range(20))],
        [[f"run {k}", *(k + i / 7 for i in range(20))] for k in range(6)],
    )
    figures = [
        FigureView.of(
            "Curves",
            [curves("steps", 3), curves("seconds", 2), curves("bytes", 1)],
            "Means of five seeds.",
            "Three curves rise.",
            switch="Against",
            log_axes="xy",
        ),
        FigureView("Bars", bars, {"xaxis": {"title": {"text": "MB"}}}, "Few bytes.", "Bars.",
                   TableView("Traffic", ["strategy", "MB"], [[NAMES[0], 3]]), key="traffic"),
        FigureView("Long names", long_names, {"yaxis": {"type": "log"}}, "", "Lines.", wide),
        FigureView.of("By task", [curves(f"task {i}", 1 + i % 3) for i in range(6)], "", "Lines.",
                      switch="Task"),
    ]  # fmt: skip
    return Page(
        "Does it pay?",
        "Which strategy sends the fewest bytes?",
        ["digits", "8 workers", "2026-01-02"],
        [
            VerdictView(
                "easgd sends a third of the bytes.", "good", "1 MB against 3 MB.", "Better"
            ),
            VerdictView("It ends lower.", "bad", "0.7 against 0.9."),
            VerdictView("As fast.", "neutral"),
            VerdictView("Gossip is not done.", "unknown"),
        ],
        [
            Section("Results", [RESULTS, *figures], "All of them."),
            Section("Method", [TextView("Seeds", ["Five of them.", "All paired."])]),
            Section("How to reproduce", [CodeView("Command", "flockstep run\n  --seed 1\n", "sh")]),
        ],
        "The end.",
        renews_every,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "report.html"
    write_page(report(), path)
    return path


def drawn(page) -> None:
    page.evaluate("flockstepReport.drawn()")


def traces(page, key: str) -> list[str]:
    return page.evaluate(f"document.querySelector('#{key} .plot').data.map(t => t.name)")


def layout(page, key: str) -> dict:
    return page.evaluate(f"document.querySelector('#{key} .plot').layout")


def first_stroke(page) -> str:
    """The colour of the first curve as it is on the screen."""
    line = "#curves .scatterlayer .js-line"
    return page.evaluate(f"getComputedStyle(document.querySelector('{line}')).stroke")


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def button(page, key: str, name: str):
    return page.locator(f"#{key}").get_by_role("button", name=name, exact=True)


def saved(page, key: str, name: str) -> tuple[str, bytes]:
    """The name and the content of the file that a button saves."""
    with page.expect_download() as download:
        page.locator(f"#{key}").get_by_role("button", name=name).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


# --- Figures ---


def test_every_figure_is_drawn_with_its_traces(browser, path):
    with opened(browser, path) as page:
        drawn(page)
        assert traces(page, "curves") == NAMES
        assert len(traces(page, "traffic")) == 1
        assert len(traces(page, "long-names")) == 2
        assert traces(page, "by-task") == NAMES[:1]
        assert page.locator("#curves .scatterlayer .js-line").count() == 3
        assert page.locator("#traffic .barlayer .point").count() == 3
        assert page.locator(".plot").evaluate_all("all => all.map(e => e.role)") == ["img"] * 4
        assert page.locator("#traffic .plot").get_attribute("aria-label") == "Bars."


def test_figures_are_drawn_when_they_come_near(browser, path):
    with opened(browser, path, height=400) as page:
        page.wait_for_selector("#curves .main-svg")
        assert page.locator("#by-task .main-svg").count() == 0
        page.locator("#by-task").scroll_into_view_if_needed()
        page.wait_for_selector("#by-task .main-svg")


def test_switches_change_what_a_figure_shows(browser, path):
    with opened(browser, path) as page:
        drawn(page)
        button(page, "curves", "seconds").click()
        assert traces(page, "curves") == NAMES[:2]
        assert layout(page, "curves")["xaxis"]["title"]["text"] == "seconds"
        assert page.locator("#curves .xtitle").text_content() == "seconds"
        assert button(page, "curves", "seconds").get_attribute("aria-pressed") == "true"
        assert button(page, "curves", "steps").get_attribute("aria-pressed") == "false"
        label = page.locator("#curves .plot").get_attribute("aria-label")
        assert label == "Three curves rise. Shown: seconds."

        page.locator("#by-task select").select_option("task 4")
        assert traces(page, "by-task") == NAMES[:2]


def test_an_axis_becomes_logarithmic_and_stays_so_in_other_variants(browser, path):
    with opened(browser, path) as page:
        drawn(page)
        log = button(page, "curves", "Log x axis")
        assert log.get_attribute("aria-pressed") == "false"
        log.click()
        button(page, "curves", "bytes").click()
        assert log.get_attribute("aria-pressed") == "true"
        assert layout(page, "curves")["xaxis"]["type"] == "log"
        assert layout(page, "curves")["yaxis"].get("type") != "log"
        log.click()
        assert layout(page, "curves")["xaxis"]["type"] == "linear"


def test_a_table_takes_the_place_of_a_figure_and_gives_it_back(browser, path):
    with opened(browser, path) as page:
        drawn(page)
        plot, tables = page.locator("#curves .plot"), page.locator("#curves table")
        show_table, show_figure = (
            page.locator("#curves").get_by_role("button", name=f"Show {what}")
            for what in ("table", "figure")
        )
        assert plot.is_visible()
        assert not any(table.is_visible() for table in tables.all())
        show_table.click()
        assert not plot.is_visible()
        assert [table.is_visible() for table in tables.all()] == [True, False, False]
        assert show_table.get_attribute("aria-pressed") == "true"
        assert show_figure.get_attribute("aria-pressed") == "false"

        button(page, "curves", "bytes").click()
        assert [table.is_visible() for table in tables.all()] == [False, False, True]
        show_figure.click()
        assert plot.is_visible()
        assert not any(table.is_visible() for table in tables.all())
        assert traces(page, "curves") == NAMES[:1]


def test_colours_follow_the_scheme(browser, path):
    with opened(browser, path, scheme="light") as page:
        drawn(page)
        assert first_stroke(page) == rgb(COLOURS[0])
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"""() => getComputedStyle(document.querySelector(
            '#curves .js-line')).stroke === "{rgb(DARK_COLOURS[0])}" """)
        assert layout(page, "curves")["template"]["layout"]["font"]["color"] == DARK_SCHEME["text"]
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        assert page.evaluate(ground) == rgb(DARK_SCHEME["page"])


def test_figures_follow_the_width_and_legends_go_below_where_it_is_narrow(browser, path):
    beside = """key => {
        const box = name => document.querySelector(`#${key} ${name}`).getBoundingClientRect();
        const [legend, plot, title] = ['.legend', '.nsewdrag', '.xaxislayer-above']
            .map(box);
        return {isRight: legend.left >= plot.right, isBelow: legend.top >= title.bottom,
                isInside: legend.right <= innerWidth && legend.bottom <= box('.plot').bottom};
    }"""
    with opened(browser, path) as page:
        drawn(page)
        assert page.evaluate(beside, "curves") == {
            "isRight": True,
            "isBelow": False,
            "isInside": True,
        }
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function("document.querySelector('#curves .main-svg').clientWidth < 390")
        for key in ("curves", "long-names"):
            place = page.evaluate(beside, key)
            assert place["isBelow"], key
            assert place["isInside"], key


# --- Files ---


def test_a_figure_is_saved_as_png_of_one_size_whatever_the_screen(browser, path):
    with opened(browser, path, width=390, scheme="dark") as page:
        drawn(page)
        name, png = saved(page, "traffic", "PNG")
        assert name == "does-it-pay-traffic.png"
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(png) > 2_000
        assert int.from_bytes(png[16:20], "big") == 2_000  # twice as fine as on the screen
        assert page.locator(".sheet").count() == 0


def test_a_figure_is_saved_as_svg_with_its_title(browser, path):
    with opened(browser, path, scheme="dark") as page:
        drawn(page)
        button(page, "curves", "seconds").click()
        name, svg = saved(page, "curves", "SVG")
        assert name == "does-it-pay-curves-seconds.svg"
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "Curves (seconds)" in "".join(root.itertext())
        assert rgb(COLOURS[0]) in svg.decode()
        assert rgb(DARK_COLOURS[0]) not in svg.decode()


def test_a_table_is_saved_with_all_digits(browser, path):
    with opened(browser, path) as page:
        name, text = saved(page, "final-results", "CSV")
        assert name == "does-it-pay-final-results.csv"
        head, *rows = csv.reader(io.StringIO(text.decode(), newline=""))
        assert head == ["strategy", "score", "bytes", "remark"]
        for (label, score, nbytes, remark), row in zip(ROWS, rows, strict=True):
            assert row == [label, repr(score), str(nbytes), remark or ""]
            assert float(row[1]) == score
        button(page, "curves", "seconds").click()
        name, text = saved(page, "curves", "CSV")
        assert name == "does-it-pay-curves-seconds.csv"
        assert text.decode().splitlines()[:2] == ["seconds,sync,local_sgd(period=16)", "1,0.3,0.4"]


def test_tables_are_sorted_by_their_columns(browser, path):
    with opened(browser, path) as page:
        column = page.locator("#final-results thead th").nth(1)
        for order, expected in (
            ("ascending", [1, 0, 2]),
            ("descending", [2, 0, 1]),
            (None, [0, 1, 2]),
        ):
            column.get_by_role("button").click()
            assert column.get_attribute("aria-sort") == order
            firsts = page.locator("#final-results tbody th").all_text_contents()
            assert firsts == [ROWS[index][0] for index in expected]


def test_code_is_copied(browser, path):
    with opened(browser, path) as page:
        button(page, "command", "Copy Command").click()
        page.wait_for_function("document.querySelector('#_status').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "flockstep run\n  --seed 1\n"


# --- For everybody ---


@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_nothing_and_nothing_sticks_out(browser, path, width):
    with opened(browser, path, width) as page:
        drawn(page)
        # Without motion colours change at once: axe measures contrasts. A change that is under way,
        # as that of a button clicked just before, would go on.
        page.emulate_media(reduced_motion="reduce")
        page.locator("#long-names").get_by_role("button", name="Show table").click()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            found = Axe().run(page).response["violations"]
            assert not [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_keyboard_reaches_everything_in_order_and_is_never_caught(browser, path):
    with opened(browser, path) as page:
        drawn(page)
        expected = page.evaluate(f"({VISIBLE})().length")
        page.evaluate(f"window.expected = ({VISIBLE})()")
        reached = []
        for _ in range(expected):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("expected.indexOf(document.activeElement)"))
        assert reached == list(range(expected))
        page.keyboard.press("Tab")
        assert page.evaluate("expected.includes(document.activeElement)") is False

        show_table = page.locator("#traffic").get_by_role("button", name="Show table")
        show_table.focus()
        page.keyboard.press("Enter")
        assert page.locator("#traffic table").is_visible()
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"

        page.get_by_role("link", name="Skip to the report").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "_main"


def test_without_scripts_every_table_is_there(browser, path):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(path.as_uri())
        tables = page.locator("table").all()
        assert len(tables) == 1 + 3 + 1 + 1 + 6
        assert all(table.is_visible() for table in tables)
        assert not any(each.is_visible() for each in page.get_by_role("button").all())
        assert not any(each.is_visible() for each in page.locator(".plot").all())


def test_a_browser_that_cannot_unpack_shows_every_table(browser, path):
    with browser.new_context() as context:
        context.add_init_script("delete window.DecompressionStream")
        page = context.new_page()
        page.goto(path.as_uri())
        drawn(page)
        assert all(table.is_visible() for table in page.locator("table").all())
        assert not button(page, "curves", "PNG").is_visible()
        assert saved(page, "traffic", "CSV")[1].startswith(b"strategy,MB\r\n")


def test_a_figure_that_cannot_be_drawn_is_a_table(browser, path, tmp_path):
    html = path.read_text()
    damaged = tmp_path / "damaged.html"
    damaged.write_text(re.sub(r'(id="_plotly">.{5000}).{8}', r"\1AAAAAAAA", html))
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(damaged.as_uri())
        drawn(page)
        assert all(table.is_visible() for table in page.locator("table").all())


# --- On paper ---


def test_printing_draws_everything_light_and_leaves_out_buttons(browser, path):
    with opened(browser, path, height=400, scheme="dark") as page:
        page.wait_for_selector("#curves .main-svg")
        assert page.locator("#by-task .main-svg").count() == 0
        page.locator("#long-names").get_by_role("button", name="Show table").click()
        assert len(page.pdf()) > 10_000
        assert page.locator("#by-task .main-svg").count() > 0
        assert first_stroke(page) == rgb(DARK_COLOURS[0])  # again, after the printing

        # What `pdf` does, in steps.
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert first_stroke(page) == rgb(COLOURS[0])
        widths = page.locator(".figure:not(#long-names) .plot").evaluate_all(
            "all => all.map(e => e.layout.width)"
        )
        assert widths == [680] * 3
        assert not any(each.is_visible() for each in page.locator(".tools").all())
        cut = """all => all.filter(e => e.checkVisibility() && (e.scrollHeight > e.clientHeight + 1
            || getComputedStyle(e).overflow !== 'visible')).length"""
        assert page.locator(".scroll").evaluate_all(cut) == 0
        breaks = "all => all.map(e => getComputedStyle(e).breakInside)"
        assert set(page.locator(".figure").evaluate_all(breaks)) == {"avoid"}


# --- Renewing ---


def test_a_page_that_goes_on_renews_itself_and_looks_as_before(browser, tmp_path):
    path = tmp_path / "running.html"
    write_page(report(renews_every=60), path)
    place = "Math.round(document.querySelector('#curves').getBoundingClientRect().top)"
    with browser.new_context(offline=True, viewport={"width": 1400, "height": 500}) as context:
        context.clock.install()  # a minute passes when the test says so
        page = context.new_page()
        page.goto(path.as_uri())
        drawn(page)
        page.evaluate("window.isOld = true")
        pause = page.get_by_role("button", name="Pause")
        pause.click()
        context.clock.run_for(61_000)
        assert page.evaluate("isOld")

        button(page, "curves", "seconds").click()
        button(page, "curves", "Log y axis").click()
        page.locator("#traffic").get_by_role("button", name="Show table").click()
        page.locator("#final-results thead button").nth(1).click()
        page.locator("#by-task select").select_option("task 4")
        page.locator("#by-task select").focus()
        page.evaluate("scrollTo({top: 900, behavior: 'instant'})")
        before = page.evaluate(place)
        # The last renewal finds the page that is final.
        write_page(report(), path)
        pause.evaluate("button => button.click()")
        context.clock.run_for(59_000)
        assert page.evaluate("isOld")
        with page.expect_event("load"):
            context.clock.run_for(2_000)
        drawn(page)

        assert page.evaluate(place) == before
        assert traces(page, "curves") == NAMES[:2]
        assert layout(page, "curves")["yaxis"]["type"] == "log"
        assert page.locator("#traffic table").is_visible()
        assert page.locator("#final-results th[aria-sort=ascending]").count() == 1
        assert traces(page, "by-task") == NAMES[:2]
        assert page.evaluate("document.activeElement.closest('figure').id") == "by-task"
        assert page.get_by_text("still running").count() == 0
        page.evaluate("window.isOld = true")
        context.clock.run_for(600_000)
        assert page.evaluate("isOld")


def test_a_page_renews_itself_by_the_real_clock(browser, tmp_path):
    path = tmp_path / "running.html"
    write_page(Page("Short", renews_every=1), path)
    with opened(browser, path) as page, page.expect_event("load"):
        pass


def test_what_a_page_is_given_does_no_harm_in_a_browser(browser, tmp_path):
    hostile = "</script><img src=x onerror='window.isHurt=1'><a href='javascript:isHurt=1'>x</a>"
    data = [{"name": hostile, "y": [1, 2], "text": [hostile] * 2, "mode": "lines+text"}]
    view = FigureView(hostile, data, {"xaxis": {"title": {"text": hostile}}}, hostile, hostile,
                      TableView(hostile, [hostile], [[hostile]]))  # fmt: skip
    path = tmp_path / "hostile.html"
    write_page(Page(hostile, sections=[Section(hostile, [view])]), path)
    with opened(browser, path) as page:
        drawn(page)
        assert page.title() == hostile
        assert page.evaluate("window.isHurt") is None
        assert page.locator("img").count() == 0
        assert json.dumps(page.evaluate("[...document.querySelectorAll('.plot a')].map(a => "
                                        "a.getAttributeNS('http://www.w3.org/1999/xlink', 'href'))"
                                        )).count("javascript") == 0  # fmt: skip
