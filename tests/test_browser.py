"""The pages of `cuda-l2 report` and `cuda-l2 watch` in a real Chromium without a window: keys, links, files, colours."""

import csv
import io
import itertools
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import trial
from test_report_page import command, grid, measured

from cuda_l2.archive import Archive
from cuda_l2.records import Verdict, VerdictStatus

SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
THEMES = ("light", "dark")
SHAPES = [f"{m}x{n}x{k}" for m, n, k in itertools.product((64, 128, 256), repeat=3)]
EVIL = "<img src=x onerror=alert(1)>"
LEAST_CONTRAST = 4.5
"""Least contrast ratio of text with what is behind it (WCAG 2, level AA)."""

FAINT = """(least) => {
  const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const found = channels(getComputedStyle(each).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return channels(getComputedStyle(document.body).backgroundColor);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!element.getClientRects().length || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element);
    const ink = channels(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < least) found.push(`${element.tagName} ${element.textContent.slice(0, 40)}: ${ink}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    names = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    # one of these may be a stub that names another way to install it
    path = next(
        (name for name in names if not subprocess.run([name, "--version"], capture_output=True).returncode), None
    )
    if path is None:
        pytest.skip("there is no Chromium: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=0)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Any]:
    """Opens an address in a tab of its own. What its console says, and what it asks for in vain, fails the test."""
    said: list[str] = []
    contexts = []

    def open_(address: str, size: str = "desktop", theme: str = "light") -> Any:
        width, height = SIZES[size]
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        context.set_default_timeout(0)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("dialog", lambda dialog: said.append(f"a dialog: {dialog.message}"))
        tab.goto(address)
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page with every kind of section."""
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    folder = tmp_path_factory.mktemp("report")
    rows = [measured(shape, 5 + at % 7, mode) for at, shape in enumerate(SHAPES) for mode in ("offline", "server")]
    grid(folder / "run", rows)
    searches(folder / "archive.db")
    (folder / "comparison.csv").write_text(
        "searcher,task,seed,measurements,regret\n"
        + "".join(f"s{name},64x64x64,0,{n},{(name + 1) / n}\n" for name in range(6) for n in (1, 2, 4))
    )
    names = [f"a long name of column {at}" for at in range(20)]
    (folder / "tasks.csv").write_text(f"{','.join(names)}\ngelu:rows=8192,columns=8192{',1234.5678' * 19}\n")
    command(folder, out=folder / "report.html")
    return (folder / "report.html").as_uri()


def searches(path: Path) -> None:
    wrong = Verdict(VerdictStatus.INCORRECT, check=EVIL, reason="wrong")
    with Archive(path) as archive:
        for at in range(4):
            archive.append(trial(f"// {at}", 1 + at / 10))
        archive.append(trial(f"// bad {EVIL}", verdict=wrong, timing=None, reward=0.0))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES)
def test_a_page_fits_its_window_and_every_text_can_be_read(opened: Any, report: str, size: str, theme: str) -> None:
    tab = opened(report, size, theme)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate(FAINT, LEAST_CONTRAST) == []
    tab.goto(f"{report}#64x64x64")
    assert tab.locator("dialog").is_visible()
    assert tab.evaluate("(d => d.scrollWidth <= d.clientWidth)(document.querySelector('dialog'))")
    assert tab.evaluate(FAINT, LEAST_CONTRAST) == []


def test_a_printed_page_is_light_and_cuts_no_table(opened: Any, report: str) -> None:
    tab = opened(report, theme="dark")
    tab.set_viewport_size({"width": 718, "height": 1000})  # A4 less its margins
    tab.emulate_media(media="print")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate(FAINT, LEAST_CONTRAST) == [] and not tab.locator("nav, .tools").first.is_visible()
    assert tab.get_by_text("The first 10 of 20 columns are printed.").is_visible()


