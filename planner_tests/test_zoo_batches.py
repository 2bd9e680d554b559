"""What a rank fetches: a sample looks the same in whatever company, on whatever rank, in whatever order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asa.ir.layout import bounds
from asa.zoo.data import ImageSet, fetch
from asa.zoo.data import images as images_module
from asa.zoo.data.batches import augment
from asa.zoo.data.images import reshaped


def make(count: int = 40, shape: tuple[int, int, int] = (3, 32, 32), *, flips: bool = True) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    return ImageSet(
        images=torch.randint(1, 256, (count, *shape), dtype=torch.uint8, generator=generator),
        labels=torch.arange(count) % 7,
        num_classes=7,
        mean=(0.4, 0.5, 0.6)[: shape[0]],
        std=(0.2, 0.25, 0.3)[: shape[0]],
        name="made",
        source="Made.",
        shape=shape,
        flips=flips,
    )


SET = make()


def get(indices: torch.Tensor, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, object] = {"train": True, "seed": 3, "epoch": 2, "device": "cpu", "dtype": torch.float32}
    return fetch(SET, indices, **(options | changes))  # type: ignore[arg-type]


def test_without_training_it_only_normalises() -> None:
    x, y = get(torch.tensor([5, 5, 0]), train=False)
    mean, std = torch.tensor(SET.mean)[:, None, None], torch.tensor(SET.std)[:, None, None]
    torch.testing.assert_close(x, (SET.images[[5, 5, 0]].float() / 255 - mean) / std)
    assert y.tolist() == [5, 5, 0]
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64


@settings(max_examples=40)
@given(indices=st.lists(st.integers(0, 39), min_size=1, max_size=20), ranks=st.integers(1, 6))
def test_a_sample_does_not_depend_on_the_split_over_ranks(indices: list[int], ranks: int) -> None:
    batch = torch.tensor(indices)
    whole_x, whole_y = get(batch)
    parts = [get(batch[slice(*bounds(len(batch), ranks, r))]) for r in range(ranks)]
    assert torch.equal(torch.cat([p[0] for p in parts]), whole_x)
    assert torch.equal(torch.cat([p[1] for p in parts]), whole_y)


def test_the_resized_path_does_not_depend_on_the_split_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "EAGER_BYTES", 0)
    batch = torch.arange(11)
    for shape in ((3, 48, 40), (1, 20, 24), (3, 64, 64)):
        late = reshaped(SET, shape)
        assert late.images is SET.images
        options = {"train": True, "seed": 0, "epoch": 0, "device": "cpu"}
        whole = fetch(late, batch, **options)[0]  # type: ignore[arg-type]
        assert whole.shape == (11, *shape)
        singles = [fetch(late, batch[i : i + 1], **options)[0] for i in range(11)]  # type: ignore[arg-type]
        assert torch.equal(torch.cat(singles), whole)
        assert fetch(late, batch[:0], **options)[0].shape == (0, *shape)  # type: ignore[arg-type]


def test_converting_early_and_late_agree_to_a_grey_level(monkeypatch: pytest.MonkeyPatch) -> None:
    early = reshaped(SET, (3, 48, 48))
    assert early.images.shape == (40, 3, 48, 48)
    monkeypatch.setattr(images_module, "EAGER_BYTES", 0)
    late = reshaped(SET, (3, 48, 48))
    assert early.source == late.source
    options = {"train": False, "seed": 0, "epoch": 0, "device": "cpu"}
    a, b = (fetch(s, torch.arange(40), **options)[0] for s in (early, late))  # type: ignore[arg-type]
    assert (a - b).abs().max() <= 0.51 / 255 / min(SET.std)


def test_augmentation_shifts_and_mirrors_each_image_on_its_own() -> None:
    pixels = SET.images
    moved = augment(pixels, torch.arange(40), seed=0, epoch=0, flips=True)
    seen = set()
    for i in range(40):
        matches = []
        padded = torch.nn.functional.pad(pixels[i], (4, 4, 4, 4))
        for down in range(9):
            for right in range(9):
                crop = padded[:, down : down + 32, right : right + 32]
                for flip in (False, True):
                    if torch.equal(moved[i], crop.flip(2) if flip else crop):
                        matches.append((down, right, flip))
        assert len(matches) == 1  # exactly one (shift, mirror) of the usual crop with padding 4 explains it
        seen.add(matches[0])
    assert len(seen) > 30
    assert {f for _, _, f in seen} == {False, True}


def test_sets_without_mirror_symmetry_are_not_mirrored() -> None:
    pixels = make(60, (1, 8, 8)).images
    moved = augment(pixels, torch.arange(60), seed=0, epoch=0, flips=False)
    for i in range(60):
        padded = torch.nn.functional.pad(pixels[i], (1, 1, 1, 1))
        crops = [padded[:, d : d + 8, r : r + 8] for d in range(3) for r in range(3)]
        assert sum(torch.equal(moved[i], c) for c in crops) == 1


def test_augmentation_changes_with_seed_and_epoch_and_repeats() -> None:
    batch = torch.arange(10)
    assert torch.equal(get(batch)[0], get(batch)[0])
    assert not torch.equal(get(batch)[0], get(batch, seed=4)[0])
    assert not torch.equal(get(batch)[0], get(batch, epoch=3)[0])
    before = torch.get_rng_state()
    get(batch)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_precision_is_the_exact_value_rounded_once(dtype: torch.dtype) -> None:
    batch = torch.arange(10)
    x, _ = get(batch, dtype=dtype)
    assert x.dtype == dtype
    exact = get(batch, dtype=torch.float64)[0]
    torch.testing.assert_close(x.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_rank_without_rows_gets_none() -> None:
    x, y = get(torch.empty(0, dtype=torch.int64))
    assert x.shape == (0, 3, 32, 32)
    assert y.shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("resident", [False, True])
def test_on_a_gpu_every_sample_is_the_same_image(resident: bool) -> None:
    batch = torch.arange(40)
    images = SET.to("cuda") if resident else SET
    x, y = fetch(images, batch, train=True, seed=3, epoch=2, device="cuda")
    assert x.device.type == y.device.type == "cuda"
    expected, labels = get(batch)
    torch.testing.assert_close(x.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(y.cpu(), labels)
    moved = augment(SET.images.cuda(), batch.cuda(), seed=3, epoch=2, flips=True)
    assert torch.equal(moved.cpu(), augment(SET.images, batch, seed=3, epoch=2, flips=True))
