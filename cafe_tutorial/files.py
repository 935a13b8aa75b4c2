"""Reading your own image sets, and saying what is wrong with a file that is not one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np


def sha256_of(paths: list[Path]) -> str:
    """Hash of one file, or of several with their folders' and own names and sizes."""
    digest = hashlib.sha256()
    for path in paths:
        if len(paths) > 1:
            digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, C, H, W) and labels (N,) of an .npz file, opened without pickles."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path.name} holds one bare array; save images and labels with np.savez(path, images=…, labels=…)")
        with archive:
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
    return images.astype(np.float32)


def _check_labels(labels: np.ndarray, rows: int, name: str) -> np.ndarray:
    if labels.shape != (rows,):
        raise ValueError(f"{name}: labels have shape {labels.shape}; one label an image, shape ({rows},), is needed")
    if labels.dtype.kind not in "iubUS":
        raise ValueError(f"{name}: labels have dtype {labels.dtype}; integers or strings are read")
    return labels


def read_pictures(files: list[Path]) -> np.ndarray:
    """Image files of one size as float32 (N, C, H, W) in [0, 1], C = 1 if all are grey, else 3."""
    pixels = [_read_picture(file) for file in files]
    sizes = sorted({f"{p.shape[0]}x{p.shape[1]}" for p in pixels})
    if len(sizes) > 1:
        raise ValueError(f"{files[0].parent.parent.name!r}: images differ in size ({', '.join(sizes[:5])}); all must have one height and width")
    channels = max(p.shape[2] for p in pixels)
    stack = np.stack([np.broadcast_to(p, (*p.shape[:2], channels)) for p in pixels])
    return np.ascontiguousarray(stack.transpose(0, 3, 1, 2))


def _read_picture(file: Path) -> np.ndarray:
    """One image as (H, W, 1 or 3), float32 in [0, 1]."""
    from PIL import Image

    name = f"{file.parent.name}/{file.name}"
    try:
        with Image.open(file) as image:
            image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read as an image; it may be damaged ({error})") from error
    if image.mode.startswith("I;16"):
        return np.asarray(image, dtype=np.float32)[..., None] / 65535
    if image.mode in ("I", "F"):
        raise ValueError(f"{name} stores {image.mode!r} pixels of no known range; save it with 8 or 16 bits a channel")
    if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
        raise ValueError(f"{name} is partly transparent; put it on a background first")
    kind = "L" if image.mode in ("1", "L", "LA") else "RGB"
    return np.asarray(image.convert(kind), dtype=np.float32).reshape(*image.size[::-1], -1) / 255
