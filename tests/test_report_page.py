"""The page of `cuda-l2 report`: its numbers are the rows', it stands alone, and what is missing is said."""

import base64
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import sqlite3
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made import near, timing, trial

from cuda_l2.archive import Archive
from cuda_l2.commands.optimize import _require_replaceable, _write_page
from cuda_l2.commands.report import command
from cuda_l2.records import Build, BuildStatus, Gemm, Layout, to_json
from cuda_l2.report import comparison
from cuda_l2.report.grid import write_tables
from cuda_l2.report.page import patterns, published, searchers, whole
from cuda_l2.report.page.reading import read
from cuda_l2.report.page.studies import MAX, by_size, comparisons, headline, label, ratios, spread, studies
from cuda_l2.runs.comparison import Curve
from cuda_l2.runs.results import Header, KernelFigures, Measurement
from cuda_l2.system.errors import UserError

ROOT = Path(__file__).parents[1]
H200 = ROOT / "results" / "h200"
HEADER = Header(
    "cuda:GPU:sm_90a",
    {"gpu": "A GPU", "arch": "sm_90a", "peak_tflops": 700.0, "memory_gbytes_per_s": 4000.0},
    {"shapes": "2"},
)
KINDS = ("cuBLAS", "cuBLASLt-heuristic", "cuBLASLt-AutoTuning")
THEIRS = {"torch.matmul": 20.0} | {
    f"{kind} {layout}": 12.0 + 2 * at + more for at, kind in enumerate(KINDS) for layout, more in (("NN", 0), ("TN", 1))
}
ENDING = "64x64x64: no report, so that no winner is confirmed: other work kept the cores busy"
VOID = {"meta", "input", "br", "link"}


def measured(shape: str, us: float, protocol: str = "offline", **named: Any) -> Measurement:
    """A library with a kernel for each layout; the one that reads column-major B takes 1 us more."""
    kernels = tuple(
        KernelFigures(
            *(layout, False, f"id-{layout}", "sm90_wave"),
            schedule=(("SWAP", 0), ("BM", 64), ("BN", 128), ("KB", 1), ("STAGES", 4), ("ORDER", 8)),
            selected_us=each,
            latency_us=near(each, 0.01),
            speedups=tuple((name, near(theirs / each, 0.01)) for name, theirs in THEIRS.items()),
        )
        for layout, each in ((Layout.NN, us), (Layout.TN, us + 1))
    )
    times = timing(us, THEIRS, 0.01, protocol=protocol)
    fields = {"created": "2026-01-02T03:04:05+00:00", **named}
    return Measurement(Gemm.parse(shape), protocol, "measured", timing=times, kernels=kernels, **fields)


def grid(folder: Path, measurements: list[Measurement]) -> Path:
    folder.mkdir(exist_ok=True)
    write_tables(folder, HEADER, measurements)
    return folder


