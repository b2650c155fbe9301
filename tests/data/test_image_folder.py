"""Pictures in folders, made up by the tests: in every mode, with every fault, and trained with."""

from __future__ import annotations

import dataclasses
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

import flockstep as fs
from flockstep.data.batches import plan_batches
from flockstep.data.datasets import DATASETS
from flockstep.data.image_folder import OwnPictures
from flockstep.data.normalisation import IMAGENET_PIXELS
from flockstep.data.sources import in_order, source_of
from flockstep.errors import DataError, FlockstepError

COLOURS = {"blue": (20, 40, 220), "green": (30, 200, 60), "red": (230, 25, 35)}


def as_bytes(image, label):
    """A batch as it was decoded."""
    return image, label


def noise(width, height, seed=0):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    )


@pytest.fixture
def pictures(tmp_path):
    """Three classes, six pictures of each to train with and two to test, of one colour with some
    noise, of many sizes.
    """
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name, colour in COLOURS.items():
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for number in range(count):
                shape = (*random.integers(20, 60, 2), 3)
                pixels = np.array(colour) + random.integers(-20, 21, shape)
                picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                picture.save(place / f"{number}.{'png' if number % 2 else 'JPEG'}")
    return tmp_path


def test_classes_are_folders_in_order_and_pictures_are_numbered_by_class(pictures):
    (pictures / "train/red/further/down").mkdir(parents=True)
    noise(30, 30).save(pictures / "train/red/further/down/late.PNG")
    (pictures / "train/red/notes.txt").write_text("no picture")
    (pictures / "train/red/.hidden.png").write_text("no picture")
    (pictures / "train/.cache").mkdir()
    data = fs.ImageFolder(pictures / "train", size=8, resize=10)
    assert data.classes == ("blue", "green", "red")
    assert data.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 7
    assert data.names[:2] == ["blue/0.JPEG", "blue/1.png"]
    assert data.names[-1] == "red/further/down/late.PNG"
    assert len(data) == 19


def test_a_batch_has_pictures_of_one_size_normalised_and_their_labels(pictures):
    data = fs.ImageFolder(pictures / "train", size=16, resize=18)
    images, labels = data.batch(torch.tensor([0, 7, 17]))
    assert (images.shape, images.dtype) == ((3, 3, 16, 16), torch.float32)
    assert labels.tolist() == [0, 1, 2]
    pixels = images * torch.tensor(IMAGENET_PIXELS.std).view(3, 1, 1)
    pixels = 255 * (pixels + torch.tensor(IMAGENET_PIXELS.mean).view(3, 1, 1))
    for picture, colour in zip(pixels, COLOURS.values(), strict=True):
        assert picture.mean(dim=(1, 2)).tolist() == pytest.approx(list(colour), abs=10)
    one, label = data[7]
    assert torch.equal(one, images[1])
    assert label == 1


def test_nothing_is_decoded_before_it_is_needed(pictures):
    (pictures / "train/green/3.png").write_bytes(b"no picture")
    data = fs.ImageFolder(pictures / "train", size=8, resize=8)
    data.batch(torch.tensor([0, 17]))
    with pytest.raises(DataError) as raised:
        data.batch(torch.tensor([0, 9]))
    assert str(pictures / "train/green/3.png") in str(raised.value)
    assert "must be a picture that can be decoded (got: " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("ending", ["jpg", "png", "tiff", "webp"])
def test_a_picture_that_breaks_off_is_an_error_that_names_it(tmp_path, ending):
    (tmp_path / "one").mkdir()
    path = tmp_path / "one" / f"broken.{ending}"
    noise(60, 50).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="broken") as raised:
        fs.ImageFolder(tmp_path, size=8, resize=8)[0]
    assert str(path) in str(raised.value)


def test_a_file_that_is_gone_is_an_error_that_names_it(pictures):
    data = fs.ImageFolder(pictures / "train", size=8, resize=8)
    (pictures / "train/blue/0.JPEG").unlink()
    with pytest.raises(DataError, match=r"blue/0.JPEG must .* \(got: No such file or directory\)"):
        data[0]


