"""`flockstep data`, `inspect`, and the tables of what needs data."""

from __future__ import annotations

import json
import sys

import pytest
from tests.data.lying_server import Mirror, honest

import flockstep as fs
from flockstep.data.datasets import DATASETS, cifar10
from flockstep.data.overlap import overlap_of
from flockstep.report.assignment_figure import draw
from flockstep.tasks.builtin import TASKS


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory):
    """Matplotlib keeps the files of its fonts open, from the first picture on."""
    draw(
        overlap_of(fs.Disjoint(), 4, 2, seed=0), "", tmp_path_factory.mktemp("fonts") / "first.png"
    )


def test_a_scheme_is_shown_as_rows_of_workers(flockstep):
    done = flockstep(
        "data", "show", "MediumCoarse", "--workers", "4", "--set", "copies=2", "--samples", "8"
    )
    assert done.returncode == 0, done.stderr
    title, *rows, figures = done.stdout.splitlines()
    assert title == "MediumCoarse(copies=2), 4 workers, 8 samples, 2 copies of each"
    assert [row[0] for row in rows] == list("0123")
    held = [{column for column, shade in enumerate(row[2:]) if shade == "█"} for row in rows]
    assert [len(own) for own in held] == [4, 4, 4, 4]
    assert [len(held[rank] & held[(rank + 1) % 4]) for rank in range(4)] == [2, 2, 2, 2]
    assert not held[0] & held[2]
    assert figures == "A worker holds 4 samples; two have 0 to 2 in common."


@pytest.mark.parametrize(
    ("ending", "beginning"),
    [("png", b"\x89PNG\r\n"), ("svg", b"<?xml"), ("pdf", b"%PDF-"), ("PNG", b"\x89PNG")],
)
def test_a_scheme_is_drawn(flockstep, tmp_path, ending, beginning):
    path = tmp_path / f"scheme.{ending}"
    done = flockstep("data", "show", "fine_grained", "--set", "copies=3", "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(beginning)
    assert list(tmp_path.iterdir()) == [path]


def test_the_picture_shows_who_holds_what(flockstep, tmp_path):
    """Two schemes, two pictures; and blue where samples are held."""
    from matplotlib.image import imread

    shares = []
    for name, copies in (("one", 1), ("three", 3)):
        path = tmp_path / f"{name}.png"
        flockstep(
            "data",
            "show",
            "MediumCoarse",
            "--workers",
            "4",
            "--set",
            f"copies={copies}",
            "--out",
            str(path),
        )
        left = imread(path)[:, :800, :3]  # the panel of samples
        is_blue = (left[..., 2] > 0.5) & (left[..., 0] < 0.2)
        shares.append(is_blue.mean())
    assert shares[1] == pytest.approx(3 * shares[0], rel=0.1)


def test_without_matplotlib_it_is_said_what_to_install(refused, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(
        ["data", "show", "disjoint", "--out", str(tmp_path / "scheme.png")],
        "pictures need matplotlib: pip install 'flockstep[plot]'",
    )
    assert list(tmp_path.iterdir()) == []


def test_many_workers_are_shown_in_part(flockstep):
    done = flockstep("data", "show", "disjoint", "--workers", "200")
    assert "… and 136 more workers" in done.stdout


def test_a_scheme_as_json(flockstep):
    done = flockstep(
        "data", "show", "household_shards", "--workers", "8", "--samples", "101", "--json",
        "--set", "households=4", "--set", "shards=2", "--set", "inside=full_overlap",
    )  # fmt: skip
    assert json.loads(done.stdout) == {
        "assignment": "HouseholdShards(households=4, shards=2, inside=FullOverlap())",
        "workers": 8,
        "samples": 101,
        "copies": 4,
        "fewest_a_worker": 50,
        "most_a_worker": 51,
        "fewest_a_pair": 0,
        "most_a_pair": 51,
    }


@pytest.fixture
def shakespeare():
    dataset = DATASETS["tinyshakespeare"]
    found = dataset.files.find()
    if found is None:
        pytest.skip("data set 'tinyshakespeare' is not there: set FLOCKSTEP_DATA, or fetch it")
    return found[1][0].read_bytes()


def test_a_data_set_is_fetched_and_then_used(flockstep, monkeypatch, tmp_path, shakespeare):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path / "data"))
    with Mirror({"input.txt": shakespeare}, honest) as mirror:
        for _ in range(2):
            done = flockstep("data", "fetch", "tinyshakespeare", "--mirror", mirror.url)
            assert done.returncode == 0, done.stderr
            assert (
                done.stdout
                == f"tinyshakespeare is verified and in {tmp_path / 'data' / 'tinyshakespeare'}\n"
            )
    assert mirror.asked == [("/input.txt", None)]  # the second time it was there
    assert (tmp_path / "data/tinyshakespeare/input.txt").read_bytes() == shakespeare
    assert (
        json.loads(flockstep("list", "datasets", "--json").stdout)["datasets"]["tinyshakespeare"][
            "there"
        ]
        is True
    )


