"""Figures to play with: frames behind a slider in plain HTML, and explorers that compute anew where a kernel runs."""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Callable, Sequence

from .plots import Picture


class Slider:
    """Frames of which one is shown; the arrow keys or a drag choose another.

    Everything is in the page itself: the frames are embedded PNGs, each with its own alt text, and the
    script is one attribute. It works on a static page, offline, and in a live notebook.

    Parameters
    ----------
    frames : the pictures, in order
    labels : what each frame shows, in words; read out as the slider's value and used as the alt text
    name : the accessible name of the slider, for example "rounds observed"
    start : number of the frame that is shown first; the last one when it is -1
    """

    def __init__(self, frames: Sequence[Picture], labels: Sequence[str], *, name: str, start: int = 0):
        if len(frames) < 2 or len(frames) != len(labels):
            raise ValueError(f"frames holds {len(frames)} pictures, labels {len(labels)} texts; at least two, and one text a picture, are needed")
        if not -len(frames) <= start < len(frames):
            raise ValueError(f"start={start} must be the number of a frame, from 0 to {len(frames) - 1}")
        self.labels, self.name, self.start = list(labels), name, start % len(frames)
        self._png = [base64.b64encode(f._repr_png_()).decode() for f in frames]

    def _repr_html_(self) -> str:
        images = "".join(
            f'<img src="data:image/png;base64,{png}" alt="{html.escape(label)}"{"" if i == self.start else " hidden"}>'
            for i, (png, label) in enumerate(zip(self._png, self.labels))
        )
        script = (
            "const box=this.closest('figure');"
            "box.querySelectorAll('img').forEach((image,i)=>{image.hidden=i!=this.value;"
            "if(!image.hidden){box.querySelector('output').textContent=image.alt;this.setAttribute('aria-valuetext',image.alt);}});"
        )
        first = html.escape(self.labels[self.start])
        return (
            f'<figure class="cafe-slider" style="margin:1em 0">{images}'
            f'<input type="range" min="0" max="{len(self._png) - 1}" value="{self.start}" aria-label="{html.escape(self.name)}" '
            f'aria-valuetext="{first}" oninput="{html.escape(script)}" style="width:100%"><output>{first}</output></figure>'
        )

    def __repr__(self) -> str:
        return f"Slider({self.name}: {self.labels[self.start]})"


def explore(draw: Callable[..., Picture], **choices: Sequence):
    """Controls that call ``draw`` anew, in a live notebook; its first picture on a static page.

    draw : function of keyword arguments that returns a :class:`~cafe_tutorial.plots.Picture`
    choices : for each argument the values to choose from, the middle one to begin with

    The controls are ipywidgets' (7.7 or 8), one a choice, and answer when they are let go. Where nobody can
    move them, in a book build, a test run or without ipywidgets, the picture of the values to begin with is returned.
    """
    empty = [name for name, values in choices.items() if not len(values)]
    if not choices or empty:
        raise ValueError(f"choices={choices!r} must give each argument of draw at least one value{': ' + empty[0] + ' has none' if empty else ''}")
    start = {name: values[len(values) // 2] for name, values in choices.items()}
    if not _reader_present():
        return draw(**start)
    import ipywidgets
    from IPython.display import display

    def show(**values):
        display(draw(**values))

    controls = {
        name: ipywidgets.SelectionSlider(
            options=[(str(v), v) for v in values], value=start[name], description=name.replace("_", " "), continuous_update=False
        )
        for name, values in choices.items()
    }
    return ipywidgets.interactive(show, **controls)


def _reader_present() -> bool:
    """Whether somebody sits at the kernel with ipywidgets at hand: on Colab, or where a front end would answer
    an input prompt, which neither a book build nor a test run does."""
    if "IPython" not in sys.modules:
        return False
    from importlib.util import find_spec

    kernel = getattr(sys.modules["IPython"].get_ipython(), "kernel", None)
    return find_spec("ipywidgets") is not None and ("google.colab" in sys.modules or bool(getattr(kernel, "_allow_stdin", False)))
