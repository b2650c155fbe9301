"""What workers tell the launcher: the same on every backend."""

from __future__ import annotations

import os
import threading

import pytest

import flockstep as fs


def refuses(launch):
    """Whether it is the backend that has only the core."""
    with pytest.raises(fs.FlockstepError, match="CoreComm has no way to tell the launcher"):
        launch(lambda comm: comm.tell("anything"), 2)
    return True


def test_the_launcher_hears_all_in_the_order_of_each_worker(launch, request):
    if "core-only" in request.node.name:
        assert refuses(launch)
        return
    heard, places = [], set()

    def hear(text):
        heard.append(text)
        places.add((os.getpid(), threading.current_thread() is threading.main_thread()))

    def program(comm):
        for number in range(40):
            comm.tell(f"{comm.rank}: {number} ü\n" + "x" * 100 * (number % 3))
            if number == 20:
                comm.barrier()
        return comm.meter.bytes_sent, comm.split(0).tell(f"{comm.rank}: end")

    told = launch(program, 3, hear=hear)
    assert told == [(0, None)] * 3
    for rank in range(3):
        own = [text for text in heard if text.startswith(f"{rank}: ")]
        numbered = [f"{rank}: {number} ü\n" + "x" * 100 * (number % 3) for number in range(40)]
        assert own == [*numbered, f"{rank}: end"]
    assert len(heard) == 3 * 41
    assert places == {(os.getpid(), True)}


def test_what_is_told_to_nobody_is_lost(launch, request):
    if "core-only" not in request.node.name:
        assert launch(lambda comm: comm.tell("anything"), 2) == [None, None]


def test_what_a_listener_raises_ends_the_run(launch, request):
    if "core-only" in request.node.name:
        return

    class Enough(Exception):
        pass

    def hear(text):
        raise Enough(text)

    def program(comm):
        if comm.rank == 1:
            comm.tell("that will do")
        while True:
            comm.barrier()

    with pytest.raises(Enough, match="that will do"):
        launch(program, 2, hear=hear)


def test_only_texts_can_be_told():
    with pytest.raises(fs.InvalidField, match=r"'text' must be a text \(got 3\)"):
        fs.launch(lambda comm: comm.tell(3), 1)
