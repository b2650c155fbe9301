"""What people read in a terminal: `flockstep run`, `show` and `list`, and where results go."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.support.full_disk import files_end_at

import flockstep as fs
from flockstep.cli.list import in_families
from flockstep.cli.run import with_slow_ranks
from flockstep.data.overlap import overlap_of
from flockstep.network import PRESETS
from flockstep.report import draw, sketch_history
from flockstep.report.terminal_chart import Curve, chart
from flockstep.training.progress_bar import steps_bar

SMALL = ["--workers", "2", "--steps", "6"]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory):
    """Matplotlib keeps the files of its fonts open, from the first picture on."""
    draw(
        overlap_of(fs.Disjoint(), 4, 2, seed=0), "", tmp_path_factory.mktemp("fonts") / "first.png"
    )


@pytest.fixture(scope="module")
def result() -> fs.Result:
    return fs.run("digits-mlp", "local_sgd(8)", 2, steps=40, look_every="4 steps")


@pytest.fixture
def folder(result, tmp_path) -> Path:
    return result.save(tmp_path / "kept")


# --- flockstep run --------------------------------------------------------------------------------


def test_a_run_says_clock_units_network_step_time_and_what_next(flockstep, tmp_path):
    out = tmp_path / "r"
    network = ["--network", "latency=20ms,bandwidth=100Mbit/s", "--compute", "20ms"]
    done = flockstep("run", "digits-mlp", "SyncSGD", *SMALL, *network, "--slow", "1=2.0")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[:4] == [
        "digits-mlp, 2 simulated workers",
        "sync_sgd",
        "network 100 Mbit/s, 20 ms",
        "a step takes 20 ms; 2 times as long on rank 1",
    ]
    rows = {line.split()[0]: line.split(maxsplit=3) for line in lines[4:] if line}
    assert rows["seconds"][2:] == ["s", "virtual: the simulator's clock"]
    assert rows["wall_seconds"][3].startswith("the wall's clock")
    nbytes = 6 * 2 * 4 * 9610  # six all-reduces of two workers
    assert rows["bytes_sent"][1:3] == [f"{nbytes / 1e6:.4g}", "MB"]
    assert rows["test_accuracy"][1].endswith("%")
    assert lines[-2:] == [
        "Add --out FOLDER to keep the result; flockstep show FOLDER draws its history.",
        "To compare: 'local_sgd(8)' in place of the strategy, or --network wan-100m.",
    ]
    done = flockstep("run", "digits-mlp", "local_sgd(2)", *SMALL, "--out", str(out))
    assert f"Saved in {out}. Its history: flockstep show {out}\n" in done.stdout
    assert "To compare: sync_sgd in place of the strategy, " in done.stdout


def test_no_line_of_a_run_is_wider_than_the_terminal_and_no_heading_wraps(flockstep):
    fields = "period=3, c1=0.123456789012, c2=0.123456789012, inertia_max=0.8, random=vector"
    strategy = f"pso_ps({fields})"
    network = "network(0.01, 1e8, inside=link(0.000123456789, 123456789012), household_size=2)"
    done = flockstep("run", "digits-mlp", strategy, *SMALL, "--network", network)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == f"{strategy[:79]}…"
    assert lines[2].startswith("network 800 Mbit/s, 10 ms; 987.7 Gbit/s, 0.1235 ms inside house")
    assert lines[3].startswith("a step takes 10 ms")


@pytest.mark.cluster  # real processes
def test_a_run_on_processes_says_that_its_seconds_are_the_walls(flockstep):
    done = flockstep("run", "digits-mlp", "sync_sgd", *SMALL, "--backend", "local")
    assert done.stdout.startswith("digits-mlp, 2 local processes\nsync_sgd\n")
    assert any(
        line.split()[:1] == ["seconds"] and line.rstrip().endswith("s  the wall's clock")
        for line in done.stdout.splitlines()
    )
    assert "or another --seed." in done.stdout


def test_the_bar_counts_steps(capsys):
    with steps_bar("digits-mlp sync_sgd", 40, show=True) as watch:
        watch([10, 14])
    assert "12/40 steps" in capsys.readouterr().err


def test_slow_ranks_join_those_of_the_spec():
    spec = fs.RunSpec("digits-mlp", "sync_sgd", compute=fs.Compute(0.02, slow={1: 3.0, 2: 9.0}))
    slow = with_slow_ranks(spec, ["2=1.5", "3=2"])
    assert slow.compute == fs.Compute(0.02, slow={1: 3.0, 2: 1.5, 3: 2.0})
    assert fs.RunSpec.from_toml(slow.to_toml()) == slow
    assert with_slow_ranks(spec, []) is spec
    plain = fs.RunSpec("digits-mlp", "sync_sgd")
    assert with_slow_ranks(plain, ["0=2"]).compute == fs.Compute(slow={0: 2.0})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slow", "3"], "'--slow' must be RANK=FACTOR such as 3=2.0 (got '3')"),
        (["--slow", "a=2"], "'--slow' must be RANK=FACTOR such as 3=2.0 (got 'a=2')"),
        (["--slow", "3=0"], "'slow' must map ranks to factors above 0"),
        (["--slow", "1=2", "--slow", "1=3"], "'--slow' must not name a rank twice (got '1=3')"),
        (["--slow", "1=2", "--compute", "measured"], "'--slow' must be left out where step times "),
        (["--slow", "1=2", "--backend", "local"], "'--slow' must be left out with a backend"),
        (["--compute", "20mss"], "'--compute' must be a time such as 20ms, 0.5s or 100us"),
        (["--network", "latency=1s"], "'bandwidth' of --network must be given: latency=20ms,"),
    ],
)
def test_a_wrong_step_time_or_network_is_one_line(refused, flags, message):
    refused(["run", "digits-mlp", "sync_sgd", *flags], message)


OWN_TASK = """
import dataclasses, math, flockstep as fs
def error_of_mine(model, batch):
    return 12.5