def test_every_link_leads_to_a_section_or_opens_a_card(opened: Any, report: str) -> None:
    tab = opened(report)
    targets = tab.eval_on_selector_all("a[href]", "all => [...new Set(all.map(a => a.getAttribute('href')))]")
    sections = [target for target in targets if tab.locator(f"[id='{target[1:]}']").count()]
    assert {"#rows", "#searchers", "#searches"} <= set(sections)
    assert {target[1:] for target in targets} - {each[1:] for each in sections} == {*SHAPES}
    for shape in SHAPES[::9]:
        tab.locator(f"svg a[href='#{shape}']").first.dispatch_event("click")
        tab.wait_for_function("shape => document.querySelector('#card-title')?.textContent === shape", arg=shape)
        assert tab.locator("dialog").is_visible() and "cuBLASLt-AutoTuning TN" in tab.locator("dialog").inner_text()
        tab.keyboard.press("Escape")
        assert not tab.locator("dialog").is_visible()


def test_a_shape_is_found_by_its_name_and_another_is_not(opened: Any, report: str) -> None:
    tab = opened(report)
    field = tab.get_by_label("Card of a shape")
    field.fill("1x1x1")
    field.press("Enter")
    assert "1x1x1 is not among the rows" in tab.locator("#unknown").inner_text()
    field.fill("64x64x64")
    field.press("Enter")
    shown = tab.locator("dialog").inner_text()
    assert f"1 incorrect in the check '{EVIL}'" in shown and "run/table" in shown and "row 1" in shown


def test_tables_are_sorted_and_filtered_by_keys_and_saved_as_csv(opened: Any, report: str) -> None:
    tab = opened(report)
    table = tab.locator("table[data-name=s0-t1-offline]")
    column = list(table.locator("thead th").all_inner_texts()).index("mean speedup - 1")
    tools = tab.locator("#s0-t1-offline .tools button")
    tools.focus()
    for _ in range(2 + column):  # past the scrolled region and the columns before
        tab.keyboard.press("Tab")

    def values() -> list[float]:
        cells = table.locator(f"tbody td:nth-child({column + 1})")
        return [float(value) for value in cells.evaluate_all("all => all.map(td => td.dataset.v)")]

    given = values()
    for sign, order in ((1, "ascending"), (-1, "descending")):
        tab.keyboard.press("Enter")
        assert values() == sorted(given, key=lambda value: sign * value) and len(set(given)) > 3
        assert table.locator("th[aria-sort]").get_attribute("aria-sort") == order
    with tab.expect_download() as download:
        tools.press("Enter")
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    assert download.value.suggested_filename == "s0-t1-offline.csv"
    assert rows[0][0] == "baseline" and [float(row[column]) for row in rows[1:]] == values()

    tab.locator("#sets summary").first.press("Enter")
    search = tab.get_by_label("filter rows-0")
    search.focus()
    tab.keyboard.type("256x256x64")
    assert tab.locator("table[data-name=rows-0] tbody tr:visible").count() == 1
    with tab.expect_download() as download:
        tab.locator("#sets .tools button").first.press("Enter")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert (
        sorted(row["task"] for row in rows) == sorted(SHAPES) and {"plain us low", "plain schedule"} <= rows[0].keys()
    )


def test_a_watched_search_appears_in_a_page_and_its_end_is_said(opened: Any, tmp_path: Path) -> None:
    for package in ("matplotlib", "jinja2", "starlette"):
        pytest.importorskip(package, reason="the page needs the extra report")
    uvicorn = pytest.importorskip("uvicorn")
    from cuda_l2.report.watch.server import _listening, application  # noqa: PLC0415
    from cuda_l2.report.watch.watcher import Watcher  # noqa: PLC0415

    path = tmp_path / "archive.db"
    with Watcher(path, figures=True) as watcher, _listening(0) as bound:
        app = application(watcher.look, "token", EVIL)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            tab = opened(f"http://localhost:{bound.getsockname()[1]}/token/", "phone", "dark")
            tab.get_by_text("no search, table or training has written it yet").wait_for()
            searches(path)
            tab.locator("#rejected").get_by_text(f"incorrect in the check '{EVIL}'").wait_for()
            tab.locator("#newest").get_by_text("1.300", exact=True).wait_for()
            tab.locator("svg").first.wait_for()
            details = tab.locator("summary").first
            details.press("Enter")
            with Archive(path) as archive:
                archive.append(trial("// more", 1.2))
            tab.locator("#newest").get_by_text("1.200", exact=True).nth(1).wait_for()
            assert details.locator("xpath=..").get_attribute("open") is not None  # what was opened stays open
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert tab.evaluate(FAINT, LEAST_CONTRAST) == []
        finally:
            tab.close()
            server.should_exit = True
            thread.join()
