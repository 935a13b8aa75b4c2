import html.parser

import pytest
import torch

from cafe_tutorial.interactive import Slider, explore
from cafe_tutorial.plots import Picture, curve


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


EXPLORER = """
from cafe_tutorial.interactive import explore
from cafe_tutorial.plots import curve
explore(lambda height, line_end: curve([(0, 0), (line_end, height)]), height=(3, 1), line_end=(5, 7, 9))
"""


@pytest.fixture(scope="module")
def kernel():
    manager = pytest.importorskip("jupyter_client.manager")
    running, client = manager.start_new_kernel(kernel_name="python3")
    yield client
    client.stop_channels()
    running.shutdown_kernel(now=True)


def outputs(kernel, **how):
    """The messages that running the explorer sends to a front end."""
    messages = []
    kernel.execute_interactive(EXPLORER, output_hook=messages.append, timeout=120, **how)
    assert not [m for m in messages if m["msg_type"] == "error"]
    return messages


def shown(messages):
    return [m["content"]["data"] for m in messages if m["msg_type"] in ("display_data", "execute_result")]


def test_explorer_is_a_picture_where_nobody_is_present(kernel):
    assert isinstance(explore(lambda a: curve([(0, a), (1, 1)]), a=(1, 2)), Picture)
    (only,) = shown(outputs(kernel, allow_stdin=False))
    assert "image/png" in only and not any("widget" in kind for kind in only)


def test_explorer_has_widgets_where_a_front_end_answers(kernel):
    messages = outputs(kernel, allow_stdin=True, stdin_hook=lambda m: None)
    assert any("application/vnd.jupyter.widget-view+json" in data for data in shown(messages))
    states = [m["content"]["data"]["state"] for m in messages if m["msg_type"] == "comm_open"]
    sliders = [s for s in states if s["_model_name"] == "SelectionSliderModel"]
    assert [s["description"] for s in sliders] == ["height", "line end"]
    state = [(s["index"], list(s["_options_labels"]), s["continuous_update"]) for s in sliders]
    assert state == [(1, ["3", "1"], False), (1, ["5", "7", "9"], False)]


def test_explorer_errors():
    for choices in ({}, {"a": ()}):
        with pytest.raises(ValueError, match="choices="):
            explore(lambda **_: None, **choices)


def test_reveal_agrees_with_the_protocol():
    from conftest import table_case

    from cafe_tutorial.reveal import row_gradients

    *_, model, vfl = table_case()
    V, H = row_gradients(vfl)
    view = next(iter(vfl.rounds(1)))
    for m in range(3):
        assert torch.allclose(model.of_worker(view.gradients, m)["first.bias"], V[m][view.indices].mean(0), atol=1e-14)
        assert torch.equal(H[m], vfl.parts[m])
