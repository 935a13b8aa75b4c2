"""Reading your own image sets, and saying what is wrong with a file that is not one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np


def sha256_of(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, C, H, W) and labels (N,) of an .npz file, opened without pickles."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            for key in ("images", "labels"):
                if key not in archive.files:
                    held = ", ".join(archive.files) or "nothing"
                    raise ValueError(f"{path.name} has no array {key!r} (it holds {held}); save it with np.savez(path, images=…, labels=…)")
            images, labels = archive["images"], archive["labels"]
    except ValueError as error:
        if "pickle" in str(error).lower():
            raise ValueError(f"{path.name} holds Python objects or is no .npz file; save plain uint8 or float arrays with np.savez") from error
        raise
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read as an .npz file ({type(error).__name__}: {error}); it may be damaged") from error
    return _check_images(images, path.name), _check_labels(labels, len(images), path.name)


def _check_images(images: np.ndarray, name: str) -> np.ndarray:
    """Any of the accepted layouts as (N, C, H, W)."""
    wanted = "images must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3"
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"{name}: images have shape {images.shape}; {wanted}")
    if 0 in images.shape:
        raise ValueError(f"{name}: images have shape {images.shape}, which holds no pixel; {wanted}")
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"{name}: images have dtype {images.dtype}; uint8 (0 to 255) or float in [0, 1] is read")
    if not np.isfinite(images).all():
        bad = int(len(images) - np.isfinite(images).all(axis=(1, 2, 3)).sum())
        raise ValueError(f"{name}: {bad} of {len(images)} images contain NaN or infinity; remove or repair them")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise ValueError(f"{name}: float images reach from {low:g} to {high:g}; scale them to [0, 1] or store uint8")
    return images


def _check_labels(labels: np.ndarray, rows: int, name: str) -> np.ndarray:
    if labels.shape != (rows,):
        raise ValueError(f"{name}: labels have shape {labels.shape}; one label an image, shape ({rows},), is needed")
    if labels.dtype.kind not in "iubUS":
        raise ValueError(f"{name}: labels have dtype {labels.dtype}; integers or strings are read")
    return labels


def read_pictures(files: list[Path]) -> np.ndarray:
    """Image files of one size as uint8 (N, C, H, W), C = 1 if all are grey, else 3."""
    from PIL import Image, UnidentifiedImageError

    pixels, grey = [], True
    for file in files:
        try:
            with Image.open(file) as image:
                grey = grey and image.mode in ("L", "1")
                pixels.append(np.asarray(image.convert("RGB")))
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{file.parent.name}/{file.name} cannot be read as an image; it may be damaged ({error})") from error
    sizes = sorted({f"{p.shape[0]}x{p.shape[1]}" for p in pixels})
    if len(sizes) > 1:
        raise ValueError(f"{files[0].parent.parent.name!r}: images differ in size ({', '.join(sizes[:5])}); all must have one height and width")
    stack = np.stack(pixels).transpose(0, 3, 1, 2)  # (N, 3, H, W)
    return np.ascontiguousarray(stack[:, :1] if grey else stack)
