"""Tensors that travel through a codec, on every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.network import costs

SHAPE = (12, 7)
ELEMENTS = 84

EACH = {
    "float16": fs.Float16(),
    "int8": fs.Int8(bucket=32),
    "one_bit": fs.OneBit(),
    "qsgd": fs.QSGD(levels=4),
    "threshold": fs.Threshold(tau=0.5),
    "top_k": fs.TopK(ratio=0.25),
    "random_k": fs.RandomK(ratio=0.25),
    "power_sgd": fs.PowerSGD(rank=1),
    "sign_sgd": fs.SignSGD(),
    "sign_sgd with errors": fs.SignSGD(error_feedback=True),
    "tern_grad": fs.TernGrad(),
    "natural": fs.Natural(),
    "quantised_top_k": fs.QuantisedTopK(ratio=0.25),
    "warm-up": fs.TopK(ratio=0.1, momentum_correction=0.5, warmup=2),
}
of_every_codec = pytest.mark.parametrize("codec", EACH.values(), ids=EACH)
# Of a fixed length, of one that depends on the values, and of one that only the sender knows.
FEW = [EACH[name] for name in ("top_k", "threshold", "power_sgd", "int8")]


def tensor_of(rank: int, call: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(SHAPE, generator=draw)


def memory_of(codec: fs.Codec, comm: fs.Comm) -> fs.Memory:
    return codec.memory(torch.zeros(SHAPE), seed=comm.seed, rank=comm.rank)


class Stream:
    """What one worker's messages are, worked out by hand."""

    def __init__(self, codec: fs.Codec, rank: int, seed: int = 0) -> None:
        self.codec = codec
        self.memory = codec.memory(torch.zeros(SHAPE), seed=seed, rank=rank)

    def next(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What the next message stands for, and its bytes."""
        message = self.codec.encode(tensor.reshape(-1), self.memory)
        return self.codec.decode(message, tensor).view(SHAPE), message.nbytes


def in_front(codec: fs.Codec) -> int:
    """The bytes that say how long a message is."""
    return 8 if codec.message_nbytes(torch.zeros(SHAPE)) is None else 0


def test_every_codec_is_tried():
    assert {type(codec) for codec in EACH.values()} == set(CODECS.values())


# --- all codecs, in the simulator -----------------------------------------------------------------


def every_call(codec: fs.Codec, times: int = 3):
    """Some rounds of each call with one memory each; what they gave, bytes, seconds."""

    def program(comm):
        peer, seen = comm.rank ^ 1, {}
        shared = comm.shared("s", torch.zeros(SHAPE))

        def rounds(name, call):
            memory, start, begun = memory_of(codec, comm), comm.meter.bytes_sent, comm.now()
            results = [call(tensor_of(comm.rank, k), memory) for k in range(times)]
            seen[name] = results, comm.meter.bytes_sent - start, comm.now() - begun

        def pass_on(tensor, memory):
            if comm.rank % 2 == 0:
                return comm.send(tensor, peer, codec=codec, memory=memory)
            return comm.recv(tensor, peer, codec=codec)

        rounds("gather", lambda t, m: list(comm.all_gather(t, codec=codec, memory=m)))
        rounds("mean", lambda t, m: comm.all_reduce(t, "mean", codec=codec, memory=m))
        rounds("sum", lambda t, m: comm.all_reduce(t, "sum", codec=codec, memory=m))
        rounds("exchange", lambda t, m: comm.exchange(t, peer, codec=codec, memory=m))
        rounds("send", pass_on)
        rounds("add", lambda t, m: shared.add(t, -0.5, codec=codec, memory=m))
        comm.barrier()
        return seen, shared.read()

    return program


@of_every_codec
def test_what_arrives_is_what_the_messages_stand_for(codec):
    seen = fs.launch(every_call(codec), 2, fs.Simulator())
    streams = {rank: Stream(codec, rank) for rank in (0, 1)}
    expected = [[streams[rank].next(tensor_of(rank, k))[0] for rank in (0, 1)] for k in range(3)]
    total = torch.zeros(SHAPE)
    for k, (zero, one) in enumerate(expected):
        for rank, (results, _) in enumerate(seen):
            other = expected[k][1 - rank]
            assert all(map(torch.equal, results["gather"][0][k], (zero, one)))
            assert torch.equal(results["exchange"][0][k], other)
            assert torch.equal(results["add"][0][k], expected[k][rank])
        assert torch.equal(seen[1][0]["send"][0][k], zero)
        total -= 0.5 * (zero + one)
    torch.testing.assert_close(seen[0][1], total)


@of_every_codec
def test_bytes_are_those_of_the_messages_and_seconds_those_of_the_bytes(codec):
    network = fs.Network(latency_seconds=1e-3, bytes_per_second=1e5)
    (zero, _), (one, _) = fs.launch(every_call(codec), 2, fs.Simulator(network=network))
    streams = [Stream(codec, rank) for rank in (0, 1)]
    lengths = [[streams[r].next(tensor_of(r, k))[1] for k in range(3)] for r in (0, 1)]
    front = in_front(codec)
    for seen, own in zip((zero, one), lengths, strict=True):
        assert seen["gather"][1] == sum(own)
        assert seen["exchange"][1] == sum(own) + 3 * front
        assert seen["add"][1] == sum(own)
    assert zero["send"][1] == sum(lengths[0]) + 3 * front
    assert one["send"][1] == 0

    def seconds(nbytes):
        return costs.message_seconds(network.between((0, 1)), nbytes)

    together = [max(pair) + front for pair in zip(*lengths, strict=True)]
    assert zero["exchange"][2] == pytest.approx(sum(map(seconds, together)))
    assert zero["send"][2] == pytest.approx(sum(seconds(n + front) for n in lengths[0]))


@of_every_codec
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_means_are_those_of_the_codec_and_sums_as_many_times_more(codec, op):
    def program(comm):
        memory, by_hand = memory_of(codec, comm), memory_of(codec, comm)
        for k in range(3):
            strided = torch.empty(SHAPE[::-1]).t().copy_(tensor_of(comm.rank, k))
            given = comm.all_reduce(strided, op, codec=codec, memory=memory)
            assert given is strided
            flat = tensor_of(comm.rank, k).reshape(-1)
            codec.average(comm, flat, by_hand)
            yield given, flat.view(SHAPE) * (comm.size if op == "sum" else 1)

    results = fs.launch(lambda comm: list(program(comm)), 3, fs.Simulator())
    for of_round in zip(*results, strict=True):
        for given, expected in of_round:
            assert torch.equal(given, expected)
            assert torch.equal(given, of_round[0][0])  # the same bits on all


# --- on every backend -----------------------------------------------------------------------------


def test_codecs_do_the_same_on_every_backend(launch):
    """To the bit what the simulator does, for the same bytes; but where shared tensors live in
    parts, each part has its own message."""

    def program(comm):
        seen = []
        for codec in FEW:
            results, _ = every_call(codec, times=2)(comm)
            results.pop("add")
            seen.append({name: (parts, sent) for name, (parts, sent, _) in results.items()})
        return seen

    for here, there in zip(launch(program, 2), fs.launch(program, 2, fs.Simulator()), strict=True):
        for codec, own, simulated in zip(FEW, here, there, strict=True):
            for name, (results, nbytes) in own.items():
                assert nbytes == simulated[name][1], (codec, name)
                _assert_equal(results, simulated[name][0])


def _assert_equal(one, other) -> None:
    if isinstance(one, list):
        for pair in zip(one, other, strict=True):
            _assert_equal(*pair)
    else:
        assert (one is None and other is None) or torch.equal(one, other)


def test_a_shared_tensor_gains_what_was_sent_and_the_memory_keeps_the_rest(launch):
    def program(comm):
        shared = comm.shared("s", torch.zeros(SHAPE))
        outcome = []
        for codec in FEW:
            memory, before = memory_of(codec, comm), comm.meter.bytes_sent
            shared.write(torch.zeros(SHAPE))
            comm.barrier()
            before = comm.meter.bytes_sent
            with shared.lock():
                sent = sum(
                    shared.add(tensor_of(comm.rank, k), 2, codec=codec, memory=memory)
                    for k in range(3)
                )
            nbytes = comm.meter.bytes_sent - before
            comm.barrier()
            rest = 0 if memory.error is None else memory.error.view(SHAPE)
            outcome.append((shared.read(), sent, sent + rest, nbytes))
            comm.barrier()
        return outcome

    results = launch(program, 3)
    given = [sum(tensor_of(rank, k) for k in range(3)) for rank in range(3)]
    for index, codec in enumerate(FEW):
        of_codec = [result[index] for result in results]
        for value, *_ in of_codec:
            torch.testing.assert_close(value, 2 * sum(sent for _, sent, *_ in of_codec))
        for (_, _, whole, nbytes), own in zip(of_codec, given, strict=True):
            tolerance = {"atol": 0.1, "rtol": 0} if codec.name == "int8" else {}
            torch.testing.assert_close(whole, own, **tolerance)
            assert 0 < nbytes < 3 * 2 * 4 * ELEMENTS


def test_two_streams_have_two_memories(launch):
    """What one of them leaves out comes with its own next message, never with the other's."""
    codec = fs.TopK(ratio=0.25)

    def program(comm):
        ups, downs = (codec.memory(torch.zeros(4)) for _ in range(2))
        up, down = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([-1.0, -2.0, -3.0, -4.0])
        peer = 1 - comm.rank
        return [
            (
                comm.exchange(up if k == 0 else 0 * up, peer, codec=codec, memory=ups).tolist(),
                comm.exchange(down if k == 0 else 0 * up, peer, codec=codec, memory=downs).tolist(),
            )
            for k in range(4)
        ]

    heard = launch(program, 2)
    assert [up.index(max(up)) for up, _ in heard[0]] == [0, 1, 2, 3]
    assert [down.index(min(down)) for _, down in heard[0]] == [3, 2, 1, 0]
    assert heard[0] == heard[1]


def test_half_precision_any_strides_and_nothing_at_all(launch):
    def program(comm):
        peer, codec = comm.rank ^ 1, fs.TopK(ratio=0.5)
        half = torch.tensor([[1.0, -8.0], [2.0, 0.5]], dtype=torch.float16).t()
        heard = comm.exchange(half + comm.rank, peer, codec=codec)
        table = torch.zeros(2, 4, dtype=torch.float16)
        if comm.rank == 0:
            comm.send(half, peer, codec=codec)
        else:
            comm.recv(table[:, 1:3], peer, codec=codec)
        shared = comm.shared("half", torch.zeros(2, 2, dtype=torch.float16))
        if comm.rank == 0:
            shared.add(half, 2, codec=codec)
        comm.barrier()
        nothing = torch.empty(0)
        comm.exchange(nothing, peer, codec=codec)
        comm.all_reduce(nothing, codec=codec)
        comm.shared("nothing", nothing).add(nothing, codec=codec)
        for silent in (fs.Threshold(100.0), codec):
            comm.exchange(torch.zeros(3), peer, codec=silent)
            comm.shared("quiet", torch.zeros(3)).add(torch.zeros(3), codec=silent)
        return heard, table, shared.read()

    (_, _, value), (heard, table, _) = launch(program, 2)
    assert heard.dtype is torch.float16
    assert heard.tolist() == [[0, 2], [-8, 0]]
    assert table.tolist() == [[0, 0, 2, 0], [0, -8, 0, 0]]
    assert value.sum() == -12


@dataclass(frozen=True)
class Doubled(fs.Codec):
    """A codec of the user's own, with a field that is no number."""

    name: ClassVar[str] = "doubled"
    factors: tuple[int, ...] = (2,)

    def _encode(self, tensor, memory):
        return tensor.to(torch.float16).view(torch.uint8)

    def add_decoded(self, message, total, scale, memory=None):
        total.add_(message.view(torch.float16).to(total.dtype), alpha=scale * self.factors[0])


def test_a_codec_of_ones_own(launch):
    def program(comm):
        codec = Doubled((3,))
        heard = comm.exchange(torch.ones(5), 1 - comm.rank, codec=codec)
        comm.all_reduce(heard, "mean", codec=codec)
        shared = comm.shared("own", torch.zeros(5))
        if comm.rank == 1:
            shared.add(torch.ones(5), 2, codec=codec)
        comm.barrier()
        return heard, shared.read()

    for heard, value in launch(program, 2):
        assert heard.tolist() == [9.0] * 5
        assert value.tolist() == [6.0] * 5


@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_other_codecs_or_sizes_are_a_mismatch(launch, call):
    def program(comm):
        codec = fs.TopK(ratio=0.5 if comm.rank == 0 else 0.25)
        getattr(comm, call)(torch.ones(16), codec=codec)

    with pytest.raises(fs.MismatchError):
        launch(program, 2)


@pytest.mark.parametrize("codec", [fs.TopK(0.5), fs.Threshold(0.5)], ids=str)
def test_a_receiver_without_the_codec_is_a_mismatch(launch, codec):
    def program(comm):
        if comm.rank == 0:
            comm.send(torch.ones(16), 1, codec=codec)
        else:
            comm.recv(torch.ones(16), 0)

    with pytest.raises(fs.MismatchError, match=r"sent \d+ × torch.uint8, rank 1 expected 16 × "):
        launch(program, 2)


# --- bad input ------------------------------------------------------------------------------------

CALLS = {
    "send": lambda comm, tensor, **how: comm.send(tensor, 1 - comm.rank, **how),
    "exchange": lambda comm, tensor, **how: comm.exchange(tensor, 1 - comm.rank, **how),
    "all_reduce": lambda comm, tensor, **how: comm.all_reduce(tensor, **how),
    "all_gather": lambda comm, tensor, **how: comm.all_gather(tensor, **how),
    "add": lambda comm, tensor, **how: comm.shared("s", tensor).add(tensor, **how),
}
top_k = fs.TopK(0.5)
WRONG = {
    "no codec": (torch.ones(4), {"codec": 3}, "'codec' must be a codec such as "),
    "a name": (torch.ones(4), {"codec": "top_k"}, "'codec' must be a codec such as "),
    "integers": (
        torch.ones(4, dtype=torch.int64),
        {"codec": top_k},
        "'tensor' must be of a floating-point dtype for a codec (got torch.int64)",
    ),
    "another size": (
        torch.ones(4),
        {"codec": top_k, "memory": top_k.memory(torch.ones(5))},
        "'memory' must be of 4 elements, as the tensor is (got 5)",
    ),
    "another codec's": (
        torch.ones(4),
        {"codec": top_k, "memory": fs.Float16().memory(torch.ones(4))},
        "'memory' must be a memory that the codec's own `memory(tensor)` has made",
    ),
    "no memory": (torch.ones(4), {"codec": top_k, "memory": 1}, "'memory' must be a memory "),
    "memory alone": (
        torch.ones(4),
        {"memory": top_k.memory(torch.ones(4))},
        "'memory' must be None without a codec",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_is_one_clear_line(call, wrong):
    tensor, how, message = WRONG[wrong]

    def program(comm):
        CALLS[call](comm, tensor, **how)

    with pytest.raises(fs.InvalidField) as raised:
        fs.launch(program, 2, fs.Simulator())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("op", ["max", "min"])
def test_codecs_know_no_largest_and_no_smallest(op):
    def program(comm):
        comm.all_reduce(torch.ones(4), op, codec=top_k)

    with pytest.raises(fs.InvalidField, match="'op' must be 'sum' or 'mean' with a codec"):
        fs.launch(program, 2, fs.Simulator())


def test_without_a_memory_places_are_drawn_anew_each_time():
    def program(comm):
        codec = fs.RandomK(ratio=0.25)
        return [comm.all_reduce(torch.ones(100), "mean", codec=codec) for _ in range(4)]

    zero, one = fs.launch(program, 2, fs.Simulator())
    assert all(map(torch.equal, zero, one))
    assert {float(each.sum()) for each in zero} == {25.0}
    assert not torch.equal(zero[0], zero[1])