def undefined(model, batch):
    return math.nan
digits = fs.task("digits-mlp")
named = dataclasses.replace(digits, metric=error_of_mine)
told = dataclasses.replace(digits, metric=lambda *_: 12.5, metric_name="perplexity [bits]")
broken = dataclasses.replace(digits, metric=undefined)
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    (tmp_path / "own_tasks_for_terminal.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    yield "own_tasks_for_terminal"
    sys.modules.pop("own_tasks_for_terminal", None)


@pytest.mark.parametrize(
    ("task", "name"), [("named", "error_of_mine"), ("told", "perplexity [bits]")]
)
def test_a_score_that_is_no_accuracy_is_not_called_so(flockstep, own_tasks, task, name):
    small = [*SMALL, "--measure", "training"]
    call = ["run", f"{own_tasks}:{task}", "sync_sgd", *small, "--out", "r"]
    for done in (flockstep(*call), flockstep("show", "r")):
        assert f" test_{name} " in done.stdout
        assert f" train_{name} " in done.stdout
        assert " 12.5 " in done.stdout
        said = re.sub("(test|train)_accuracy in result.metrics", "", done.stdout)
        assert "accuracy" not in said
    result = fs.load_result("r")
    assert "accuracy" not in repr(result)
    assert f"test {name} 12.5" in repr(result)
    assert result.metrics["test_accuracy"] == result.history[-1]["accuracy"] == 12.5


def test_scores_are_told_in_per_cent(flockstep):
    done = flockstep("run", "digits-mlp", "sync_sgd", *SMALL, "--measure", "training")
    for name in ("test_accuracy", "train_accuracy"):
        assert re.search(rf" {name} +[\d.]+%  of the final model", done.stdout)


def test_a_score_has_the_name_of_its_function():
    task = fs.task("digits-mlp")
    assert task.score_name == "accuracy"
    assert dataclasses.replace(task, metric=lambda *_: 0).score_name == "score"
    assert dataclasses.replace(task, metric_name="F1").score_name == "F1"
    with pytest.raises(fs.InvalidField, match="'metric_name' must be a text of one line"):
        dataclasses.replace(task, metric_name="a\nb")


# --- Where results go -----------------------------------------------------------------------------


def test_a_score_that_is_not_a_number_is_shown_saved_as_null_and_ends_with_1(flockstep, own_tasks):
    done = flockstep("run", f"{own_tasks}:broken", "sync_sgd", *SMALL, "--out", "r", "--json")
    assert done.returncode == 1
    assert done.stderr == (
        "flockstep: 'test_undefined' of the trained model is nan after 6 steps\n"
    )
    told = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert told["metrics"]["test_accuracy"] is None
    assert told["metrics"]["test_loss"] > 0
    assert json.loads(Path("r/result.json").read_text())["metrics"] == told["metrics"]
    assert fs.load_result("r").metrics["test_accuracy"] is None
    done = flockstep("run", f"{own_tasks}:broken", "sync_sgd", *SMALL)
    assert done.returncode == 1
    assert " test_undefined " in done.stdout
    assert " nan " in done.stdout
    assert "– " in flockstep("show", "r").stdout


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.2}, {"optimizer": "adam(lr=0.1)"}, {"optimizer": "sgd(lr=0.1, momentum=0.5)"}],
)
def test_runs_that_differ_in_rate_or_optimizer_do_not_look_alike(change, tmp_path):
    """In what is saved beside the spec, too: tables of a sweep are made of it."""
    configs = []
    for number, fields in enumerate(({"lr": 0.1}, change)):
        run = fs.run("digits-mlp", "sync_sgd", 1, steps=1, **fields)
        configs.append(json.loads((run.save(tmp_path / str(number)) / "result.json").read_text()))
    one, other = (each["config"] for each in configs)
    assert (one["optimizer"], one["lr"]) != (other["optimizer"], other["lr"])
    assert one["id"] != other["id"]
    assert one["spec"] != other["spec"]


