"""The examples of docs/contract.md do what it says of them."""

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import example

from cuda_l2 import contract
from cuda_l2.archive import Archive
from cuda_l2.build.cuda import build_all
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import families_for
from cuda_l2.library.table import PLAIN, PROGRAMMATIC, Row
from cuda_l2.llm._base import Message, open_model
from cuda_l2.llm.client import Client, Question
from cuda_l2.llm.exchanges import ExchangeLog
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.quick import Sampled
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, Layout
from cuda_l2.system.errors import UserError

EXAMPLES = Path(__file__).parents[1] / "examples"
INSTRUCTION = {"mma_sync": "HMMA.16816.F32", "wgmma_tma": "HGMMA.64x64x16.F32", "cute_tma": "HGMMA.64x128x16.F32"}


@pytest.mark.parametrize("name", INSTRUCTION)
def test_an_example_compiles_to_what_it_shows(name) -> None:
    """CuTe leaves thousands of variables that no code names: not state."""
    candidate = Candidate((EXAMPLES / f"{name}.cu").read_text())
    (build,) = build_all([candidate], compile_only("sm_90a"))
    assert build.status is BuildStatus.BUILT, build.reason
    (kernel,) = build.kernels
    assert kernel.tensor_instructions == (INSTRUCTION[name],)
    assert kernel.spill_bytes == 0


def test_every_example_has_a_plan_and_is_named_in_the_specification() -> None:
    specification = (EXAMPLES.parent / "docs" / "contract.md").read_text()
    files = sorted(EXAMPLES.glob("*.cu"))
    assert len(files) == 3
    for file in files:
        assert file.name in specification
        found = contract.parse_cuda(file.read_text())
        plan = found.plan(Gemm(200, 104, 72, Layout(found.layouts[0])), 132)
        assert plan.launches[0].grid[0] * plan.launches[0].grid[1] > 1


@pytest.fixture
def tool():
    return example("compare_kernels")


def row_of_the_wave_family(target) -> Row:
    gemm = Gemm(256, 256, 2048)
    family = next(family for family in families_for(gemm, target) if family.name == "sm90_wave")
    values = zip((choice.name for choice in family.choices), family.default(gemm, target), strict=True)
    return Row(gemm, PLAIN, family.name, tuple({**dict(values), "EDGE": 0}.items()), 4.0)


def test_another_folder_renders_source_and_contract(tool, tmp_path) -> None:
    target = compile_only("sm_90a")
    row = row_of_the_wave_family(target)
    copy = tmp_path / "families"
    shutil.copytree(tool.ORIGINAL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert [each.source for each in tool.edited([row], target, copy)] == [row.candidate(target).source]
    operands, wave = copy / "sm90_operands.cuh", copy / "sm90_wave.py"
    operands.write_text(operands.read_text() + "// edited\n")
    wave.write_text(wave.read_text().replace('kernel = "gemm"', 'kernel = "other"'))
    (changed,) = tool.edited([row], target, copy)
    back = changed.source.replace("// edited\n", "").replace('kernel = "other"', 'kernel = "gemm"')
    assert back == row.candidate(target).source and changed.source.count("edited") == 1
    rows = [row, Row(row.gemm, PROGRAMMATIC, *(row.family, row.schedule, 3.0))]
    assert tool.sampled(rows, 5, 0, PLAIN) == [row]
    assert "| sm90_wave | 24-27 | 2 | 1.0392 | 1.0400 | 1.0000 | 1.0800 |" in tool.table([(row, 1.0), (row, 1.08)])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (('["map_x", "map_y"]', '["map_x", "map_z"]'), "families, 256x256x2048, sm90_wave: "),
        (("from types import SimpleNamespace", "from types import Nothing"), "does not render a row: ImportError"),
    ],
)
def test_a_folder_that_launches_nothing_is_known_before_anything_is_built(tool, tmp_path, edit, said) -> None:
    target, copy = compile_only("sm_90a"), tmp_path / "families"
    shutil.copytree(tool.ORIGINAL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    wave = copy / "sm90_wave.py"
    assert wave.read_text().count(edit[0]) == 1
    wave.write_text(wave.read_text().replace(*edit))
    with pytest.raises(UserError, match=said):
        next(tool.compare([row_of_the_wave_family(target)], [copy], target, cold=False))


class Servers:
    """Build servers to which every kernel is built."""

    def __init__(self, target) -> None:
        self.closed = False

    def build(self, candidates):
        return (Build(candidate.id, BuildStatus.BUILT, artifact="kernel.cubin") for candidate in candidates)

    def close(self) -> None:
        self.closed = True


class Timer:
    """A timer by which the second folder's kernels take half as long, and that Ctrl-C reaches at its third shape."""

    def __init__(self, *_, **__) -> None:
        self.shapes = 0

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def time(self, gemm, items):
        self.shapes += 1
        if self.shapes == 3:
            raise KeyboardInterrupt
        return [Sampled(final=[us, 0.0]) for us in (4.0, 2.0)[: len(items)]]


def test_an_interrupted_comparison_shows_every_shape_and_the_table_so_far(tool, monkeypatch, tmp_path, capsys) -> None:
    made = []
    monkeypatch.setattr(tool, "BuildServers", lambda target: made.append(Servers(target)) or made[0])
    monkeypatch.setattr(tool, "QuickTimer", Timer)
    monkeypatch.setattr(tool, "machine_lock", contextlib.nullcontext)
    monkeypatch.setattr(tool, "bus_id", str)
    monkeypatch.setattr(tool.cuda, "detect", lambda: compile_only("sm_90a"))
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    lean = tmp_path / "lean"
    shutil.copytree(tool.ORIGINAL, lean, ignore=shutil.ignore_patterns("__pycache__"))
    table = EXAMPLES.parent / "results" / "h200" / "schedules.csv"
    monkeypatch.setattr("sys.argv", ["compare_kernels", str(lean), "--table", str(table), "--sample", "4"])
    assert tool.main() == 130
    said = capsys.readouterr()
    first, *shapes, last = said.err.splitlines()
    assert first == "8 shapes to compare, 16 kernels to build" and "interrupted" in last
    assert [line.partition(":")[0] for line in shapes] == ["1 of 8", "2 of 8"]
    assert all(line.endswith(f"{lean} 2.0000") for line in shapes)
    assert "| all | all | 2 | 2.0000 |" in said.out and made[0].closed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mma_sync", "100x333x77"), ("wgmma_tma", "200x104x72:tn"), ("cute_tma", "200x104x72:tn")],
)
def test_an_example_is_right(gpu, name, shape) -> None:
    with Evaluator(Gemm.parse(shape), gpu) as evaluator:
        (trial,) = evaluator.evaluate([Candidate((EXAMPLES / f"{name}.cu").read_text())])
    assert trial.status == "measured", trial.reason


