"""`flockstep retest`: printed figures, tested again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = "studies/results/printed_figures/page.md"
BATCH = "studies/e2_3_batch.toml"


@pytest.fixture
def at_root(monkeypatch):
    """In the folder of the project, with room for lines."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_table_a_sentence_for_each_change_and_a_summary(at_root, flockstep):
    done = flockstep("retest", BATCH)
    assert done.returncode == 0, done.stderr
    row = next(each for each in done.stdout.splitlines() if "data=full, batch=4096" in each)
    for cell in ("+0.84 points", "not significant (p = 0.059)", "0.0595", "0.0419*", "0.5023"):
        assert cell in row
    told = " ".join(done.stdout.split())
    assert "- e2_3_batch: data=full, batch=4096 against data=disjoint (+0.84 points)" in told
    assert "Of 13 published verdicts so many change: df = n − 1: 0; Welch: 1;" in told
    assert "Of 12 verdicts without a significant difference, 3 mean equal within the margin" in told


def test_machines_get_all_of_it(at_root, flockstep):
    rows = json.loads(flockstep("retest", BATCH, "--json").stdout)["retests"]
    assert len(rows) == 13
    (changed,) = [row for row in rows if row["changed"]]
    assert changed["cell"] == "data=full, batch=4096"
    assert changed["p"] == pytest.approx(0.0595, abs=5e-5)
    assert changed["verdicts"]["Welch"] is True


def test_the_page_of_the_thesis_is_what_its_figures_give(at_root, flockstep, tmp_path):
    files = sorted(str(path) for path in Path("studies").glob("e*.toml"))
    done = flockstep("retest", *files, "--page", str(tmp_path / "new" / "page.md"))
    assert "The page: " in done.stdout
    written = (tmp_path / "new" / "page.md").read_text()
    again = f"run: flockstep retest studies/e*.toml --page {PAGE}"
    assert written == (ROOT / PAGE).read_text(), again
    assert "Without pairs of printed figures: e3_1_local_sgd" in written
    several = "data=full, workers=2 against data=disjoint, and 2 more: published: not significant;"
    assert f"- e2_1_full_overlap: {several} no figures are printed." in written


def test_the_sentence_in_the_documentation_is_the_one_that_is_printed(at_root, flockstep):
    rows = json.loads(flockstep("retest", BATCH, "--json").stdout)["retests"]
    (changed,) = [row for row in rows if row["changed"]]
    page = " ".join((ROOT / "docs" / "studies.md").read_text().split())
    assert changed["words"] in page


def test_a_study_without_printed_figures_is_named(at_root, flockstep):
    done = flockstep("retest", "studies/period.toml")
    assert done.returncode == 0
    assert done.stdout == "Without pairs of printed figures: period.\n"


def test_what_cannot_be_read_or_written_is_one_line(at_root, refused, tmp_path):
    refused(["retest", "studies/gone.toml"], "studies/gone.toml: cannot be read")
    (tmp_path / "file").write_text("")
    message = f"'--page' must be a file that can be written (got '{tmp_path}/file/page.md'"
    refused(["retest", BATCH, "--page", f"{tmp_path}/file/page.md"], message)
    refused(["retest", BATCH, "--page", str(tmp_path)], "'--page' must be a file that")
