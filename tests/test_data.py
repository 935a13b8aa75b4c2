import numpy as np
import pytest
import torch
from PIL import Image

from cafe_tutorial.data import load, load_images, load_table


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("mnist-sample", (1, 28, 28), 10), ("digits", (1, 8, 8), 10), ("photos", (3, 32, 32), 4), ("photos-64", (3, 64, 64), 4)],
)
def test_built_in_images(name, shape, classes):
    data = load_images(name)
    assert data.images.shape[1:] == shape and data.images.dtype == torch.float32
    assert data.images.min() >= 0 and 0.9 < data.images.max() <= 1
    assert data.classes == classes and set(data.labels.tolist()) == set(range(classes))
    few = load_images(name, rows=7, seed=3)
    again, other = load_images(name, rows=7, seed=3), load_images(name, rows=7, seed=4)
    assert torch.equal(few.images, again.images) and torch.equal(few.labels, again.labels)
    assert not torch.equal(few.images, other.images)


def test_photo_tiles_are_cut_from_the_photographs():
    from skimage.data import astronaut

    data = load_images("photos")
    first = torch.from_numpy(astronaut()[:32, :32].copy()).permute(2, 0, 1) / 255
    assert torch.equal(data.images[0], first) and data.label_values[data.labels[0]] == "astronaut"


def test_table():
    table = load_table("breast-cancer")
    assert table.records.shape == (569, 30) and len(table.columns) == 30 and table.classes == 2
    assert table.records.mean(0).abs().max() < 1e-5 and (table.records.var(0, correction=0) - 1).abs().max() < 1e-4
    from sklearn.datasets import load_breast_cancer

    raw = torch.as_tensor(load_breast_cancer().data)
    assert torch.allclose(table.original_units(table.records.double()), raw, rtol=1e-5, atol=1e-5)
    assert len(load("breast-cancer", rows=9)) == 9


@pytest.mark.parametrize("layout", ["NHW", "NHWC", "NCHW", "float"])
def test_npz_layouts(tmp_path, layout):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    stored = {"NHW": pixels[..., 0], "NHWC": pixels, "NCHW": pixels.transpose(0, 3, 1, 2), "float": pixels / 255}[layout]
    np.savez(tmp_path / "a.npz", images=stored, labels=[1, 5, 5, 15, 1, 2])
    data = load_images(tmp_path / "a.npz")
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, : 1 if layout == "NHW" else 3] / 255
    assert torch.allclose(data.images, expected, atol=1e-6)
    assert data.labels.tolist() == [0, 2, 2, 3, 0, 1] and data.label_values == (1, 2, 5, 15)
    assert data.name == "a.npz" and len(data.sha256) == 64


