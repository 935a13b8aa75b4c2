"""The rendered pages in headless Chromium, from the file system and with the network off."""

import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parent.parent.parent
HTML = ROOT / "_build" / "html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = sorted((HTML / "book").rglob("*.html")) if HTML.exists() else []
THEME_ERRORS = ("THEBE_JS_URL' has already been declared", "Got invalid theme mode")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
)

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here"),
    pytest.mark.skipif(not PAGES, reason="the book is not built; run make book first"),
]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(HTML / "book").with_suffix("")))


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a page offline at a given width; returns the page and what went wrong in its console."""
    contexts = []

    def open_page(path, width=1280):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        contexts.append(context)
        page, errors = context.new_page(), []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.goto(path.as_uri(), wait_until="load")
        page.wait_for_timeout(300)
        return page, errors

    yield open_page
    for context in contexts:
        context.close()


@each_page
def test_page_is_whole(visit, path):
    page, errors = visit(path)
    serious = [e for e in errors if not any(known in e for known in THEME_ERRORS) and "ERR_INTERNET_DISCONNECTED" not in e]
    assert not serious
    text = page.inner_text("main")
    for trouble in ("Traceback (most recent call last)", "Warning: ", "needs a kernel", "Widget Javascript not detected", "Error rendering", "\\("):
        assert trouble not in text
    for output in page.query_selector_all("div.cell_output"):
        assert output.inner_text().strip() or output.query_selector("img, svg"), "an empty output"
    formulas = page.query_selector_all("article .math")
    assert all(f.query_selector("mjx-container") for f in formulas)


@each_page
def test_images_have_alt_texts(visit, path):
    page, _ = visit(path)
    for image in page.query_selector_all("article img"):
        alt = image.get_attribute("alt") or ""
        assert len(alt) > 5 and not re.search(r"\.(png|svg|jpe?g)$|/", alt), image.get_attribute("src")[:80]
        assert image.evaluate("i => i.hidden || i.naturalWidth > 0"), alt


@each_page
def test_no_sideways_scrolling_on_a_phone(visit, path):
    page, _ = visit(path, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@each_page
def test_dropdowns_open_and_sliders_move_by_keyboard(visit, path):
    page, _ = visit(path)
    for details in page.query_selector_all("article details"):
        before = details.evaluate("d => d.open")
        summary = details.query_selector("summary")
        summary.focus()
        page.keyboard.press("Enter")
        assert details.evaluate("d => d.open") != before
    for figure in page.query_selector_all("figure.cafe-slider"):
        control = figure.query_selector("input")
        shown = lambda f=figure: f.evaluate("f => [...f.querySelectorAll('img')].map(i => !i.hidden)")
        start, label = shown(), figure.query_selector("output").inner_text()
        control.focus()
        page.keyboard.press("ArrowRight" if not start[-1] else "ArrowLeft")
        assert sum(shown()) == 1 and shown() != start and figure.query_selector("output").inner_text() != label


@each_page
def test_internal_links_resolve(visit, path):
    page, _ = visit(path)
    for link in page.query_selector_all("a[href]"):
        target, anchor = urldefrag(link.get_attribute("href"))
        if re.match(r"(https?|mailto|javascript):", target) or target in ("", "#") and not anchor:
            continue
        file = (path.parent / unquote(target)).resolve() if target else path
        assert file.exists(), target
        if anchor and file.suffix == ".html":
            assert re.search(f'(id|name)="{re.escape(unquote(anchor))}"', file.read_text()), (target, anchor)