def test_a_mirror_that_lies_is_one_line_and_leaves_nothing(flockstep, monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Mirror({"input.txt": b"x" * 1_115_394}, honest) as mirror:
        done = flockstep(
            "data", "fetch", "tinyshakespeare", "--mirror", mirror.url, "--to", str(tmp_path / "to")
        )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "input.txt must have md5 6fb458f1232090904fb40fe944165e91 (got " in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # not even the folder


def test_what_is_embedded_need_not_be_fetched(flockstep):
    assert (
        flockstep("data", "fetch", "digits").stdout
        == "digits is embedded: there is nothing to fetch\n"
    )


def test_what_is_the_users_own_is_not_fetched(flockstep, monkeypatch, tmp_path):
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = flockstep("data", "fetch", "imagenet")
    assert done.returncode == 1
    assert f"train/CLASS/*.jpg and val/CLASS/*.jpg in {tmp_path / 'imagenet'} or " in done.stderr
    assert "it cannot be fetched, so put your own copy there" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    for part in ("train", "val"):
        (tmp_path / "imagenet" / part).mkdir(parents=True)
    place = tmp_path / "imagenet"
    assert (
        flockstep("data", "fetch", "imagenet").stdout
        == f"imagenet is your own and in {place}: there is nothing to fetch\n"
    )


IMAGENET_RATIOS = {
    "imagenet-resnet50": 301.91,
    "imagenet-googlenet-v2": 360.67,
    "imagenet-alexnet": 36.40,
}


@pytest.mark.parametrize("name", TASKS)
def test_inspect_counts_every_task_without_its_data(flockstep, monkeypatch, tmp_path, name):
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = json.loads(flockstep("inspect", name, "--json").stdout)
    assert figures["task"] == name
    assert figures["bytes"] == 4 * figures["parameters"]
    if name in IMAGENET_RATIOS:  # too large to be made and run for this
        assert figures["cc_ratio"] == pytest.approx(IMAGENET_RATIOS[name], abs=0.005)
        return
    data = TASKS[name].data
    rows = DATASETS[data].example(3) if data is not None else fs.task(name).train()[0][:3]
    assert figures["cc_ratio"] == pytest.approx(fs.cc_ratio(TASKS[name].model(), rows))


def test_inspect_prints_a_table(flockstep):
    printed = flockstep("inspect", "digits-mlp").stdout
    assert "MLP" in printed
    for figure in ("9,610", "38,440", "18,944", "2.0"):
        assert figure in printed


def test_inspect_takes_a_task_of_ones_own(flockstep, monkeypatch, tmp_path):
    (tmp_path / "own_task_to_inspect.py").write_text(
        "import torch, flockstep as fs\n"
        "x, y = torch.randn(6, 10), torch.zeros(6).long()\n"
        "def frozen():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.Linear(5, 2))\n"
        "    net[0].requires_grad_(False)\n"
        "    return net\n"
        "mine = fs.Task('mine', frozen, lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "               fs.classification_loss, (x, y), (x, y), fs.classification_accuracy)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = flockstep("inspect", "own_task_to_inspect:mine")
    sys.modules.pop("own_task_to_inspect")
    assert done.returncode == 0, done.stderr
    for line in ("parameters", "67", "of them trained", "12", "120"):
        assert line in done.stdout


def test_tasks_are_listed_with_their_size_their_data_and_whether_it_is_there(
    flockstep, monkeypatch, tmp_path
):
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tasks = json.loads(flockstep("list", "tasks", "--json").stdout)["tasks"]
    assert set(tasks) == {
        "digits-mlp", "digits-cnn", "digits-deep", "digits-wide",
        "mnist-lenet", "mnist-lstm", "mnist-lstm-256", "mnist-deep", "mnist-wide", "fashion-lenet",
        "fashion-mlp", "gradient-noise",
        "cifar10-full", "cifar10-full-1k", "cifar10-full-2k", "cifar10-full-5k", "cifar10-full-8k",
        "cifar10-full-8k-ea-wild", "cifar10-resnet20", "cifar10-resnet18", "cifar10-resnet18-adam",
        "cifar10-densenet40", "cifar10-densenet40-64", "cifar10-densenet40-ea-wild",
        "cifar10-densenet40-huang", "imagenet-resnet50", "imagenet-googlenet-v2",
        "imagenet-alexnet", "shakespeare-gpt",
    }  # fmt: skip
    assert tasks["cifar10-resnet20"] == {
        "parameters": 269_722, "data": "cifar10", "there": False, "epochs": 182,
        "batch": "128 in all",
    }  # fmt: skip
    assert tasks["digits-cnn"]["there"] is True
    printed = flockstep("list", "tasks").stdout
    assert "cifar10-densenet40" in printed
    assert "1,019,722" in printed
    assert set(json.loads(flockstep("list", "datasets", "--json").stdout)["datasets"]) == set(
        DATASETS
    )


def test_a_task_without_its_data_says_how_to_get_it(flockstep, monkeypatch, tmp_path):
    cifar10.cache_clear()  # another test may have loaded it, and then it is there
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = flockstep("run", "cifar10-full", "sync_sgd", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "data_batch_1.bin" in done.stderr
    assert "flockstep data fetch cifar10" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_takes_assignment_order_and_schedule(flockstep):
    done = flockstep(
        "run", "digits-mlp", "sync_sgd", "--workers", "4", "--epochs", "2", "--json",
        "--assignment", "medium_coarse(copies=2)",
        "--order", "with_replacement", "--shuffle", "global",
        "--schedule", "warmup(epochs=0.5) * step_decay(at=(0.5, 0.75), gamma=0.2)",
        "--batch-size", "batch_growth(16, at=(0.5,), factor=2)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["assignment"] == "MediumCoarse(copies=2)"
    assert told["sampling"] == "Sampling(order='with_replacement', shuffle='global')"
    assert told["schedule"] == repr(fs.Warmup(0.5) * fs.StepDecay((0.5, 0.75), 0.2))
    assert told["batch_size"] == "BatchGrowth(initial=16, at=(0.5,), factor=2.0, maximum=None)"
    assert len(told["history"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "show", "Finest"], "unknown assignment 'Finest'; known: coarse, disjoint"),
        (["data", "show", "Coarse"], "'shards' of coarse must be given: --set shards=…"),
        (["data", "show", "Coarse", "--set", "shards=3"],
         "'shards' must divide the number of workers, 8 (got 3)"),
        (["data", "show", "MediumCoarse", "--set", "copies=9"],
         "'copies' must be at most the number of workers, 8"),
        (["data", "show", "disjoint", "--samples", "5"],
         "'samples' must be at least the number of workers, 8 (got 5)"),
        (["data", "show", "disjoint", "--workers", "0"], "'workers' must be at least 1 (got 0)"),
        (["data", "show", "disjoint", "--out", "scheme.bmp"],
         "'--out' must end in .png, .svg, .pdf (got"),
        (["data", "show", "disjoint", "--out", "no/such/folder.png"],
         "'--out' must be a file that can be written"),
        (["data", "fetch", "svhn"], "unknown data set 'svhn'; known: cifar10, digits"),
        (["inspect", "digits"], "unknown task 'digits'; did you mean 'digits-mlp'? known: "),
        (
            ["run", "digits-mlp", "sync_sgd", "--assignment", "coarse(3"],
            "'--assignment' must be an assignment such as disjoint or medium_coarse(copies=2) (got "
            "'coarse(3')",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--schedule", "cosine + cosine"],
            "'--schedule' must be a schedule such as cosine or warmup(epochs=5) * step_decay (got "
            "'cosine + cosine')",
        ),
        (["run", "digits-mlp", "sync_sgd", "--schedule", "sine"],
         "unknown schedule 'sine'; did you mean 'cosine'? known: constant, cosine"),
        (
            ["run", "digits-mlp", "sync_sgd", "--schedule", "step_decay(at=half)"],
            "'at' must be numbers such as 0.5,0.75 (got 'half')",
        ),
        (
            ["run", "digits-mlp", "sync_sgd", "--batch-size", "many()+"],
            "'--batch-size' must be a whole number, or batch_growth(initial=32, at=(0.5,), "
            "factor=4) (got 'many()+')",
        ),
        (["run", "digits-mlp", "sync_sgd", "--batch-size", "many"],
         "unknown batch size 'many'; known: batch_growth"),
        (["run", "digits-mlp", "sync_sgd", "--batch-size", "0"],
         "'batch_size' must be at least 1 (got 0)"),
        (["run", "digits-mlp", "sync_sgd", "--order", "sorted"],
         "'order' must be one of 'reshuffle'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_on_stderr(refused, arguments, message):
    refused(arguments, message)