# 200 of 255 in red, 100 in green, 50 in blue; grey has one value.
MODES = {
    "RGB": (Image.new("RGB", (12, 9), (200, 100, 50)), (200, 100, 50)),
    "RGBA": (Image.new("RGBA", (12, 9), (200, 100, 50, 128)), (200, 100, 50)),
    "L": (Image.new("L", (12, 9), 90), (90, 90, 90)),
    "LA": (Image.new("LA", (12, 9), (90, 10)), (90, 90, 90)),
    "1": (Image.new("1", (12, 9), 1), (255, 255, 255)),
    "P": (Image.new("RGB", (12, 9), (200, 100, 50)).quantize(4), (200, 100, 50)),
    "CMYK": (Image.new("CMYK", (12, 9), (55, 155, 205, 0)), (200, 100, 50)),
    "16 bits": (Image.fromarray(np.full((9, 12), 90 * 256 + 7, np.uint16)), (90, 90, 90)),
}


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_mode_become_red_green_and_blue(tmp_path, mode):
    image, colour = MODES[mode]
    (tmp_path / "one").mkdir()
    image.save(tmp_path / "one" / ("it.tiff" if mode == "CMYK" else "it.png"))
    data = fs.ImageFolder(tmp_path, size=6, resize=6, prepare=as_bytes)
    found, _ = data[0]
    assert (found.shape, found.dtype) == ((3, 6, 6), torch.uint8)
    assert found.float().mean(dim=(1, 2)).tolist() == pytest.approx(colour, abs=1)


def test_a_palette_with_a_transparent_colour_is_decoded_without_a_warning(tmp_path):
    (tmp_path / "one").mkdir()
    image = Image.new("RGB", (12, 9), (200, 100, 50)).quantize(4)
    image.save(tmp_path / "one" / "it.png", transparency=b"\x00\x80\xff")
    found, _ = fs.ImageFolder(tmp_path, size=6, resize=6, prepare=as_bytes)[0]
    assert found.float().mean(dim=(1, 2)).tolist() == pytest.approx((200, 100, 50), abs=1)


@pytest.mark.parametrize(("width", "height"), [(90, 60), (60, 90), (64, 64)])
def test_the_middle_is_that_of_the_picture_whose_shorter_side_was_resized(tmp_path, width, height):
    """In two steps: first resized to 32 along the shorter side, then 24 of that in the middle."""
    (tmp_path / "one").mkdir()
    picture = noise(8, 8, seed=1).resize((width, height), Image.Resampling.BICUBIC)
    picture.save(tmp_path / "one" / "it.png")
    found, _ = fs.ImageFolder(tmp_path, size=24, resize=32, prepare=as_bytes)[0]

    scale = 32 / min(width, height)
    resized = picture.resize((round(width * scale), round(height * scale)), Image.BILINEAR)
    left, top = (resized.width - 24) // 2, (resized.height - 24) // 2
    expected = np.asarray(resized)[top : top + 24, left : left + 24].transpose(2, 0, 1)
    assert np.abs(found.numpy().astype(int) - expected).max() <= 2


def test_what_is_trained_with_is_augmented_and_what_is_evaluated_is_not(pictures):
    train, test = fs.image_folders(pictures, size=16, resize=20)
    assert (train.augment, test.augment) == (fs.ResizedCropFlip(), None)
    assert test.classes == train.classes
    index, random = torch.arange(6), np.random.default_rng
    middle = train.batch(index)[0]
    assert torch.equal(middle, train.batch(index)[0])
    assert not torch.equal(middle, train.batch(index, random(0))[0])
    assert torch.equal(middle, train.without_augmentation().batch(index, random(0))[0])
    assert torch.equal(train.batch(index, random(0))[0], train.batch(index, random(0))[0])
    assert not torch.equal(train.batch(index, random(0))[0], train.batch(index, random(1))[0])
    assert torch.equal(test.batch(index, random(0))[0], test.batch(index)[0])


