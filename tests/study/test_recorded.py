"""Records that stand beside their studies: each is what the code of now gives."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import flockstep as fs
from flockstep.report.study.short_page import short_page
from flockstep.study.records import Record, processor

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "studies" / "results"
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/study.toml"))
DECLARED = {name: fs.Study.from_toml(RESULTS.parent / f"{name}.toml") for name in STUDIES}
SIMULATED = [name for name in STUDIES if DECLARED[name].base.get("backend", "sim") == "sim"]


def shortest(folder: Path) -> Record:
    """That of the runs that count which took least time."""
    finished = [record for _, record in fs.load_outcome(folder).finished]
    return min(finished, key=lambda each: (each.wall_seconds, each.id))


@pytest.fixture
def threads():
    """What is set in the test holds for that test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.cluster  # some minutes for all of them
@pytest.mark.skipif("FLOCKSTEP_DATA" not in os.environ, reason="no folder of data sets")
@pytest.mark.parametrize("study", SIMULATED)
def test_a_recorded_run_gives_the_same_figures_again(study, threads):
    """To the bit on the same processor; sums of others are rounded in another order, as they are
    with another number of threads.
    """
    record = shortest(RESULTS / study)
    threads(record.host["threads"])
    spec = fs.RunSpec.from_json(json.dumps(record.spec))
    assert spec.id == record.id
    metrics = fs.run(spec).metrics
    recorded = {name: value for name, value in record.metrics.items() if "wall" not in name}
    again = {name: metrics[name] for name in recorded}
    if record.host.get("processor") == processor():
        assert again == recorded
    else:
        assert again == pytest.approx(recorded, rel=0.02, abs=0.005)


@pytest.mark.parametrize("study", STUDIES)
def test_the_records_are_those_of_the_declared_study(study):
    """Nothing is missing, and the page beside them says what they say, failures included."""
    outcome = fs.load_outcome(RESULTS / study)
    assert outcome.study == DECLARED[study]
    assert outcome.comparisons
    assert {each.id for each in outcome.runs} <= {*outcome.records}
    page = (RESULTS / study / "page.md").read_text()
    words = (RESULTS / study / "verdict.md").read_text().strip()
    assert page == short_page(outcome, words)


def test_every_finding_has_its_study():
    text = (PROJECT / "docs" / "findings.md").read_text()
    findings = re.findall(r"^- .+(?:\n  .+)*", text, re.MULTILINE)
    assert findings
    pages = re.compile(r"\]\(\.\./(studies/results/\w+/page\.md)\)")
    for finding in findings:
        linked = pages.findall(finding)
        assert linked, finding
        assert all((PROJECT / page).exists() for page in linked), finding
    told = {Path(page).parent.name for page in pages.findall(text)}
    assert told >= {*STUDIES}