def test_simulated_workers_lose_nothing_and_take_up_what_dead_ones_held(database, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    scale = example("scale")
    settings = scale.Settings(
        database, workers=6, searches=1, seconds=1.0, median_s=0.01, lease_s=0.5, dying=0.5, recorded_s=[]
    )
    counts = scale.Search(settings, 0).run(6, threading.Barrier(6))
    with Archive(database, reading=True) as archive:
        assert len(archive.trials()) == counts.acknowledged
        assert scale.recorded(database) == [trial.build.seconds for trial in archive.trials()]
    table = dict(scale.rows(settings, [counts], counts.acknowledged, counts.acknowledged))
    assert table["acknowledged and not stored"] == "0"


def test_every_simulated_search_has_a_worker(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    scale = example("scale")
    assert scale.shares(9, 4) == [3, 2, 2, 2] and scale.shares(3, 4) == [1, 1, 1]
    monkeypatch.setattr("sys.argv", ["scale.py", "--workers", "0"])
    with pytest.raises(SystemExit, match="2"):
        scale.main()
    assert "at least 1 worker" in capsys.readouterr().err


def test_a_person_answers_what_a_model_is_asked(tmp_path) -> None:
    """Through the client of the searches. An answer that is there before its question is sent at once."""
    tool, settings = example("answer_by_hand"), ModelSettings(retries=0, answer_tokens=200)
    for number, text in enumerate(("first", "second"), start=1):
        (tmp_path / f"{number:03}.answer.md").write_text(text)
    with (
        tool.Endpoint(tmp_path, 0) as endpoint,
        Archive(tmp_path / "archive.db"),
        ExchangeLog(tmp_path / "archive.db") as log,
    ):
        assert endpoint.server_address[0] == "127.0.0.1"
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        try:
            client = Client(
                open_model(f"openai:by-hand@http://127.0.0.1:{endpoint.server_port}/v1", settings), log, settings
            )
            questions = [Question((Message("system", "you"), Message("user", text))) for text in ("one", "two")]
            found = [client.ask("64x64x64", "m", [asked], time.perf_counter() + 3600)[0] for asked in questions]
        finally:
            endpoint.shutdown()
    assert [exchange.reply.text for exchange in found] == ["first", "second"]
    assert [(tmp_path / f"{number:03}.ask.md").read_text() for number in (1, 2)] == [
        f"=== system\n\nyou\n\n=== user\n\n{text}\n" for text in ("one", "two")
    ]


def test_a_picture_that_cannot_be_made_is_one_line(tmp_path) -> None:
    program = [sys.executable, EXAMPLES / "picture.py"]
    for arguments, says in (([], "a file for the picture"), ([tmp_path / "none" / "x.svg", "title"], "No such file")):
        done = subprocess.run([*program, *arguments], input="shown", capture_output=True, text=True, check=False)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and says in done.stderr


@pytest.mark.parametrize("program", ["miniature/run.py", "pretrained/train.py"])
def test_a_file_where_a_folder_goes_is_one_line(program, tmp_path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    words = [sys.executable, EXAMPLES / program, "--out", taken]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and str(taken) in done.stderr
