"""Models that read tokens: their data, their loss, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asa.errors import UsageError
from asa.executor.model.loss import hits_of, loss_of
from asa.zoo.data import fetch, open_split
from asa.zoo.input_checks import num_classes_of
from asa.zoo.models import build
from asa.zoo.names import check

torch.set_num_threads(1)


def test_loss_of_tokens_is_the_mean_over_all_of_them():
    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    rows = [F.cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)]
    torch.testing.assert_close(loss_of(logits, labels), torch.stack(rows).mean())
    right = torch.zeros(3, 5, 7).scatter_(2, labels[..., None], 1.0)
    assert hits_of(right, labels).tolist() == [1.0, 1.0, 1.0]


def test_classes_before_positions_keep_their_meaning():
    logits, labels = torch.randn(3, 7, 5), torch.randint(7, (3, 5))
    torch.testing.assert_close(loss_of(logits, labels), F.cross_entropy(logits, labels))


def test_one_prediction_for_a_sequence_is_of_what_follows_it():
    logits, labels = torch.randn(3, 7), torch.randint(7, (3, 5))
    torch.testing.assert_close(loss_of(logits, labels), F.cross_entropy(logits, labels[:, -1]))


def test_the_language_follows_itself_and_is_the_same_every_time():
    train = open_split("synthetic", split="train", root=None, input_shape=(16,))
    again = open_split("synthetic", split="train", root=None, input_shape=(16,))
    test = open_split("synthetic", split="test", root=None, input_shape=(16,))
    assert torch.equal(train.images, again.images)
    assert torch.equal(train.images[:, 1:], train.labels[:, :-1])
    assert not torch.equal(train.images[: len(test)], test.images)
    x, y = fetch(train, torch.tensor([5, 3]), train=True, seed=0, epoch=1, device="cpu")
    assert torch.equal(x, train.images[[5, 3]])
    assert torch.equal(y, train.labels[[5, 3]])


def test_two_tokens_tell_what_one_does_not():
    data = open_split("synthetic", split="train", root=None, input_shape=(64,))

    def right(*seen):
        keys = sum(t * 64**i for i, t in enumerate(seen))
        table = torch.zeros(64 ** len(seen), 64).index_put_(
            (keys.flatten(), data.labels[:, 3:].flatten()), torch.tensor(1.0), accumulate=True
        )
        return float((table.argmax(1)[keys] == data.labels[:, 3:]).float().mean())

    last, before = data.images[:, 3:], data.images[:, :-3]
    assert right(last) < 0.5
    assert right(last, before) > 0.85


@pytest.mark.parametrize(
    ("spec", "shape", "word"),
    [("gpt2:tiny", (3, 32, 32), "--tokens"), ("resnet18", (64,), "reads images"), ("logistic", (64,), "reads images")],
)
def test_tokens_and_images_are_not_mixed(spec, shape, word):
    with pytest.raises(UsageError, match=word):
        build(spec, num_classes=10, input_shape=shape)


@pytest.mark.parametrize("spec", ["gpt2:huge", "llama", "llama:7b"])
def test_sizes_that_there_are_not_name_those_that_there_are(spec):
    with pytest.raises(UsageError, match=r"gpt2:xl|llama:70b"):
        check(spec)


def test_images_are_refused_for_a_model_of_tokens():
    with pytest.raises(UsageError, match="reads tokens"):
        open_split("digits", split="train", root=None, input_shape=(16,))


def test_classes_of_tokens_are_not_the_length_of_the_sequence():
    assert num_classes_of(build("gpt2:tiny", num_classes=50, input_shape=(16,)), "gpt2:tiny", (16,)) == 50