def test_a_window_is_what_is_cut_out_and_mirrored(tmp_path):
    """On a picture whose red grows to the right and whose green grows downwards."""
    (tmp_path / "one").mkdir()
    across, down = np.meshgrid(np.arange(200), np.arange(100))
    pixels = np.stack([across, 2 * down, 0 * down], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one" / "it.png")
    augment = fs.ResizedCropFlip()
    data = fs.ImageFolder(tmp_path, size=20, resize=20, augment=augment, prepare=as_bytes)
    for seed in range(20):
        (left, top, right, bottom), mirrored = augment.window(np.random.default_rng(seed), 200, 100)
        images, _ = data.batch(torch.tensor([0]), np.random.default_rng(seed))
        red, green, _ = images[0].float()
        ends = (red[:, 0].mean().item(), red[:, -1].mean().item())
        pixel_across, pixel_down = (right - left) / 20, (bottom - top) / 20
        first, last = left + pixel_across / 2, right - pixel_across / 2
        assert ends == pytest.approx((last, first) if mirrored else (first, last), abs=2)
        assert green[0].mean().item() == pytest.approx(2 * top + pixel_down - 1, abs=4)


def batches_of(data, seed=3, rank=0, resume_at=0):
    plan = plan_batches(data, 4, 2, fs.Disjoint(), None, workers=2, rank=rank, seed=seed)
    return [each.data for each in plan.batches(resume_at, 0)]


def test_the_runs_seed_decides_what_is_cut_and_a_resumed_run_goes_on_alike(pictures):
    train, _ = fs.image_folders(pictures, size=8, resize=10)
    first, again, other = batches_of(train), batches_of(train), batches_of(train, seed=4)
    late = batches_of(train, resume_at=2)
    assert len(first) == 6
    for (x, y), (same_x, same_y) in zip(first[2:], late, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
    assert all(torch.equal(one[0], two[0]) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])


def test_processes_of_a_loader_decode_the_same_pictures(pictures):
    train, _ = fs.image_folders(pictures, size=8, resize=10)
    loader = DataLoader(train, batch_size=4, shuffle=True)
    plan = plan_batches(loader, None, 2, fs.Disjoint(), None, workers=2, rank=0, seed=3)
    for (x, y), batch in zip(batches_of(train), plan.batches(0, 0), strict=True):
        assert torch.equal(x, batch.data[0])
        assert torch.equal(y, batch.data[1])


def test_a_part_of_a_folder_is_augmented_as_well(pictures):
    train, _ = fs.image_folders(pictures, size=8, resize=10)
    part = source_of(Subset(train, [5, 3]))
    x, y = part.fetch(np.array([1]), lambda: np.random.default_rng(0))
    whole, _ = train.batch(torch.tensor([3]), np.random.default_rng(0))
    assert torch.equal(x, whole)
    assert y.tolist() == [0]


def test_a_folder_can_be_sent_to_a_worker(pictures):
    train, _ = fs.image_folders(pictures, size=8, resize=10)
    twin = pickle.loads(pickle.dumps(train))
    assert torch.equal(twin.batch(torch.arange(3))[0], train.batch(torch.arange(3))[0])


# What is wrong with a folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda it: (it / "val/violet").mkdir(),
            "val must have no folder that is not a class, of 3",
        ),
        (lambda it: (it / "train/violet").mkdir(), "train/violet must have a picture in it: .jpg"),
        (lambda it: (it / "val").rename(it / "test"), "val must be a folder that can be read"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_before_training(pictures, change, message):
    change(pictures)
    with pytest.raises(DataError) as raised:
        fs.image_folders(pictures)
    assert message in str(raised.value)


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(DataError, match="must have a folder of pictures for each class"):
        fs.ImageFolder(tmp_path)


def test_a_class_may_have_no_pictures_to_test_with(pictures):
    for path in (pictures / "val/green").iterdir():
        path.unlink()
    (pictures / "val/green").rmdir()
    _, test = fs.image_folders(pictures)
    assert test.labels.tolist() == [0, 0, 2, 2]  # red is the third class, as in training


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "'size' must be at least 1 (got 0)"),
        ({"size": 32, "resize": 31}, "'resize' must be at least 'size', 32 (got 31)"),
        ({"augment": fs.PadCropFlip()}, "'augment' must be an fs.ResizedCropFlip(…) (got PadCrop"),
        ({"folder": 3}, "'folder' must be a path (got 3)"),
        ({"classes": "red"}, "'classes' must be names, such as train.classes (got 'red')"),
    ],
)
def test_a_bad_field_is_named(tmp_path, fields, message):
    with pytest.raises(fs.InvalidField) as raised:
        fs.ImageFolder(**{"folder": tmp_path} | fields)
    assert message in str(raised.value)


def test_without_pillow_an_error_says_what_to_install(monkeypatch, pictures):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(FlockstepError, match=r"need Pillow: pip install 'flockstep\[images\]'"):
        fs.image_folders(pictures)


def test_a_folder_is_found_from_wherever_a_worker_starts(monkeypatch, tmp_path, pictures):
    monkeypatch.chdir(pictures)
    data = fs.ImageFolder("train", size=8, resize=8)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert data[0][0].shape == (3, 8, 8)


