"""Data that do not fit a model are found before any worker starts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import flockstep as fs

X, Y = torch.randn(40, 4), torch.arange(40) % 3


def task(**changes):
    whole = fs.Task(
        "fitted",
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=fs.classification_loss,
        train=(X, Y),
        test=(X, Y),
        metric=fs.classification_accuracy,
        batch_size=5,
        epochs=1,
    )
    return dataclasses.replace(whole, **changes)


class Squares(torch.utils.data.Dataset):
    def __init__(self, first_label):
        self.first_label = first_label

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return X[index], self.first_label


def labelled(value, place=7):
    labels = Y.clone()
    labels[place] = value
    return labels


@pytest.mark.parametrize(
    "loss", [fs.classification_loss, fs.SmoothedLoss(0.1)], ids=["plain", "smoothed"]
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": (X, labelled(3))},
            r"'train' must have labels between 0 and 2 \(got 3 at place 7\)",
        ),
        (
            {"train": [X, labelled(-1)]},
            r"'train' must have labels between 0 and 2 \(got -1 at place 7\)",
        ),
        (
            {"test": fs.InMemory(X, labelled(9))},
            r"'test' must have labels between 0 and 2 \(got 9 at place 7\)",
        ),
        (
            {"test": torch.utils.data.TensorDataset(X, labelled(3, 0))},
            r"'test' must have labels between 0 and 2 \(got 3 at place 0\)",
        ),
        ({"train": Squares(5)}, r"'train' must have labels between 0 and 2 \(got 5 at place 0\)"),
        (
            {"train": (torch.randn(40, 7), Y)},
            r"'train' must have inputs that the model takes \(got \(1, 7\), torch.float32: "
            r".*cannot be multiplied",
        ),
        (
            {"train": (X.long(), Y)},
            r"'train' must have inputs that the model takes \(got \(1, 4\), torch.int64: ",
        ),
        ({"train": X}, r"'train' must give batches of \(inputs, labels\) \(got 'a Tensor'\)"),
        (
            {"train": (X, Y, Y)},
            r"'train' must give batches of \(inputs, labels\) \(got 'a tuple'\)",
        ),
        ({"test": (X[:0], Y[:0])}, r"'test' must have at least one sample \(got 0\)"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(loss, changes, message):
    with pytest.raises(fs.InvalidField, match=message) as raised:
        fs.run(task(loss=loss, **changes), fs.SyncSGD(), workers=2)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "train",
    [
        (X, labelled(-100)),  # left out by torch's cross-entropy
        (X, nn.functional.one_hot(Y, 3).float()),  # probabilities
    ],
    ids=["ignored", "probabilities"],
)
def test_what_torch_takes_is_taken(train):
    assert fs.run(task(train=train), fs.SyncSGD(), workers=2).metrics["steps"] == 4


def test_losses_of_ones_own_are_not_second_guessed():
    def loss(model, batch):
        (inputs,) = batch
        return model(inputs).square().mean()

    own = task(loss=loss, train=(X,), test=(X,), metric=loss)
    assert fs.run(own, fs.SyncSGD(), workers=2).metrics["test_loss"] > 0


def test_tokens_out_of_the_vocabulary_are_found():
    def model():
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    tokens = torch.arange(60).view(10, 6) % 5
    data = (tokens, (tokens + 1) % 5)
    text = task(model=model, loss=fs.token_loss, train=data, test=data)
    assert fs.run(text, fs.SyncSGD(), workers=2, epochs=2).metrics["samples"] == 20
    wrong = dataclasses.replace(text, train=(tokens, tokens + 1))
    with pytest.raises(
        fs.InvalidField, match=r"'train' must have labels between 0 and 4 \(got 5 at place 4\)"
    ):
        fs.run(wrong, fs.SyncSGD(), workers=2)


def test_the_loss_of_tokens_is_that_of_every_next_one():
    scores, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    by_hand = -torch.stack(
        [scores[i, j].log_softmax(0)[labels[i, j]] for i in range(2) for j in range(3)]
    ).mean()
    assert torch.allclose(fs.token_loss(lambda inputs: scores, (None, labels)), by_hand)
