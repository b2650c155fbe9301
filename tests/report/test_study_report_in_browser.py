"""The report of a study in a real browser: every figure is drawn, on a phone and in the dark."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.report.test_study_report import rich_outcome
from tests.support.browser import opened, start_browser  # noqa: F401  a fixture

from flockstep.report.study.figures import all_figures

pytestmark = pytest.mark.cluster

TRACES = """() => Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map(
    each => [each.closest('figure').id, each.data.length]))"""
SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def outcome():
    return rich_outcome()


@pytest.fixture(scope="module")
def path(outcome, tmp_path_factory):
    return outcome.report(tmp_path_factory.mktemp("report") / "study.html")


def test_every_figure_is_drawn_with_all_its_traces(browser, outcome, path):
    wanted = {
        figure.key: len(figure.data) for some in all_figures(outcome).values() for figure in some
    }
    with opened(browser, path) as page:
        page.evaluate("window.flockstepReport.drawn()")
        assert page.evaluate(TRACES) == wanted
        assert page.locator(".js-plotly-plot svg.main-svg").count() >= len(wanted)


def test_every_switch_draws_what_it_says(browser, outcome, path):
    figures = {each.key: each for some in all_figures(outcome).values() for each in some}
    with opened(browser, path) as page:
        page.evaluate("window.flockstepReport.drawn()")
        for content in figures["curves"].contents:
            page.locator("#curves").get_by_role("button", name=content.name, exact=True).click()
            page.evaluate("window.flockstepReport.drawn()")
            assert page.evaluate(TRACES)["curves"] == len(content.data)
        for content in figures["replicas"].contents:
            page.locator("#replicas select").select_option(label=content.name)
            page.evaluate("window.flockstepReport.drawn()")
            assert page.evaluate(TRACES)["replicas"] == len(content.data)


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1400, "dark")])
def test_everybody_can_read_it(browser, path, width, scheme):
    with opened(browser, path, width, 900, scheme) as page:
        page.evaluate("window.flockstepReport.drawn()")
        assert page.evaluate(SIDEWAYS) == 0
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