# As data of tasks


def test_imagenet_is_a_folder_of_the_users_own(monkeypatch, tmp_path, pictures):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FLOCKSTEP_DATA", str(tmp_path / "data"))
    imagenet = DATASETS["imagenet"]
    assert not imagenet.is_there()
    with pytest.raises(DataError) as raised:
        fs.dataset("imagenet")
    assert str(raised.value) == (
        "data set 'imagenet' must have train/CLASS/*.jpg and val/CLASS/*.jpg in "
        f"{tmp_path}/data/imagenet or {tmp_path}/cache/flockstep/imagenet: it cannot be fetched, "
        "so put your own copy there, or set FLOCKSTEP_DATA"
    )
    for part in ("train", "val"):
        (tmp_path / "data/imagenet").mkdir(parents=True, exist_ok=True)
        (pictures / part).rename(tmp_path / "data/imagenet" / part)
    assert imagenet.is_there()
    train, test = fs.dataset("imagenet")
    assert (len(train), len(test)) == (18, 6)
    assert train[0][0].shape == imagenet.sample_shape
    assert fs.dataset("imagenet")[0] is train
    assert fs.task("imagenet-resnet50").loaded().train.augment == fs.ResizedCropFlip()
    assert fs.task("imagenet-googlenet-v2").loaded().train.augment is None


def test_the_first_place_with_both_parts_is_taken(tmp_path):
    (tmp_path / "first/mine/train").mkdir(parents=True)
    for part in ("train", "val"):
        (tmp_path / "second/mine" / part).mkdir(parents=True)
    places = [tmp_path / "first", tmp_path / "second"]
    assert OwnPictures("mine").find(places) == tmp_path / "second/mine"
    assert OwnPictures("mine").find(places[:1]) is None


class Small(torch.nn.Sequential):
    """The mean colour decides."""

    def __init__(self):
        super().__init__(
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 1000)
        )


def small_task(pictures, **changes):
    train, test = fs.image_folders(pictures, size=12, resize=14)
    task = fs.task("imagenet-resnet50")
    return dataclasses.replace(task, model=Small, train=train, test=test, **changes)


def test_pictures_of_ones_own_are_learnt(pictures):
    task = small_task(pictures, global_batch=6)
    result = fs.run(task, fs.LocalSGD(period=2), workers=2, epochs=15, lr=1.0)
    assert result.metrics["test_accuracy"] == 1.0
    again = fs.run(task, fs.LocalSGD(period=2), workers=2, epochs=15, lr=1.0)
    assert torch.equal(result.replicas[0], again.replicas[0])


def test_a_class_too_many_is_found_before_training(pictures):
    task = small_task(pictures, global_batch=6)
    two = dataclasses.replace(
        task, model=lambda: torch.nn.Sequential(Small(), torch.nn.Linear(1000, 2))
    )
    with pytest.raises(fs.InvalidField, match=r"'train' must have labels between 0 and 1 \(got 2"):
        fs.run(two, fs.SyncSGD(), workers=2, epochs=1)


def test_a_broken_picture_ends_a_run_with_its_name(pictures):
    (pictures / "train/green/3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"green/3.png must be a picture that can be decoded"):
        fs.run(small_task(pictures, global_batch=6), fs.SyncSGD(), workers=2, epochs=1)


def test_the_real_network_trains_on_a_folder(pictures):
    train, test = fs.image_folders(pictures, size=32, resize=36)
    task = dataclasses.replace(fs.task("imagenet-resnet50"), train=train, test=test)
    result = fs.run(task, fs.SyncSGD(), workers=1, steps=1, batch_size=3)
    assert result.metrics["steps"] == 1
    assert 0 <= result.metrics["test_accuracy"] <= 1


def test_what_is_scored_at_once_is_the_tasks_to_say(pictures):
    task = small_task(pictures, evaluation_batch=4).loaded()
    rows = task.scores(task.make_model(), task.test)
    assert rows[:, 2].tolist() == [3, 3]  # six samples in batches of at most four, evenly
    assert [count for _, count in in_order(task.test, 4)] == [3, 3]
    with pytest.raises(fs.InvalidField, match=r"'evaluation_batch' must be at least 1 \(got 0\)"):
        small_task(pictures, evaluation_batch=0)