class Checked(HTMLParser):
    """What a page's elements are; AssertionError where they do not close as they open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.open += [] if tag in VOID else [tag]
        found = {name: value or "" for name, value in attrs}
        self.ids.update([found["id"]] if "id" in found else [])
        self.addresses += [found[name] for name in ("href", "src", "action") if name in found]
        assert not [name for name in found if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(tmp_path: Path, *results: Path) -> str:
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    command(*results, out=tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def data(text: str) -> Any:
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def column(of: dict[str, Any], name: str) -> list[Any]:
    found = next(each for each in of["columns"] if each["n"] == name)
    return found["v"] if "v" in found else [found["t"][at] for at in found["c"]]


def check_alone(text: str) -> Checked:
    """A whole page that asks for nothing from elsewhere, whose policy lets nothing but its own script run."""
    checked = Checked(text)
    assert [name for name, count in checked.ids.items() if count > 1] == []
    assert all(address.startswith("#") for address in checked.addresses)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    script = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert len(script) == 1
    assert base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode() in text
    assert "default-src 'none'" in text
    held = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert held and "<" not in held[1]
    return checked


def test_the_papers_ten_columns_are_ratios_of_the_rows_times(tmp_path: Path) -> None:
    found = read([grid(tmp_path / "run", [measured("64x64x64", 5), measured("128x64x64", 8)])])
    (study,) = studies(found.cases)
    assert comparisons(study.main) == list(published.COLUMNS)

    def mean(kind: str, way: str) -> float:
        return spread([ratio for _, ratio in ratios(study.main, kind, way)]).mean

    assert mean("torch.matmul", "") == pytest.approx((20 / 5 + 20 / 8) / 2)
    assert mean("cuBLAS", "nn") == pytest.approx((12 / 5 + 12 / 8) / 2)
    assert mean("cuBLAS", "tn") == pytest.approx((13 / 6 + 13 / 9) / 2)  # against our kernel that reads B alike
    assert mean("cuBLASLt-AutoTuning", MAX) == pytest.approx((16 / 5 + 16 / 8) / 2)


def test_a_ratio_below_one_counts_as_one_where_the_faster_is_used() -> None:
    both = [near(0.5, 0.1), near(1.5, 0.1)]
    assert spread(both).mean == 1 and spread(both, floor=1).mean == 1.25
    assert spread(both).wins == 0.5 and spread(both).certain_losses == 0.5


def test_the_faster_layout_stands_for_a_shape_with_a_row_for_each(tmp_path: Path) -> None:
    rows = [measured("64x64x64", 5), measured("64x64x64:tn", 4)]
    (study,) = studies(read([grid(tmp_path / "run", rows)]).cases)
    ((case, ratio),) = ratios(study.main, "cuBLASLt-AutoTuning", MAX)
    assert case.task == "64x64x64:tn" and ratio.estimate == pytest.approx(16 / 4)
    assert [name for _, name, _ in by_size(headline(study.main)[1])] == ["18-20"]


def test_a_page_holds_the_rows_and_stands_alone(tmp_path: Path) -> None:
    run = grid(tmp_path / "run", [measured("64x64x64", 5), measured("128x64x64", 8), measured("64x64x64", 6, "server")])
    text = page(tmp_path, run)
    checked = check_alone(text)
    offline, server = sorted(data(text)["sets"], key=lambda each: each["protocol"])
    assert column(offline, "task") == ["64x64x64", "128x64x64"] and column(offline, "plain us") == [5, 8]
    assert column(offline, "row") == [1, 3] and column(server, "cuBLAS NN us") == [12]
    assert set(data(text)["helps"]) == {"sm90_wave"}
    for said in ("Table 1, offline", "Table 1, server", "Table 2, offline", "Table 3, offline", "Figure 1", "Roofline"):
        assert said in text
    assert "+225.0%" in text  # 20 / 5 and 20 / 8 of torch.matmul
    assert "A GPU; 2026-01-02; cuda-l2 bench (shapes 2)" in text and "run/table" in text
    assert checked.tags["svg"] >= 5 and "CUDA-L2 paper, A100" in text


def test_what_is_not_there_is_said_in_place_of_a_figure(tmp_path: Path) -> None:
    text = page(tmp_path, grid(tmp_path / "run", [measured("64x64x64", 5)]))
    for said in (
        "No heat map: the shapes form no grid",
        "No Figure 4: 1 of the best kernels",
        "No archive is among the results",
        "No verification.json",
        "No training run",
        "No benchmark of a model",
    ):
        assert said in text


def test_of_one_shape_times_are_shown_and_no_statistics(tmp_path: Path) -> None:
    text = page(tmp_path, grid(tmp_path / "run", [measured("64x64x64", 5)]))
    assert "Times of 64x64x64" in text and "Table 1" not in text and "Table 3" not in text
    assert "64x64x64, A GPU, offline: 3.2 [3.168, 3.232]x as fast as the fastest tuned cuBLASLt algorithm." in text
    found = re.search(r'row">torch.matmul</th>(.*?)</tr>', text, re.S)
    assert found and re.findall(r">([^<]+)</td>", found[1])[:3] == ["offline", "20 [19.8, 20.2]", "4 [3.96, 4.04]"]
    assert re.findall("<h2>(.*?)</h2>", text)[2:] == ["Not among these results", "All rows"]


def test_long_times_are_written_without_a_power_of_ten(tmp_path: Path) -> None:
    text = page(tmp_path, grid(tmp_path / "run", [measured("64x64x64", 194170.0)]))
    assert "194,200 [192,200, 196,100]" in text and "e+0" not in text.split("<script")[0].split("</style>")[1]


def test_a_page_without_a_report_counts_the_searchs_trials(tmp_path: Path) -> None:
    path = tmp_path / "archive.db"
    with Archive(path) as archive:
        archive.append(trial("// 1", 1.25, machine="cpu:A"))
    assert "from 1 trial." in " ".join(page(tmp_path, path).split())


def test_markup_in_results_is_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script> $\\frac$"
    run = grid(tmp_path / "run", [measured("64x64x64", 5, proposer=evil), measured("128x64x64", 5)])
    folder = run.rename(tmp_path / "<b>run")
    text = page(tmp_path, folder)
    check_alone(text)
    assert "alert(1)</script>" not in text and "<b>run" not in text
    assert column(data(text)["sets"][0], "proposer") == [evil, ""]


def test_a_fresh_archive_shows_its_search_and_its_winner(tmp_path: Path) -> None:
    path = tmp_path / "archive.db"
    environment = {"cpu": "A CPU", "peak_gflops": 200.0, "read_gbytes_per_s": 20.0}
    named = {"machine": "cpu:A", "environment": environment, "created": "2026-01-02T03:04:05+00:00"}
    refused = Build("c", BuildStatus.REFUSED, reason="asks for the clock")
    with Archive(path) as archive:
        for at in range(3):
            archive.append(trial(f"// {at}", 1 + at / 10, **named))
        archive.append(trial("// bad", build=refused, verdict=None, timing=None, reward=math.nan, **named))
        archive.append(trial("// 1", 1.15, "offline", **named))
        archive.append(trial("// 2", 1.25, "offline", **named))
    text = page(tmp_path, path)
    check_alone(text)
    (found,) = data(text)["sets"]
    assert column(found, "torch us") == [1.25] and column(found, "row") == [6]  # the last report, a trial's number
    assert data(text)["searches"] == [["64x64x64", "archive.db", "A CPU", 4, {"refused": 1}]]
    assert data(text)["sources"] == {"64x64x64": "// 2"}
    assert "Best speedup so far: 64x64x64" in text and "the paper, A100" not in text


def test_an_unfinished_run_is_read_and_its_damaged_line_said(tmp_path: Path) -> None:
    lines = [to_json(HEADER), to_json(measured("64x64x64", 5)), to_json(measured("128x64x64", 8)), '{"gemm": {"m": 1']
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    found = read([tmp_path])
    assert [case.task for case in found.cases] == ["64x64x64", "128x64x64"]
    assert found.notes == [f"{tmp_path.name}/results.jsonl: 1 damaged lines are left out"]


def test_bad_input_is_one_clear_error(tmp_path: Path) -> None:
    other, table, empty = tmp_path / "notes.json", tmp_path / "table.csv", tmp_path / "empty"
    empty.mkdir()
    other.write_text("{}")
    table.write_text("m,n\n1,2\n")
    with pytest.raises(UserError, match="name the folders, files or archives"):
        read([])
    with pytest.raises(UserError, match="no results found"):
        read([empty])
    with pytest.raises(UserError, match="holds no results that a report can show"):
        read([other])
    with pytest.raises(UserError, match="has no column k, layout, protocol, status"):
        read([table])
    table.write_text("m,n,k,layout,protocol,status\n1,2,x,nn,offline,measured\n")
    with pytest.raises(UserError, match=r"table\.csv, row 1: "):
        read([table])
    database = tmp_path / "archive.db"
    Archive(database).close()
    with pytest.raises(UserError, match=r"archive\.db holds no trials"):
        read([database])
    database.write_bytes(b"SQLite format 3\0" + b"\0" * 100)
    with pytest.raises(UserError, match="archive"):
        read([database])
    database.unlink()
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA user_version = 99")
        db.execute("CREATE TABLE trials (number INTEGER)")
    before = database.read_bytes()
    with pytest.raises(UserError, match="version 99"):
        read([database])
    assert database.read_bytes() == before


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "sizes.svg").write_text("mine")
    for named in ({"out": tmp_path / "report.html"}, {"out": tmp_path / "new.html", "pictures": tmp_path}):
        with pytest.raises(UserError, match="--force"):
            command(tmp_path, **named)
    assert (tmp_path / "report.html").read_text() == (tmp_path / "sizes.svg").read_text() == "mine"
    assert not (tmp_path / "new.html").exists()


def test_a_page_goes_through_a_link_and_replaces_nothing_but_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    results, page, link, pipe = (tmp_path / name for name in ("run", "page.html", "link.html", "pipe"))
    grid(results, [measured("64x64x64", 5)])
    page.write_text("old")
    link.symlink_to("page.html")
    os.mkfifo(pipe)
    command(results, out=link, force=True)
    assert link.is_symlink() and page.read_text() != "old"
    with pytest.raises(UserError, match="a pipe"):
        command(results, out=pipe, force=True)
    assert pipe.is_fifo()


def test_of_two_reports_at_once_the_second_says_that_the_first_is_there(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    out, drawn = tmp_path / "report.html", whole.html

    def while_another_ends(*arguments: Any) -> str:
        out.write_text("the other's")
        return drawn(*arguments)

    monkeypatch.setattr(whole, "html", while_another_ends)
    with pytest.raises(UserError, match="File exists; choose another place, or --force"):
        command(grid(tmp_path / "run", [measured("64x64x64", 5)]), out=out)
    assert out.read_text() == "the other's" and sorted(each.name for each in tmp_path.iterdir()) == [
        "report.html",
        "run",
    ]


def test_models_and_their_products_are_shown_with_their_rows(tmp_path: Path) -> None:
    folder = tmp_path / "<i>models"
    folder.mkdir()
    (folder / "table.csv").write_text(
        "model,layers,phase,batch,tokens,cached,arm,us,ours_us,ratio,ratio_low,ratio_high,bar,over_bar,over_bar_low,"
        "over_bar_high,difference\n<b>m,2,decode,16,1,511,compile,88.8,85.168,1.0424,1.0405,1.0445,,,,,1e-2\n"
    )
    head = "shape,kernel,us,torch_us,ratio,low,high,again,again_low,again_high\n"
    products = "1x64x64:tn:bf16,k1,2,4,2.0,1.9,2.1,,,\n1x64x128:tn,,4,2,0.5,0.4,0.6,0.98,0.97,0.99\n"
    (folder / "layers.csv").write_text(head + products)
    (folder / "environment.json").write_text('{"environment": {"gpu": "A <b>GPU"}, "date": "2026-01-02"}')
    text = page(tmp_path, folder)
    check_alone(text)
    for shown in (
        *(
            "A &lt;b&gt;GPU; 2026-01-02; cuda-l2 bench --model; rows of &lt;i&gt;models/table.csv",
            "1.042 [1.040, 1.044]",
        ),
        *("&lt;b&gt;m", "cuda-l2 library bench; rows of &lt;i&gt;models/layers.csv", "0.980 [0.970, 0.990]"),
        *("2.000 [1.900, 2.100]", "torch&#39;s own", '<td data-v="2">2</td>', ">+0.0%<"),  # geometric mean of 2 and 0.5
    ):
        assert shown in text, shown
    command(folder, out=tmp_path / "new.html", pictures=tmp_path / "pictures")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["models.svg"]
    assert "&lt;b&gt;m, decode, batch 16" in (tmp_path / "pictures" / "models.svg").read_text()
    (folder / "layers.csv").write_text(head + products + "1x1x1:tn,k,nan,1,1,1,1,,,\n")
    assert any("row 3: us is no number" in note for note in read([folder]).notes)


def test_searchers_compared_are_shown_with_their_rows(tmp_path: Path) -> None:
    folder = tmp_path / "<i>world"
    folder.mkdir()
    curves = [
        Curve(searcher, task, seed, regrets)
        for searcher, regrets in (("<b>one", (0.5, 0.25, 0.25, 0.004)), ("two", (1.5, 0.75, 0.0002, 0.0002)))
        for task in ("64x64x64", "128x64x64")
        for seed in range(3)
    ]
    (folder / "comparison.csv").write_text(comparison.csv(curves))
    (folder / "environment.json").write_text('{"environment": {"gpu": "A <b>GPU"}, "date": "2026-01-02"}')
    text = page(tmp_path, folder)
    check_alone(text)
    for shown in (
        *("cuda-l2 compare; rows of &lt;i&gt;world/comparison.csv", "A &lt;b&gt;GPU; 2026-01-02", "from 48 rows"),
        *("median over 2 tasks, mean over 3 seeds", ">&lt;b&gt;one</th>"),
    ):
        assert shown in text, shown

    def row(name: str) -> list[str]:
        found = re.search(rf"{name}</th>(.*?)</tr>", text, re.S)
        assert found
        return re.findall(r">([^<]+)</td>", found[1])

    assert row("one") == ["6", "50.0%", "50.0%", "25.0%", "0.4%", "4"]
    assert row("two") == ["6", "150.0%", "150.0%", "75.0%", "0.0%", "3"]
    thinned = [line for line in comparison.csv(curves).splitlines() if line.split(",")[3] != "3"]
    (folder / "comparison.csv").write_text("\n".join(thinned))
    (contest,) = read([folder]).contests
    assert "measurements to within" not in searchers.section([contest]).parts[1].columns[-1]  # type: ignore[union-attr]
    assert contest.counts == (1, 2, 4) and contest.curves[-1].regrets == (1.5, 0.75, 0.75, 0.0002)
    (folder / "comparison.csv").write_text("\n".join([thinned[0], *thinned[2:]]))
    with pytest.raises(UserError, match="no row for its first measurement"):
        read([folder])
    for count, regret in (("1", "nan"), ("1", "inf"), ("1", "-0.5"), ("0", "0.5")):
        (folder / "comparison.csv").write_text(f"{thinned[0]}\none,64x64x64,0,{count},{regret}\n")
        with pytest.raises(UserError, match=f"row 1: a regret of {regret} after {count} measurements"):
            read([folder])


def test_pictures_have_a_background_and_colours_of_both_themes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    run = grid(tmp_path / "run", [measured("64x64x64", 5), measured("128x64x64", 8)])
    command(run, out=tmp_path / "report.html", pictures=tmp_path / "pictures")
    css = (ROOT / "cuda_l2" / "report" / "page" / "page.css").read_text()
    for name in ("sizes.svg", "baselines.svg"):
        text = (tmp_path / "pictures" / name).read_text()
        Checked(text)
        assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"') and "A GPU" in text and 'href="#1' not in text
        assert "prefers-color-scheme:dark" in text and 'fill="var(--back)"' in text
        for colour in re.findall(r"--(?:back|ink|s0): (#\w+);", css):
            assert colour in text
    assert (ROOT / "docs" / "pictures" / "sizes.svg").stat().st_size < 150_000


def test_a_search_replaces_its_own_page_and_no_other_file(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    path, out, gemm = tmp_path / "archive.db", tmp_path / "demo.html", Gemm(64, 64, 64)
    with Archive(path) as archive:
        archive.append(trial("// other", 3.0, task=Gemm(32, 32, 32)))
        archive.append(trial("// 1", 1.25, "offline"))
    for _ in range(2):
        _write_page(out, path, [gemm], [ENDING])
        _require_replaceable(out)
    text = out.read_text()
    check_alone(text)
    (found,) = data(text)["sets"]
    assert re.findall("<li>(.*?)</li>", text)[0] == ENDING and "Not among these results" not in text
    assert column(found, "task") == ["64x64x64"] and column(found, "row") == [2]  # the trial's number in the archive
    assert f"the search as a page: {out}" in capsys.readouterr().err
    _write_page(tmp_path / "none.html", path, [Gemm(8, 8, 8)], [ENDING])
    assert "nothing of what was searched has been timed" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _write_page(tmp_path / "none.html", path, [gemm], [ENDING])
    assert "pip install 'cuda-l2[report]'" in capsys.readouterr().err and not (tmp_path / "none.html").exists()
    for text in ("mine", "<!doctype html><title>cuda-l2 report</title>"):
        out.write_text(text)
        with pytest.raises(UserError, match="--page"):
            _require_replaceable(out)
        _write_page(out, path, [gemm], [ENDING])
        assert out.read_text() == text


def test_correlations_have_intervals_and_ranks_ignore_scale() -> None:
    x = [float(2**at) for at in range(20)]
    by_rank = patterns.correlation(x, [at + 1.0 for at in range(20)], ranks=True)
    ours = patterns.correlation(x, [at + 1.0 for at in range(20)])
    assert by_rank and by_rank.estimate == pytest.approx(1)
    assert ours and ours.low < ours.estimate < ours.high < 1
    assert patterns.correlation(x[:5], x[:5]) is None and patterns.correlation(x, [1.0] * 20) is None


def test_a_kernel_that_is_launched_early_is_not_called_plain(tmp_path: Path) -> None:
    m = measured("64x64x64", 5, kernel="k", family="sm90_wave", schedule=(("BM", 64), ("EDGE", 1)))
    (study,) = studies(read([grid(tmp_path / "run", [Measurement(**{**vars(m), "kernels": ()})])]).cases)
    assert study.main[0].plain == "nn dependent"
    ((_, ratio),) = ratios(study.main, "cuBLAS", "nn")
    assert ratio.estimate == pytest.approx(12 / 5) and not ratios(study.main, "cuBLAS", "tn")


def test_swapped_operands_swap_the_tile(tmp_path: Path) -> None:
    m = measured("64x64x64", 5)
    schedule = (("SWAP", 1), *m.kernels[0].schedule[1:])
    kernels = tuple(KernelFigures(**{**vars(kernel), "schedule": schedule}) for kernel in m.kernels)
    row = Measurement(**{**vars(m), "kernels": kernels})
    (choice,) = patterns.choices(read([grid(tmp_path / "run", [row])]).cases)
    assert (choice.bm, choice.bn, choice.bk, choice.stages, choice.swizzle) == (128, 64, 64, 4, 8)


@pytest.mark.full
def test_ten_thousand_shapes_make_a_page_and_its_size_is_said(tmp_path: Path, capsys: Any) -> None:
    sides = [16 * at for at in range(1, 23)]
    shapes = itertools.islice(itertools.product(sides, repeat=3), 10_000)
    lines = [to_json(measured(f"{m}x{n}x{k}", 5 + m % 11)) for m, n, k in shapes]
    (tmp_path / "results.jsonl").write_text("\n".join([to_json(HEADER), *lines]))
    text = page(tmp_path, tmp_path)
    check_alone(text)
    (found,) = data(text)["sets"]
    assert len(set(column(found, "task"))) == 10_000 and "Roofline: 10,000 shapes" in text
    assert "more than 5 MB" in capsys.readouterr().err


@pytest.mark.full
def test_the_repositorys_results_make_a_page_under_5_mb_with_the_summarys_figures(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="tables of 1,000 shapes are Parquet")
    made = re.search(r"^REPORTED := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert made
    text = page(tmp_path, *(ROOT / each for each in made[1].split()))
    check_alone(text)
    assert len(text.encode()) < 5_000_000
    kept = (ROOT / "docs" / "report.html").read_text()
    check_alone(kept)
    assert tabled(text) == tabled(kept), "docs/report.html is of other results or an earlier program: make report"
    sets = data(text)["sets"]
    assert sum(len(column(each, "task")) for each in sets) == 4290
    (found,) = (
        each for each in sets if each["file"] == "h200/grid-fp32/table.parquet" and each["protocol"] == "offline"
    )
    speedups = column(found, "plain speedup")
    summary = (H200 / "grid-fp32" / "summary.md").read_text()
    row = re.search(r"\| all \| 1000 \| \+([\d.]+)% \| [\d.]+ \| ([\d.]+)% \| ([\d.]+)% \|", summary)
    assert row and f"{100 * (sum(speedups) / 1000 - 1):.2f}" == row[1]
    shown = re.search(rf"<th scope=\"row\">{label('cuBLASLt-AutoTuning', MAX)}</th>(.*?)</tr>", text, re.S)
    assert shown and [re.search(rf">{figure}%<", shown[1]) for figure in (row[2], row[3])].count(None) == 0
    assert re.search(r">0\.\d\d</text>", text)  # ticks keep their digits
    for said in (
        "Figure 4f",
        "K = 16384",
        "Cheats and mutants",
        "Learning curves",
        "llama-8b",
        "schedule:hopper.safetensors",
    ):
        assert said in text
    assert "date unknown" not in text and "unknown machine" not in text  # every caption has device and date


def tabled(text: str) -> list[Any]:
    """What a page says in tables, and its rows."""
    rows = {name: of for name, of in data(text).items() if name != "helps"}
    return [rows, *re.findall(r"<h[23]>(.*?)</h|<t[hd][^>]*>(.*?)</t", re.sub(r"<svg.*?</svg>", "", text, flags=re.S))]