def test_a_folder_with_a_result_is_said_to_be_overwritten_before_the_run(flockstep, folder):
    before = fs.load_result(folder).config["id"]
    call = ["run", "digits-mlp", "sync_sgd", *SMALL, "--json", "--out", str(folder)]
    done = flockstep(*call)
    assert done.returncode == 0
    assert done.stderr == f"flockstep: the earlier result in {folder} will be overwritten\n"
    assert json.loads(done.stdout)["id"] == fs.load_result(folder).config["id"] != before


def test_what_was_trained_is_saved_elsewhere_if_its_folder_has_become_bad(
    flockstep, tmp_path, monkeypatch
):
    """The folder is there before the run, and a file is in its place afterwards."""
    monkeypatch.chdir(tmp_path)
    module = sys.modules["flockstep.cli.run"]  # whose name is that of the command, too
    train = module.train

    def train_and_spoil(*arguments, **options):
        Path("mine").write_text("in the way")
        return train(*arguments, **options)

    monkeypatch.setattr(module, "train", train_and_spoil)
    done = flockstep("run", "digits-mlp", "sync_sgd", *SMALL, "--out", "mine")
    assert done.returncode == 1
    (kept,) = [each for each in tmp_path.iterdir() if each.name != "mine"]
    assert done.stderr == f"flockstep: 'mine' took no result: it is in '{kept}'\n"
    assert f"Saved in {kept}. " in done.stdout
    assert fs.load_result(kept).metrics["steps"] == 6


def test_saving_warns_before_it_overwrites(result, folder, tmp_path):
    with pytest.warns(UserWarning, match="the earlier result in '.*kept' will be overwritten"):
        result.save(folder)
    result.save(tmp_path / "another")  # without a warning, which would be an error here


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(result, folder):
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    replicas = len(files["replicas.safetensors"])  # the largest, and not the first
    another = dataclasses.replace(result, config=result.config | {"seed": 9})
    for place, warning in ((folder, pytest.warns(UserWarning)), (folder / "new", nullcontext())):
        refusal = pytest.raises(fs.ResultError, match="takes no result: .*File too large")
        with warning, refusal, files_end_at(replicas - 1):
            another.save(place)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == files


