import html.parser

import pytest
import torch

from cafe_tutorial.interactive import Slider
from cafe_tutorial.plots import curve


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_slider_is_plain_accessible_html():
    frames = [curve([(0, i), (1, 1)]) for i in range(3)]
    labels = ['rounds 0: "nothing"', "rounds 1", "rounds 2 & more"]
    page = Page(Slider(frames, labels, name="rounds observed", start=-1)._repr_html_())
    images = [a for tag, a in page.tags if tag == "img"]
    assert [a["alt"] for a in images] == labels and all(a["src"].startswith("data:image/png;base64,") for a in images)
    assert ["hidden" in a for a in images] == [True, True, False]
    (control,) = [a for tag, a in page.tags if tag == "input"]
    assert control["type"] == "range" and (control["min"], control["max"], control["value"]) == ("0", "2", "2")
    assert control["aria-label"] == "rounds observed" and control["aria-valuetext"] == labels[2]
    assert not any(tag in ("script", "link") for tag, _ in page.tags)


def test_slider_errors():
    frame = curve([(0, 1), (1, 2)])
    for frames, labels in (([frame], ["a"]), ([frame, frame], ["a"])):
        with pytest.raises(ValueError, match="frames holds"):
            Slider(frames, labels, name="x")
    with pytest.raises(ValueError, match="start=2"):
        Slider([frame, frame], ["a", "b"], name="x", start=2)


def test_reveal_agrees_with_the_protocol():
    from conftest import table_case

    from cafe_tutorial.reveal import row_gradients

    *_, model, vfl = table_case()
    V, H = row_gradients(vfl)
    view = next(iter(vfl.rounds(1)))
    for m in range(3):
        assert torch.allclose(model.of_worker(view.gradients, m)["first.bias"], V[m][view.indices].mean(0), atol=1e-14)
        assert torch.equal(H[m], vfl.parts[m])
