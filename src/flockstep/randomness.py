"""Where every random number comes from.

A stream is named by what it is for, the run's seed, and numbers such as the worker's rank. Two
names never stand for the same stream, and no other module makes a generator or seeds one. What
must be alike on all workers simply has no rank in its name.

    numpy_stream(Purpose.SAMPLE_ORDER, seed, rank, epoch).permutation(samples)
    torch_stream(Purpose.SWARM, seed, rank)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum, unique
from typing import Any

import numpy as np
import torch

from flockstep.errors import InvalidField
from flockstep.fields import require, require_integer

SEEDS = 2**63  # below that they are numbers for torch and fit into a word everywhere

WORD = 2**32
MERSENNE_WORDS = 624
MERSENNE_START = 24  # bytes before these words in the state of torch's generator


@unique
class Purpose(IntEnum):
    """What is drawn, and behind the seed the numbers that name its stream.

    The number of a purpose is part of the name of its streams: a new purpose takes a new one.
    """

    WORKER = 1  # rank: torch's global generator, for models, dropout and the user's own draws
    STEP_SECONDS = 2  # rank: the simulator's jitter
    ASSIGNMENT = 3  # epoch: which samples go to whom; 0 unless they are dealt anew every epoch
    SAMPLE_ORDER = 4  # rank, epoch: in which order a worker goes through its samples
    AUGMENTATION = 5  # rank, epoch, place of the batch in it
    ROUNDING = 6  # rank: what codecs round at random
    PLACES = 7  # message: RandomK
    FACTORS = 8  # PowerSGD's first ones
    GOSSIP = 9  # rank: when GoSGD sends, and to whom
    NEIGHBOUR = 10  # rank: with whom ADPSGD averages
    SWARM = 11  # rank: r1 and r2 of PSOPS
    DELEGATE = 12  # group: who pulls for its group in EAWild
    VALIDATION = 13  # which samples a task holds out; seed 0, the same in every run
    OTHERS = 14  # name, then numbers: what strategies of other packages draw
    LOADING = 15  # rank, epoch: the processes of a worker's DataLoader
    TUNING = 16  # which learning rates a study tries
    PROJECTION = 17  # of parameters to a few numbers; seed 0, the same in every run
    BOOTSTRAP = 18  # which runs of a study a resample has
    ANY_REPLICA = 19  # which replica stands for a run, where any of them may
    GROUPING = 20  # time: who is in which group of EAWild, drawn anew at each exchange
    PARAMETER_NOISE = 21  # draw: what `flatness` adds to parameters
    PAIRS = 22  # workers: of which the distance is measured; seed 0, the same in every run
    RECALIBRATION = 23  # training data that are gone through once more; seed 0, always the same
    FAULTS = 24  # rank, then 0 or 1: when a simulated worker dies, and when it pauses
    WITHOUT_MEMORY = 25  # call: seeds of a codec for which the caller keeps no memory
    LOSS = 26  # rank, exchanges, ticks, place in the call, attempt: whether a message is lost


def require_seed(seed: int) -> None:
    """A whole number of at least 0 and below 2⁶³."""
    require_integer("seed", seed, 0)
    require(seed < SEEDS, "seed", "be below 2**63", seed)


def stream_seed(purpose: Purpose, seed: int, *numbers: int) -> int:
    """64 bits for whoever can take no more than a seed."""
    return _first_word(_sequence(purpose, seed, numbers))


def numpy_stream(purpose: Purpose, seed: int, *numbers: int) -> np.random.Generator:
    return np.random.default_rng(_sequence(purpose, seed, numbers))


def torch_stream(purpose: Purpose, seed: int, *numbers: int) -> torch.Generator:
    """A generator of the CPU.

    Torch uses 32 bits of a seed: two seeds that are 2³² apart draw alike, and among 77,000 streams
    two probably would. So all words of its state are set.
    """
    sequence = _sequence(purpose, seed, numbers)
    generator = torch.Generator().manual_seed(_first_word(sequence))
    state = generator.get_state()
    words = torch.from_numpy(sequence.generate_state(MERSENNE_WORDS).astype(np.int64))
    state[MERSENNE_START:][: words.nbytes] = words.view(torch.uint8)
    return generator.set_state(state)


def uniform(purpose: Purpose, seed: int, *numbers: int) -> float:
    """One number from 0 to 1, without a generator: for draws of which each has a name of its own,
    as many streams would take too long to make.
    """
    words = ",".join(map(str, (int(purpose), seed, *numbers)))
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def random_stream(name: str, seed: int, *numbers: int) -> torch.Generator:
    """A stream for a strategy of your own, named like it: no other part of a run draws from it.

    Without further numbers it is the same on all workers; with the rank behind the seed each has
    its own: `fs.random_stream("follow", comm.seed, comm.rank)`.
    """
    require(isinstance(name, str) and name != "", "name", "be a text", name)
    require_seed(seed)
    digest = hashlib.sha256(name.encode()).digest()
    return torch_stream(Purpose.OTHERS, seed, int.from_bytes(digest[:8]), *numbers)


def seed_torch(seed: int, rank: int) -> None:
    """Give torch's global generators the stream of a worker that is alone in its process."""
    torch.manual_seed(stream_seed(Purpose.WORKER, seed, rank))  # those of all devices
    torch.set_rng_state(torch_stream(Purpose.WORKER, seed, rank).get_state())


@contextmanager
def drawing_from(purpose: Purpose, seed: int, *numbers: int) -> Iterator[None]:
    """Torch's global generator is that stream inside, and goes on as before behind."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch_stream(purpose, seed, *numbers).get_state())
        yield


def saved_generators() -> dict[str, Any]:
    """The states of the generators that a whole process shares: torch's, Python's and numpy's."""
    _, words, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "devices": [torch.cuda.get_rng_state(each) for each in range(torch.cuda.device_count())],
        "python": [version, list(numbers), gauss],
        "numpy": [torch.from_numpy(np.asarray(words, np.int64)), *map(float, rest)],
    }


def load_generators(saved: Mapping[str, Any]) -> None:
    """Put back what `saved_generators` gave, on the devices that are here."""
    torch.set_rng_state(saved["torch"])
    for device, state in zip(range(torch.cuda.device_count()), saved["devices"], strict=False):
        torch.cuda.set_rng_state(state, device)
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    words, place, has_gauss, cached = saved["numpy"]
    np.random.set_state(
        ("MT19937", words.numpy().astype(np.uint32), int(place), int(has_gauss), cached)
    )


def borrowed_stream() -> np.random.Generator:
    """For a draw that belongs to no run: what torch's global generator draws next decides it."""
    return np.random.default_rng(torch.randint(WORD, (4,)).tolist())


def _sequence(purpose: Purpose, seed: int, numbers: tuple[int, ...]) -> np.random.SeedSequence:
    """Words that no other name has. Each number takes two of them, and how many there are comes
    first, because numpy fills up with zeros: to it (1, 0) is (1), and 2³² is (0, 1).
    """
    words = [int(purpose), len(numbers)]
    for number in (seed, *numbers):
        high, low = divmod(number, WORD)
        if not 0 <= high < WORD:
            raise InvalidField(f"'number' must be at least 0 and below 2**64 (got {number!r})")
        words += [low, high]
    return np.random.SeedSequence(words)


def _first_word(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])
