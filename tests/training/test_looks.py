"""Looks: the whole run at one moment, scored by what stands for it, at no cost to the run."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from tests.strategies.table import TABLE

import flockstep as fs
from flockstep.tasks import TASKS
from flockstep.training import board, observer

ROWS = pytest.mark.parametrize("row", TABLE, ids=str)
FLOATS = 64 * 128 + 128 + 128 * 10 + 10  # of the model of digits-mlp


def short(strategy, workers=4, **fields):
    return fs.run("digits-mlp", strategy, workers, **{"steps": 25, "seed": 2, **fields})


def is_looked_at_after_the_same_step(strategy):
    """Those whose workers share tensors are looked at when the clock shows one time for all."""
    shares = isinstance(strategy, fs.EASGD | fs.EAMSGD | fs.EAWild | fs.StaleSync)
    return strategy.waits and not (shares and getattr(strategy, "mode", "") != "sync")


@ROWS
def test_looking_changes_nothing_and_shows_what_finishing_there_would_give(row):
    """Of PSOPS the inertia goes by the length of the whole run: ending early is another run."""
    fields = {"compute": fs.Compute(0.01, jitter=0.4), "steps": 16}
    blind = short(row.strategy, row.workers, look_every="1000 steps", lanes=1, **fields)
    looking = short(row.strategy, row.workers, look_every="6 steps", lanes=2, **fields)
    assert len(blind.history) == 1
    assert len(looking.history) == 3
    assert blind.metrics | {"wall_seconds": 0} == looking.metrics | {"wall_seconds": 0}
    assert all(map(torch.equal, blind.replicas, looking.replicas))

    last = looking.history[-1]
    assert last.accuracy == looking.metrics["test_accuracy"]
    assert last.loss == looking.metrics["test_loss"]
    assert (last.step, last.seconds) == (looking.metrics["steps"], looking.metrics["seconds"])
    assert last.bytes_sent == looking.metrics["bytes_sent"]
    assert last.samples == looking.metrics["samples"]

    if is_looked_at_after_the_same_step(row.strategy) and not isinstance(row.strategy, fs.PSOPS):
        ended = short(row.strategy, row.workers, **fields | {"steps": 12})
        seen = looking.history[1]
        assert seen.step == 12
        assert seen.accuracy == ended.metrics["test_accuracy"]
        assert seen.loss == ended.metrics["test_loss"]


@pytest.mark.parametrize("strategy", [fs.EAWild(2), fs.AsyncSGD(), fs.Independent()], ids=str)
def test_looks_go_by_one_clock_whoever_is_slow(strategy):
    def seconds(slow):
        compute = fs.Compute(0.01, slow={slow: 4.0})
        result = short(strategy, steps=80, look_every="20 steps", network="ideal", compute=compute)
        return [look.seconds for look in result.history]

    # Three fast workers take 100 steps a second, the slow one 25.
    assert seconds(0) == pytest.approx(seconds(3), abs=0.011)
    assert seconds(0)[0] == pytest.approx(80 / 325, abs=0.02)


def test_the_bytes_of_a_look_are_those_of_all_workers_at_that_time():
    compute = fs.Compute(0.01, slow={1: 2.0})
    result = short(
        fs.EAWild(1), 2, steps=40, look_every="0.1 seconds", network="ideal", compute=compute
    )
    first = result.history[0]
    assert first.seconds == pytest.approx(0.1)
    assert first.samples == (10 + 5) * 16
    assert first.bytes_sent == (10 + 5) * 2 * 4 * FLOATS


def calls_of(path, workers):
    """When each call was made that sent something, and how much, as the trace tells it."""
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    calls = []
    for rank in range(workers):
        own = [each for each in events if each["tid"] == rank]
        for before, each in zip([{}, *own], own, strict=False):
            if each["cat"] == "sending":
                has_waited = before.get("cat") == "waiting" and before["name"] == each["name"]
                asked = before["ts"] if has_waited else each["ts"]
                calls.append((asked / 1e6, each["args"]["bytes"]))
    return calls


@pytest.mark.parametrize("strategy", [fs.AsyncSGD(), fs.EASGD(2), fs.EAWild(2)], ids=str)
def test_a_look_has_the_bytes_of_the_calls_that_were_made_until_then(strategy, tmp_path):
    path = tmp_path / "trace.json"
    fields = {"steps": 12, "look_every": "0.05 seconds", "network": "wan-100m"}
    looks = short(strategy, trace=path, **fields).history
    calls = calls_of(path, workers=4)
    assert len(looks) > 10
    for look in looks[:-1]:
        until = look.seconds + 1e-9
        assert look.bytes_sent == sum(sent for asked, sent in calls if asked <= until)


@pytest.mark.parametrize(("slow", "steps"), [(2.0, 5), (3.0, 3), (50.0, 0)])
def test_a_look_at_a_time_has_the_steps_that_were_done_by_then(slow, steps):
    compute = fs.Compute(0.01, slow={1: slow})
    fields = {"steps": 20, "look_every": "0.1 seconds", "network": "ideal", "compute": compute}
    for strategy in (fs.EAWild(1), fs.GoSGD(0.5), fs.Independent()):
        first = short(strategy, 2, **fields).history[0]
        assert (first.seconds, first.samples) == (0.1, (10 + steps) * 16)


def test_looks_come_at_multiples_of_their_interval():
    """3 × 0.1 is more than 0.3 in binary."""
    for strategy in (fs.EAWild(1), fs.SyncSGD()):
        fields = {"network": "ideal", "compute": fs.Compute(0.01)}
        seen = short(strategy, 2, steps=60, look_every="0.1 seconds", **fields).history
        assert [look.seconds for look in seen][:-1] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
        assert [look.step for look in seen][:-1] == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    "strategy", [fs.EAWild(2), fs.Independent(), fs.EASGD(2), fs.GoSGD(0.5)], ids=str
)
@pytest.mark.parametrize("interval", ["0.5 seconds", "6 steps"])
def test_the_training_loss_of_a_look_is_of_the_steps_since_the_look_before(
    strategy, interval, monkeypatch
):
    """The fast worker ends long before the slow one, and is still there at later looks."""
    steps = {0: [], 1: []}  # when each worker has ended which, and its loss
    after_step = observer.Observer.after_step

    def spy(self):
        steps[self.worker.comm.rank].append((self.worker.comm.now(), self.worker.loss))
        return after_step(self)

    monkeypatch.setattr(observer.Observer, "after_step", spy)
    fields = {"network": "ideal", "compute": fs.Compute(0.01, slow={1: 20.0}), "steps": 20}
    looks = short(strategy, 2, look_every=interval, **fields).history
    before = 0.0
    for look in looks:
        until = look.seconds + 1e-9
        losses = [[loss for t, loss in own if before < t <= until] for own in steps.values()]
        means = [statistics.fmean(own) for own in losses if own]
        assert look.train_loss == pytest.approx(statistics.fmean(means))
        before = until
    assert len(looks) >= 4


def test_nothing_that_travels_is_lost_or_counted_twice_at_a_look(monkeypatch):
    """The weights of GoSGD, those in mailboxes included, are one in all."""
    sums = []

    def spy(strategy, copies, shared, worker, workers):
        own = sum(each.values["state.weight"] for each in copies.values())
        sums.append(own + sum(float(value[-1]) for value in shared.values()))
        return copies[0].flat

    monkeypatch.setattr(board, "representative", spy)
    compute = fs.Compute(0.01, jitter=0.5, slow={2: 7.3})
    for network in ("ideal", "wan-100m"):
        for interval in ("3 steps", "0.013 seconds"):
            short(fs.GoSGD(0.5), steps=60, look_every=interval, network=network, compute=compute)
    assert len(sums) > 80
    assert sums == pytest.approx([1.0] * len(sums))


@dataclass(frozen=True)
class OneCentrePerPair(fs.Strategy[Any]):
    """Workers of a pair add up what they are in a tensor of their own, and end as it."""

    name: ClassVar[str] = "one_centre_per_pair"

    def init(self, worker):
        pair = worker.comm.split(worker.comm.rank // 2)
        sums = pair.shared("sums", torch.zeros_like(worker.flat.state))
        return Sums(sums=sums)

    def after_step(self, worker, state):
        with state.sums.lock():
            state.sums.add(worker.flat.state, 0.5)

    def preview(self, worker, state):
        return worker.comm.all_reduce(state.sums.peek(), op="mean")

    def finish(self, worker, state):
        worker.comm.barrier()
        worker.flat.state.copy_(worker.comm.all_reduce(state.sums.peek(), op="mean"))


@dataclass
class Sums:
    sums: Any = fs.handle()


@dataclass(frozen=True)
class ByModel(fs.Strategy[None]):
    """Ends by way of the model itself rather than of its flat state."""

    name: ClassVar[str] = "by_model"

    def finish(self, worker, state):
        for parameter in worker.model.parameters():
            worker.comm.all_reduce(parameter.data, op="mean")


@pytest.mark.parametrize("strategy", [OneCentrePerPair(), ByModel()], ids=str)
def test_looks_at_strategies_of_ones_own_are_what_ending_there_gives(strategy):
    fields = {"network": "ideal", "compute": fs.Compute(0.01)}
    seen = short(strategy, steps=16, look_every="8 steps", **fields).history[0]
    ended = short(strategy, steps=8, **fields)
    assert (seen.step, seen.loss) == (8, ended.metrics["test_loss"])


def test_a_strategy_that_ends_by_its_optimizer_must_say_its_own_preview():
    class ByOptimizer(fs.Strategy[None]):
        name = "by_optimizer"

        def finish(self, worker, state):
            worker.flat.state.mul_(worker.optimizer.param_groups[0]["lr"])

    with pytest.raises(fs.FlockstepError, match=r"ByOptimizer: .*'optimizer'.*preview"):
        short(ByOptimizer(), look_every="10 steps")


@dataclass(frozen=True)
class Drawing(fs.LocalSGD):
    def init(self, worker):
        torch.rand(3)
        return super().init(worker)


def test_what_a_strategy_draws_when_it_begins_is_drawn_once():
    task = dataclasses.replace(
        TASKS["digits-mlp"],
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Dropout(0.5)),
    )
    blind, looking = (fs.run(task, Drawing(4), 2, steps=12, look_every=every) for every in (100, 3))
    assert all(map(torch.equal, blind.replicas, looking.replicas))


def test_looking_takes_no_computing_time_of_a_simulated_worker():
    def metric(model, batch):
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        return 0.5

    task = dataclasses.replace(TASKS["digits-mlp"], metric=metric)
    fields = {"steps": 10, "compute": fs.Compute.measured(), "network": "ideal", "lanes": 1}
    for strategy in (fs.LocalSGD(4), fs.EAWild(4)):
        result = fs.run(task, strategy, 2, look_every="1 step", **fields)
        assert len(result.history) == 10
        assert result.metrics["seconds"] < 0.3


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.EAWild(4), fs.GoSGD(0.5)], ids=str)
def test_an_epoch_of_a_stream_is_an_epoch(strategy):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(64), torch.tensor(1))] * 320)

    task = dataclasses.replace(TASKS["digits-mlp"], train=Stream())
    history = fs.run(task, strategy, 2, epochs=3, batch_size=16).history
    assert [look.step for look in history] == [10, 20, 30]
    assert all(look.train_loss is not None for look in history)


def test_a_look_before_the_end_is_shown_though_the_mean_of_steps_is_the_same():
    compute = fs.Compute(0.3, jitter=0.3)
    fields = {"steps": None, "seconds": 1.0, "network": "ideal", "compute": compute, "seed": 4}
    before, last = short(fs.EAWild(2), look_every="0.1 seconds", **fields).history[-2:]
    assert before.step == last.step
    assert before.samples < last.samples
    assert before.seconds < last.seconds < before.seconds + 0.1


def test_a_look_while_the_last_exchange_is_under_way_is_shown():
    fields = {"steps": 4, "network": "wan-100m", "compute": fs.Compute(0.01)}
    strategy = fs.EAWild(4, order="after_step")
    looks = short(strategy, 2, look_every="0.01 seconds", **fields).history[-3:]
    assert [look.samples for look in looks] == [4 * 2 * 16] * 3
    # Both read, both add; then the barriers and the reads of the end.
    assert [look.seconds for look in looks[:2]] == [0.04, 0.08]
    assert looks[2].seconds > 0.2


def test_the_training_loss_of_a_run_is_that_of_its_last_epoch_however_often_one_looks():
    for strategy in (fs.SyncSGD(), fs.EAWild(4), fs.Independent()):
        losses = {
            short(strategy, steps=None, epochs=2, look_every=every).metrics["train_loss"]
            for every in ("1 epoch", "10 steps", "1000 steps", "0.03 seconds")
        }
        assert len(losses) == 1
        assert None not in losses


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.Independent()], ids=str)
def test_the_last_epoch_of_batches_that_grow_is_as_long_as_it_is(strategy):
    growth = fs.BatchGrowth(8, at=(0.5,), factor=10)
    result = short(strategy, 2, steps=None, epochs=4, batch_size=growth, look_every="1 epoch")
    steps = [look.step for look in result.history]
    assert steps[3] - steps[2] < steps[1] - steps[0]
    assert result.metrics["train_loss"] == pytest.approx(result.history[-1].train_loss)


def test_the_last_epoch_of_a_stream_is_its_last_pass():
    """Passes get longer, so what was kept of one is too little for the next."""

    class Growing(torch.utils.data.IterableDataset):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(torch.zeros(64), torch.tensor(1))] * (160 * self.passes))

    task = dataclasses.replace(TASKS["digits-mlp"], train=Growing())
    result = fs.run(task, fs.SyncSGD(), 1, epochs=3, batch_size=16)
    assert [look.step for look in result.history] == [10, 30, 60]
    assert result.metrics["train_loss"] == pytest.approx(result.history[-1].train_loss)


def test_a_run_that_ends_within_an_epoch_has_the_loss_of_as_many_steps_as_one_has():
    ended = short(fs.SyncSGD(), steps=30, look_every="7 steps")  # an epoch has 23
    looks = ended.history[1:]
    losses = [look.train_loss * steps for look, steps in zip(looks, (7, 7, 7, 2), strict=True)]
    assert ended.metrics["train_loss"] == pytest.approx(sum(losses) / 23)


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(4)], ids=str)
def test_looks_by_time_at_workers_that_wait_come_with_the_next_step(strategy):
    result = short(strategy, steps=100, look_every="0.2 seconds")
    seconds = [look.seconds for look in result.history[:-1]]
    assert len(seconds) >= 5
    for number, each in enumerate(seconds, 1):
        assert 0.2 * number <= each < 0.2 * number + 0.05


def test_the_time_to_an_accuracy_is_one_call_for_each_strategy():
    times = [
        fs.run(
            "digits-mlp", strategy, 4, network="wan-100m", target=0.8, look_every="5 steps", seed=1
        ).metrics["seconds_to_target"]
        for strategy in (fs.SyncSGD(), fs.LocalSGD(8))
    ]
    assert times[1] < times[0]


def test_rows_are_typed_and_still_mappings():
    result = short(fs.LocalSGD(4), epochs=2, steps=None)
    first, last = result.history
    assert isinstance(first, fs.Look)
    assert (first.step, first.epoch, first.samples) == (23, 1, 1437)
    assert first["accuracy"] == first.accuracy
    assert set(first) == {
        "step", "epoch", "samples", "seconds", "bytes_sent", "train_loss", "loss", "accuracy",
    }  # fmt: skip
    assert last.epoch == 2
    assert 0 < last.train_loss < first.train_loss


def test_replicas_and_spread_are_measured_on_request():
    result = short(fs.LocalSGD(7), measure=("replicas", "spread"), look_every="10 steps")
    first, last = result.history[0], result.history[-1]
    replicas = torch.stack(result.replicas).double()
    distances = (replicas - replicas.mean(0)).square().sum(1)
    assert last.spread == pytest.approx(float(distances.mean().sqrt()), rel=1e-6)
    task = TASKS["digits-mlp"].loaded()
    accuracies = []
    for replica in result.replicas:
        model = task.model()
        torch.nn.utils.vector_to_parameters(replica, model.parameters())
        accuracies.append(task.evaluate(model)[1])
    assert last.replicas_mean == pytest.approx(sum(accuracies) / 4)
    assert (last.replicas_min, last.replicas_max) == (min(accuracies), max(accuracies))
    assert first.replicas_min <= first.replicas_mean <= first.replicas_max
    together = short(fs.SyncSGD(), measure="spread")
    assert together.history[-1].spread == 0


def test_time_and_staleness_are_measured_on_request():
    compute = fs.Compute(0.01, slow={0: 3.0})
    waiting = short(fs.SyncSGD(), measure="time", compute=compute).history[-1]
    for shares in zip(waiting.computing, waiting.waiting, waiting.sending, strict=True):
        assert sum(shares) == pytest.approx(1)
    assert waiting.waiting[0] == pytest.approx(0, abs=1e-9)
    assert waiting.waiting[1] > 0.5
    stale = short(fs.AsyncSGD(), measure="staleness", compute=fs.Compute(0.01)).history[-1]
    assert 0 < stale.staleness_mean <= stale.staleness_max
    assert short(fs.SyncSGD(), measure="staleness").history[-1].staleness_mean is None


def test_a_simulated_look_counts_the_waiting_of_who_has_ended():
    fields = {"network": "ideal", "compute": fs.Compute(0.01, slow={1: 20.0}), "steps": 20}
    looks = short(fs.Independent(), 2, look_every="0.5 seconds", measure="time", **fields).history
    assert len(looks) == 8
    for look in looks:  # the fast one ends after 0.2 seconds
        assert look.waiting == pytest.approx([1 - 0.2 / look.seconds, 0.0])


@pytest.mark.parametrize("strategy", [fs.EASGD(2), fs.AsyncSGD(), fs.GoSGD(0.5)], ids=str)
@pytest.mark.parametrize("interval", ["0.03 seconds", "2 steps"])
def test_shares_of_time_at_a_look_are_those_until_then(strategy, interval, tmp_path):
    path = tmp_path / "trace.json"
    fields = {"steps": 8, "network": "wan-100m", "look_every": interval, "measure": "time"}
    looks = short(strategy, trace=path, **fields).history
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]

    def share(kind, rank, until):
        own = [each for each in events if (each["tid"], each["cat"]) == (rank, kind)]
        return sum(max(0, min(each["dur"], until - each["ts"])) for each in own) / until

    assert len(looks) >= 4
    for look in looks[:-1]:
        for kind in ("computing", "waiting", "sending"):
            expected = [share(kind, rank, 1e6 * look.seconds) for rank in range(4)]
            assert look[kind] == pytest.approx(expected, abs=1e-6)


def test_looks_are_scored_on_validation_data_and_the_test_data_are_seen_once():
    seen = []

    def metric(model, batch):
        seen.append(len(batch[1]))
        return fs.classification_accuracy(model, batch)

    task = dataclasses.replace(TASKS["digits-mlp"], validation=0.25, metric=metric)
    result = fs.run(task, fs.SyncSGD(), 2, epochs=4)
    assert len(result.history) == 4
    held_out = round(0.25 * 1437)
    assert seen.count(360) == 1  # the test data
    assert seen.count(held_out) == 5  # tried once before workers start, then at every look
    assert result.metrics["samples"] == 4 * (1437 - held_out)
    assert result.history[-1].accuracy != result.metrics["test_accuracy"]


def test_a_held_out_share_is_the_same_in_every_run_and_apart_from_the_rest():
    task = dataclasses.replace(TASKS["digits-mlp"], validation=0.1)
    first, again = task.loaded(), task.loaded()
    assert list(first.validation.indices) == list(again.validation.indices)
    assert not set(first.validation.indices) & set(first.train.indices)
    assert len(first.validation.indices) + len(first.train.indices) == 1437


@pytest.mark.parametrize("share", [0, 1, 1.0, -0.1, 1e-9])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(ValueError, match="'validation' must"):
        dataclasses.replace(TASKS["digits-mlp"], validation=share).loaded()


@dataclass(frozen=True)
class Secretive(fs.Strategy[Any]):
    """Keeps in its state what no copy can be made of, and does not say so."""

    name: ClassVar[str] = "secretive"

    def init(self, worker):
        return object()


def test_a_state_that_cannot_be_copied_is_refused_before_the_first_step():
    with pytest.raises(fs.FlockstepError, match=r"Secretive: 'state' must be data .*fs.handle\(\)"):
        short(Secretive())


@dataclass(frozen=True)
class Averaging(fs.Strategy[None]):
    """As somebody would write it who has never heard of looks."""

    name: ClassVar[str] = "averaging"

    def finish(self, worker, state):
        worker.comm.all_reduce(worker.flat.state, op="mean")


def test_a_strategy_that_says_nothing_of_looks_is_looked_at_all_the_same():
    seen = short(Averaging(), look_every="10 steps").history
    plain = short(fs.LocalSGD(period=None), look_every="10 steps").history
    assert [look.accuracy for look in seen] == [look.accuracy for look in plain]


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(4)], ids=str)
def test_looks_on_real_processes_show_what_the_simulator_shows(backend, strategy):
    fields = {"look_every": "10 steps", "measure": "spread,distance,replicas"}
    real = short(strategy, 2, backend=backend, **fields)
    simulated = short(strategy, 2, **fields)
    assert real.metrics["test_replicas"] == simulated.metrics["test_replicas"]
    assert [look.accuracy for look in real.history] == [look.accuracy for look in simulated.history]
    for name in ("spread", "distance_mean", "distance_per_parameter", "replicas_mean"):
        assert [look[name] for look in real.history] == pytest.approx(
            [look[name] for look in simulated.history], rel=1e-6
        )


@pytest.mark.wall_clock
def test_workers_that_do_not_wait_are_looked_at_on_real_processes(backend):
    result = short(fs.EAWild(2), 2, backend=backend, steps=300, look_every="50 steps")
    steps = [look.step for look in result.history]
    assert steps[-1] == 300
    assert len(steps) == pytest.approx(6, abs=1)
    assert steps == sorted(steps)
    assert all(look.accuracy is not None for look in result.history)


def test_a_single_worker_is_looked_at():
    result = short(fs.NoSync(0.1), 1, look_every="10 steps")
    assert [look.step for look in result.history] == [10, 20, 25]