def test_a_bad_folder_is_named_and_nothing_is_left(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.ResultError, match=r"takes no result: Not a directory"):
        result.save(tmp_path / "file" / "inside")
    with pytest.raises(fs.ResultError, match=r"takes no result: File name too long"):
        result.save(tmp_path / "new" / ("x" * 300))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


# --- repr and flockstep show ----------------------------------------------------------------------


def test_a_result_prints_as_five_lines(result):
    first, scores, costs, looks, more = repr(result).splitlines()
    assert first == "Result of digits-mlp with local_sgd(period=8), 2 workers, backend sim"
    accuracy = f"{100 * result.metrics['test_accuracy']:.4g}%"
    assert scores.startswith(f"  test accuracy {accuracy}, test loss ")
    assert costs.startswith("  0.4")
    assert costs.endswith(" s virtual, 40 steps, 5 exchanges, 0.3844 MB sent")
    begin = f"{100 * result.history[0].accuracy:.4g}%"
    assert looks == f"  10 looks: accuracy {begin} → {accuracy}"
    assert ".metrics" in more
    bare = fs.Result(result.config, {"workers": 2, "lost": 1}, [], [])
    assert "no figures: the process of rank 0 has them" in repr(bare)
    assert len(repr(bare).splitlines()) == 5


def test_a_saved_result_is_shown_with_its_curves(flockstep, folder, result):
    done = flockstep("show", str(folder))
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[:7] == [
        "digits-mlp, 2 simulated workers",
        "local_sgd(period=8)",
        "network lan-1g (1 Gbit/s, 0.1 ms)",
        "a step takes 10 ms",
        "optimizer sgd(lr=0.05, momentum=0.9)",
        "40 steps, batch size 16, seed 0",
        "assignment Disjoint(), schedule Constant()",
    ]
    table = "\n".join(lines)
    for name in result.metrics:
        assert f"\n {name} " in table
    curves = lines[lines.index("accuracy") :]
    assert any("⠤⠤ evaluation loss   • training loss" in line for line in curves)
    assert sum("virtual seconds" in line for line in curves) == 2
    by_bytes = flockstep("show", str(folder), "--by", "bytes").stdout
    assert "MB sent by all workers" in by_bytes


def test_a_saved_result_is_shown_without_its_tensors_and_its_task(flockstep, folder):
    (folder / "model.safetensors").unlink()
    record = json.loads((folder / "result.json").read_text())
    record["config"]["task"] = "not_here:task"
    record["config"]["spec"]["task"] = "not_here:task"
    record["config"]["optimizer"] = "<function mine at 0x7f>"
    (folder / "result.json").write_text(json.dumps(record))
    shown = flockstep("show", str(folder)).stdout
    assert shown.startswith("not_here:task, 2 simulated workers\n")
    assert "\noptimizer mine\n" in shown


def test_a_saved_result_as_json_is_what_the_run_printed(flockstep, tmp_path):
    call = ["run", "digits-mlp", "sync_sgd", *SMALL, "--target", "2", "--out", str(tmp_path / "r")]
    printed = flockstep(*call, "--json").stdout
    assert flockstep("show", str(tmp_path / "r"), "--json").stdout == printed
    assert {"metrics", "history", "lost", "task", "strategy", "fields"} <= json.loads(
        printed
    ).keys()


