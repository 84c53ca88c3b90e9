"""Figures of the repository: PNG files with 64 colors, a quarter of the usual size."""

from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Write a figure as a small PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    shrink(path)


def shrink(path: Path) -> None:
    """Reduce a PNG file to 64 colors."""
    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
