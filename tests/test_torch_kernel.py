"""Where no kernel wins, a search hands out torch's own product: called, saved and loaded as a kernel is, and it says why."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from default_kernel import GEMM, default_kernel, operands
from made import near, timing, trial
from test_product import close

import cuda_l2
from cuda_l2.build import cpu
from cuda_l2.library import saved
from cuda_l2.library.kernel import Kernel, TorchKernel
from cuda_l2.library.saved import TorchsOwn, torchs_best, why_no_win
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.baselines._base import product_baselines
from cuda_l2.optimizer import Result
from cuda_l2.records import Interval, Timing, TimingStatus
from cuda_l2.report.tables import ended, print_result, result_json
from cuda_l2.search import Progress
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import parse

BASELINES_US = {"torch fp16": 10.0, "torch widened": 12.0}
NAMES = [baseline.name for baseline in product_baselines("cpu")]


def reported(us: float, share: float = 0.01, protocol: str = "offline", **named):
    """A report of a kernel that takes this long, beside torch fp16 of 10 us."""
    times = timing(us, BASELINES_US, share, protocol=protocol)
    return trial("", protocol=protocol, timing=times, task=GEMM, **named)


@pytest.fixture(scope="module")
def own(target):
    kernel = default_kernel(GEMM, target)
    return {"candidate": kernel.candidate, "build": cpu.build(kernel.candidate, target), "machine": target.machine}


@pytest.fixture(params=NAMES)
def product(request) -> TorchKernel:
    return TorchKernel(TorchsOwn(GEMM, request.param, "it is slower", "cpu:x"))


@pytest.mark.parametrize(
    ("reports", "wins"),
    [
        ([reported(9.0)], True),
        ([reported(9.95)], False),  # 1.005 +- 0.01
        ([reported(13.4)], False),  # 0.746
        ([reported(9.0), reported(10.0, protocol="server")], True),  # a draw with cold caches
        ([reported(9.0), reported(11.0, protocol="server")], False),
        ([reported(11.0), reported(9.0, protocol="server")], False),
        ([], False),
    ],
)
def test_a_kernel_wins_where_the_interval_of_its_report_lies_above_1_and_below_it_in_none(reports, wins) -> None:
    assert (why_no_win(reports) == "") is wins


@pytest.mark.parametrize(
    ("us", "given"),
    [(10.0, "torch widened, preallocated"), (10.3, "torch widened, preallocated"), (12.0, "torch fp16")],
)
def test_what_keeps_its_buffers_is_handed_out_unless_another_is_surely_faster(us, given) -> None:
    times = timing(20.0, {"torch fp16": 10.0, "torch widened, preallocated": us}, 0.02)
    assert times.reference == "torch fp16" and torchs_best(GEMM, times) == given


@pytest.mark.parametrize(
    ("others", "given"),
    [
        ({"torch widened, preallocated": 10.0}, "torch widened, preallocated"),
        ({"torch fp16": 6.0, "torch widened, preallocated": 10.0}, "torch fp16"),
        ({}, "torch widened, preallocated"),
    ],
)
def test_what_ran_on_one_thread_is_not_handed_out(others, given) -> None:
    times = timing(20.0, {"torch widened, one thread": 5.0, **others}, 0.02)
    assert times.reference == "torch widened, one thread" and torchs_best(GEMM, times) == given


def test_an_interval_without_bounds_is_no_win() -> None:
    ratio = Interval(3.0, float("-inf"), float("inf"))
    found = reported(5.0)
    assert "its interval must lie above 1" in why_no_win([replace(found, timing=replace(found.timing, speedup=ratio))])


def test_a_result_that_does_not_win_hands_out_torchs_strongest_and_says_why(own, target, capsys) -> None:
    result = Result(GEMM, target, Progress(best=reported(13.4)), {"offline": reported(13.4, **own)}, None)
    assert isinstance(result.kernel, TorchKernel) and result.kernel is result.kernel
    assert result.kernel.name == "torch fp16" == result.handed_out and not result.wins
    why = "the best kernel found has 0.746 [0.739, 0.754] of the speed of torch fp16 (offline)"
    assert why in result.kernel.why_torch and why in repr(result.kernel)
    print_result(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"no kernel wins: {why}" in printed and "torch's own product (torch fp16) until a search finds" in printed
    fields = json.loads(result_json(result))
    assert fields["wins"] is False and fields["handed_out"] == "torch fp16" and why in fields["why_no_win"]


def test_a_result_that_wins_hands_out_its_kernel(own, target) -> None:
    result = Result(GEMM, target, Progress(), {"offline": reported(5.0, **own)}, None)
    assert isinstance(result.kernel, Kernel) and result.wins and result.kernel.why_torch == ""
    fields = json.loads(result_json(result))
    assert (fields["wins"], fields["handed_out"]) == (True, result.best.candidate.id)


def test_a_result_without_a_report_hands_out_torchs_product(own, target, capsys) -> None:
    progress = Progress(best=reported(5.0, protocol="search", **own))
    result = Result(GEMM, target, progress, {}, None, "offline: other work had the cores")
    assert isinstance(result.kernel, TorchKernel) and "other work had the cores" in result.kernel.why_torch
    print_result(result)
    assert "no report, so that no winner is confirmed" in capsys.readouterr().out
    assert ended(result).startswith(f"{GEMM}: no report") and ended(result).endswith(
        "offline: other work had the cores"
    )


def test_a_result_of_which_nothing_was_timed_hands_out_torchs_usual_product_and_says_so(target, tmp_path) -> None:
    """So that a list of results has something to call for each."""
    busy = Timing(TimingStatus.BUSY, "search", "threads waited for a core")
    none_timed = Progress()
    for number in range(2):
        none_timed.count(trial(str(number), timing=busy, task=GEMM), known=False)
    for progress, why in (
        (
            none_timed,
            "2 correct kernels, none timed: threads waited for a core; search again when the machine is quiet",
        ),
        (Progress(), "no correct kernel was found; search longer"),
    ):
        result = Result(GEMM, target, progress, {}, None)
        assert isinstance(result.kernel, TorchKernel) and why in result.kernel.why_torch and why in repr(result)
        assert result.handed_out == result.kernel.name == "torch widened, preallocated" and not result.wins
        a, b = operands()
        assert close(result.kernel(a, b), a, b)
        result.save(tmp_path / "torch.json")
        assert why in cuda_l2.load(tmp_path / "torch.json").why_torch


def test_an_interrupted_search_without_a_kernel_says_that_it_was_interrupted(target) -> None:
    early = Result(GEMM, target, Progress(interrupted=True), {}, None)
    assert ended(early) == f"{GEMM}: interrupted before a kernel was judged; the same command begins again"
    later = Result(GEMM, target, Progress(interrupted=True, proposed=2), {}, None)
    assert ended(later).startswith(f"{GEMM}: interrupted; no correct kernel among 2 candidates")


def test_what_has_no_kernel_and_is_no_product_of_the_cpu_cannot_be_called(target) -> None:
    for task, of in ((parse("softmax"), target), (GEMM, compile_only("sm_90a"))):
        with pytest.raises(UserError, match=f"there is no kernel for {task}: no correct kernel was found"):
            _ = Result(task, of, Progress(), {}, None).kernel


def test_a_result_is_printed_as_one_line_with_its_figures(own, target) -> None:
    reports = {name: reported(us, protocol=name, **own) for name, us in (("offline", 5.0), ("server", 8.0))}
    assert repr(Result(GEMM, target, Progress(), reports, None)) == (
        f"<Result for 70x50x90:tn: kernel {own['candidate'].id} has 2.000 [1.980, 2.020] of the speed of torch fp16"
        " (offline); 1.250 [1.238, 1.262] of the speed of torch fp16 (server)>"
    )
    lost = repr(Result(GEMM, target, Progress(), {"offline": reported(13.4, **own)}, None))
    assert (
        lost.startswith("<Result for 70x50x90:tn: no kernel wins: the best kernel found has 0.746 [")
        and "int " not in lost
    )


def test_the_product_is_called_as_a_kernel_is(product) -> None:
    a, b = operands()
    out = torch.full((70, 50), torch.nan).half()
    assert product(a, b, out) is out and close(out, a, b)
    assert torch.equal(product(a, b), out) and torch.equal(product(a, b, out=out), out)
    with torch.inference_mode():
        assert close(product(*(each.clone(memory_format=torch.preserve_format) for each in (a, b))), a, b)
    with torch.no_grad():
        assert close(product(a, torch.nn.Parameter(b), out), a, b)
    for unfit in ((a.float(), b), (a[:69], b), (a, b.contiguous()), (a, b, out.float()), (a, b, a[:, :50])):
        with pytest.raises(ValueError, match="must be"):
            product(*unfit)
    with pytest.raises(TypeError, match="a must be a torch tensor"):
        product(None, b)


def test_an_ordinary_call_takes_the_short_way(product, monkeypatch) -> None:
    monkeypatch.setattr(product, "_careful_call", None)
    a, b = operands()
    assert close(product(a, b), a, b) and close(product(a, b, torch.empty(70, 50).half()), a, b)
    with torch.no_grad():
        assert close(product(a, torch.nn.Parameter(b)), a, b)


def test_what_is_out_of_the_ordinary_is_refused_as_by_a_kernel(product) -> None:
    a, b = operands()
    both = torch.zeros(70 * 90 + 70 * 50).half()
    for unfit in (
        (both[: 70 * 90].view(70, 90), b, both[: 70 * 50].view(70, 50)),
        (torch.zeros(70 * 90 + 1).half()[1:].view(70, 90), b),
        (a.to_sparse(), b),
        (a.to("meta"), b),
    ):
        with pytest.raises(ValueError, match=r"must be|must begin"):
            product(*unfit)
    with pytest.raises(ValueError, match="out must be left out"):
        product(a.requires_grad_(), b, torch.empty(70, 50).half())


def test_a_saved_product_holds_a_name_and_the_reason_and_no_code(product, tmp_path) -> None:
    path = tmp_path / "torch.json"
    product.save(path)
    fields = json.loads(path.read_text())
    assert fields.keys() == {"format", "task", "machine", "baseline", "why", "sha256"}
    a, b = operands()
    for again in (cuda_l2.load(path), pickle.loads(pickle.dumps(product))):
        assert isinstance(again, TorchKernel) and torch.equal(again(a, b), product(a, b))
        assert (again.name, again.why_torch) == (product.name, "it is slower")
    assert copy.deepcopy(product) is product
    with pytest.raises(UserError, match=r"no kernel to export.*it is slower; call .* of torch"):
        product.export(tmp_path)


@pytest.mark.parametrize("name", ["torch fp32", "os.system", "cuBLAS TN", "torch eager"])
def test_a_file_that_names_another_function_is_refused(tmp_path, name) -> None:
    path = tmp_path / "torch.json"
    path.write_text(saved.to_text(TorchsOwn(GEMM, name, "", "")))
    with pytest.raises(UserError, match=r"no baseline|no product of torch on the CPU"):
        cuda_l2.load(path)


def test_what_a_call_costs_beside_the_product_is_told(product) -> None:
    assert product.call_overhead_us > 0


def test_a_shape_loads_torchs_product_until_a_search_finds_a_winner(own, archive) -> None:
    def load() -> Kernel | TorchKernel:
        return cuda_l2.load("70x50x90:tn", archive=archive.path)

    archive.append(reported(5.0, protocol="search", **own))
    assert isinstance(load(), TorchKernel) and "no kernel was timed beside all baselines" in load().why_torch
    archive.append(reported(13.4, created="2026-01-01T00:00:00", **own))
    assert load().name == "torch fp16" and "0.746" in load().why_torch
    archive.append(reported(5.0, created="2026-01-02T00:00:00", **own))
    assert isinstance(load(), Kernel)
    archive.append(reported(9.0, protocol="server", created="2026-01-02T00:00:01", **own))
    assert isinstance(load(), Kernel)
    archive.append(reported(12.0, protocol="server", created="2026-01-03T00:00:00", **own))
    assert "(server)" in load().why_torch


def test_the_latest_report_decides_between_two_kernels(own, archive) -> None:
    other = replace(own["candidate"], source=own["candidate"].source + "\n")
    archive.append(reported(5.0, created="2026-01-01T00:00:00", **own))
    archive.append(
        reported(8.0, created="2026-01-02T00:00:00", **own | {"candidate": other})
    )  # chosen beside the first
    assert cuda_l2.load(GEMM, archive=archive.path).candidate.id == other.id
    slower = replace(
        reported(8.0, **own), timing=replace(reported(8.0).timing, speedup=near(0.9)), created="2026-01-03"
    )
    archive.append(slower)
    assert isinstance(cuda_l2.load(GEMM, archive=archive.path), TorchKernel)