@pytest.mark.parametrize(("ending", "beginning"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_history_is_drawn_as_a_picture(flockstep, folder, tmp_path, ending, beginning):
    path = tmp_path / f"curve.{ending}"
    done = flockstep("show", str(folder), "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"The picture is in {path}\n")
    assert path.read_bytes().startswith(beginning)
    flockstep("show", str(folder), "--png", str(path), "--by", "epochs")
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, "kept"]


def test_what_is_no_result_is_one_line(refused, folder, tmp_path):
    refused(["show", str(tmp_path)], f"'{tmp_path}' is not a result folder: it has no result.json")
    refused(["show", str(tmp_path / "no")], f"'{tmp_path / 'no'}' is not a result folder: ")
    refused(["show", str(folder), "--plot", "x.gif"], "'--plot' must end in .png, .svg, .pdf (got")
    shutil.copytree(folder, tmp_path / "old")
    (tmp_path / "old/result.json").write_text('{"format": 2, "config": {}}')
    refused(["show", str(tmp_path / "old")], f"'{tmp_path / 'old'}' holds a damaged result: ")


def test_the_commands_of_the_page_of_results_run(flockstep, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    (flockstep .*)$", page, flags=re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        done = flockstep(*shlex.split(command, comments=True)[1:])
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.png").exists()
    assert (tmp_path / "flatness.png").exists()


# --- Curves in a terminal -------------------------------------------------------------------------


def plotted(*curves: Curve, columns: int = 21, rows: int = 5) -> list[str]:
    drawn = chart(curves, columns, rows, "steps", "{:g}".format, "{:g}".format)
    return [line.rstrip() for line in drawn.plain.splitlines()]


def test_a_line_goes_from_corner_to_corner():
    assert plotted(Curve("up", [(0, 0), (10, 2)])) == [
        "up",
        "2 ┤              ⢀⡠⠔⠊",
        "  │           ⣀⠔⠊⠁",
        "1 ┤       ⣀⠤⠒⠉",
        "  │   ⢀⡠⠔⠉",
        "0 ┤⡠⠔⠊⠁",
        "  └──────────────────",
        "   0     steps     10",
    ]


def test_points_are_marked_one_by_one_and_gaps_left_out():
    points = [(0, 1.0), (1, None), (2, math.nan), (3, math.inf), (4, 3.0)]
    lines = plotted(Curve("loss", points, is_joined=False))
    assert sum(line.count("•") for line in lines) == 2
    assert lines[1].startswith("3 ┤") and lines[1].endswith("•")
    assert lines[5] == "1 ┤•"


@pytest.mark.parametrize(("count", "seen"), [(4, 3), (8, 0)])
def test_a_few_points_are_seen_on_a_line_and_many_do_not_hide_it(count, seen):
    points = [(x, 1.0) for x in range(count - 1)] + [(count, 3.0)]
    drawn = plotted(Curve("points", points, is_joined=False), Curve("line", [(0, 1.0), (9, 1.0)]))
    assert drawn[0] == "• points   ⠤⠤ line"
    assert drawn[1].count("•") == 1
    assert (drawn[5].count("•"), drawn[5].count("⣀")) == (seen, 18 - seen)


def test_one_look_or_none_is_drawn_as_well(result):
    (line,) = [line for line in plotted(Curve("one", [(5, 2.0)])) if "•" in line]
    assert line.startswith("2 ┤")
    assert plotted(Curve("none", [(1, None)])) == ["none: no look has a value"]
    empty = fs.Result(result.config, result.metrics, [], [])
    assert "no looks" in str(sketch_history(empty, "seconds", 80))


# --- flockstep list -------------------------------------------------------------------------------


def test_the_list_of_all_fits_a_screen_and_points_to_its_parts(flockstep):
    lines = flockstep("list").stdout.splitlines()
    assert len(lines) < 28
    assert max(map(len, lines)) <= 80
    listed = json.loads(flockstep("list", "--json").stdout)
    text = " ".join(" ".join(lines).split())
    for part, rows in listed.items():
        assert part == "studies" or f"{part} {next(iter(rows)).split()[0]}" in text
        names = [usage.split()[0] for usage in rows]
        many = f"{len(names)} of them: flockstep list studies"
        assert (many if part == "studies" else in_families(names)) in text
    assert "flockstep list strategies" in lines[-1]


def test_names_that_go_on_where_another_ends_are_one_family():
    names = ["full", "full-1k", "lstm", "full-1k-wild", "net-deep", "net-wide"]
    assert in_families(names) == "full (-1k, -1k-wild), lstm, net-deep, net-wide"


def test_networks_are_listed_with_units(flockstep):
    lines = [line.split() for line in flockstep("list", "networks").stdout.splitlines()]
    assert ["lan-1g", "1", "Gbit/s", "0.1", "ms"] in lines
    assert ["wan-100m", "100", "Mbit/s", "30", "ms"] in lines
    assert sum(line[:1] == [name] for line in lines for name in PRESETS) == len(PRESETS)