def test_image_folder(tmp_path):
    for label, value in (("cat", 10), ("dog", 200)):
        (tmp_path / label).mkdir()
        for i in range(3):
            Image.new("RGB", (6, 4), (value, i, 0)).save(tmp_path / label / f"{i}.png")
    data = load_images(tmp_path)
    assert data.images.shape == (6, 3, 4, 6) and data.label_values == ("cat", "dog")
    assert torch.equal(data.labels, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert torch.allclose(data.images[:, 0, 0, 0], torch.tensor([10.0] * 3 + [200.0] * 3) / 255)
    assert len(load_images(tmp_path, rows=2)) == 2
    Image.new("RGB", (8, 4)).save(tmp_path / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"differ in size.*4x6, 4x8"):
        load_images(tmp_path)
    (tmp_path / "dog" / "9.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"dog/9.png cannot be read"):
        load_images(tmp_path)


def test_image_files_of_every_kind(tmp_path):
    """16-bit files keep their range, palettes their colours; what cannot be read faithfully is refused."""
    values = np.array([[0, 20000], [40000, 65535]], dtype=np.uint16)
    folder = tmp_path / "deep" / "a"
    folder.mkdir(parents=True)
    Image.fromarray(values).save(folder / "0.png")
    assert torch.allclose(load_images(tmp_path / "deep").images[0, 0], torch.from_numpy(values / 65535).float())

    folder = tmp_path / "mixed" / "a"
    folder.mkdir(parents=True)
    for d in (tmp_path / "mixed" / ".thumbs", tmp_path / "mixed" / ".ipynb_checkpoints"):
        d.mkdir()
    Image.new("L", (3, 2), 51).save(folder / "grey.png")
    Image.new("LA", (3, 2), (51, 255)).save(folder / "grey-opaque.png")
    (folder / "._grey.png").write_bytes(b"hidden")
    data = load_images(tmp_path / "mixed")
    assert data.images.shape == (2, 1, 2, 3) and (data.images == 0.2).all() and data.label_values == ("a",)
    Image.new("P", (3, 2), 7).save(folder / "palette.gif")
    assert load_images(tmp_path / "mixed").images.shape == (3, 3, 2, 3)
    for mode, colour, message in (("RGBA", (1, 2, 3, 100), "transparent"), ("F", 0.5, "'F' pixels"), ("I", 3, "'I' pixels")):
        Image.new(mode, (3, 2), colour).save(folder / "odd.tiff")
        with pytest.raises(ValueError, match=f"a/odd.tiff.*{message}"):
            load_images(tmp_path / "mixed")


@pytest.mark.parametrize("dtype", [">f4", "<f8", "f2", "longdouble"])
def test_floats_of_every_kind(tmp_path, dtype):
    pixels = np.linspace(0, 1, 32).reshape(2, 4, 4).astype(dtype)
    np.savez(tmp_path / "a.npz", images=pixels, labels=[0, 1])
    assert np.abs(load_images(tmp_path / "a.npz").images[:, 0].numpy() - pixels).max() < 1e-3


GOOD = {"images": np.zeros((4, 6, 6), np.uint8), "labels": np.arange(4)}
BAD_NPZ = {
    "no images": ({"labels": np.arange(4)}, "no array 'images'"),
    "no labels": ({"images": GOOD["images"]}, "no array 'labels'"),
    "int dtype": ({**GOOD, "images": np.zeros((4, 6, 6), np.int32)}, "dtype int32"),
    "two axes": ({**GOOD, "images": np.zeros((4, 6), np.uint8)}, r"shape \(4, 6\)"),
    "four channels": ({**GOOD, "images": np.zeros((4, 6, 6, 4), np.uint8)}, "C = 1 or 3"),
    "no rows": ({"images": np.zeros((0, 6, 6), np.uint8), "labels": np.arange(0)}, "holds no pixel"),
    "above one": ({**GOOD, "images": np.full((4, 6, 6), 2.0)}, r"scale them to \[0, 1\]"),
    "below zero": ({**GOOD, "images": np.full((4, 6, 6), -0.5)}, r"scale them to \[0, 1\]"),
    "nan": ({**GOOD, "images": np.full((4, 6, 6), np.nan)}, "4 of 4 images contain NaN"),
    "too few labels": ({**GOOD, "labels": np.arange(3)}, r"shape \(4,\)"),
    "float labels": ({**GOOD, "labels": np.arange(4.0)}, "dtype float64"),
    "pickled": ({**GOOD, "labels": np.array([1, "a", None, 2], dtype=object)}, "Python objects"),
}


@pytest.mark.parametrize("kind", BAD_NPZ)
def test_bad_npz(tmp_path, kind):
    arrays, message = BAD_NPZ[kind]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_images(tmp_path / "bad.npz")


def test_damaged_and_wrong_files(tmp_path):
    np.savez(tmp_path / "cut.npz", images=np.random.default_rng(0).random((20, 9, 9)), labels=np.arange(20))
    whole = (tmp_path / "cut.npz").read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.npz").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cut\.npz"):
            load_images(tmp_path / "cut.npz")
    np.save(tmp_path / "bare.npy", np.zeros((3, 4, 4)))
    (tmp_path / "bare.npy").rename(tmp_path / "bare.npz")
    with pytest.raises(ValueError, match="one bare array"):
        load_images(tmp_path / "bare.npz")
    with pytest.raises(FileNotFoundError, match="neither a known set"):
        load_images("")
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"'\.csv'"):
        load_images(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError, match="mnist-sample"):
        load_images("mnist-simple")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="one sub-folder"):
        load_images(tmp_path / "empty")
    with pytest.raises(ValueError, match="is a table"):
        load_images("breast-cancer")
    with pytest.raises(ValueError, match="not a known table"):
        load_table("mnist-sample")


@pytest.mark.parametrize("rows", [0, -1, 1798, 2.5, True])
def test_bad_rows(rows):
    with pytest.raises(ValueError, match=r"from 1 to 1,797"):
        load_images("digits", rows=rows)


def test_no_download_gives_a_clear_error(monkeypatch, tmp_path):
    import torchvision

    monkeypatch.setenv("CAFE_TUTORIAL_DATA", str(tmp_path))

    def refuse(*args, **kwargs):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", refuse)
    with pytest.raises(ValueError, match="could not be downloaded .no route to host.*built-in"):
        load_images("cifar10")
