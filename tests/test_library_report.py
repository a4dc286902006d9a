"""Tables of a library's kernels over many shapes: which kernel stands for a comparison, and against what."""

from dataclasses import replace

import pytest
from made import near, timing

from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.report import library
from cuda_l2.report.grid import rows
from cuda_l2.report.grid_summary import summary
from cuda_l2.runs.results import Header, KernelFigures, Measurement

BASELINES = {"cuBLASLt-AutoTuning NN": 12.0, "cuBLASLt-AutoTuning TN": 10.0, "cuBLAS NN": 30.0}
TIMES = {
    (Layout.NN, False): (8.0, 8.5),  # selected, then measured
    (Layout.TN, False): (9.0, 8.0),
    (Layout.NN, True): (6.0, 6.5),
    (Layout.TN, True): (7.0, 5.0),
}


def measured(
    shape: str, times: dict[tuple[Layout, bool], tuple[float, float]], baselines: dict[str, float] = BASELINES
) -> Measurement:
    kernels = tuple(
        KernelFigures(
            layout,
            dependent,
            kernel=f"{layout}{int(dependent)}",
            family="sm90_wave",
            schedule=(("BM", 64),),
            selected_us=selected,
            latency_us=near(us, 0.01),
            speedups=tuple((name, near(theirs / us, 0.01)) for name, theirs in baselines.items()),
        )
        for (layout, dependent), (selected, us) in times.items()
    )
    times = timing(kernels[0].latency_us.estimate, baselines, 0.01)
    return Measurement(Gemm.parse(shape), "offline", "measured", timing=times, kernels=kernels)


def test_shapes_that_fp16_sums_win_are_named_with_their_error() -> None:
    m = measured("64x64x64:fp16", TIMES)
    kernels = [replace(kernel, max_difference=0.4) for kernel in m.kernels]
    kernels[0] = replace(kernels[0], schedule=(("ACC", 16),))  # the plain one that was selected
    text = "\n".join(library.lines("offline", [replace(m, kernels=tuple(kernels)), measured("64x64x128:fp16", TIMES)]))
    assert "sums in fp16 serve 1 of 2 shapes as plain launches, and win 1" in text
    assert "64x64x64:fp16 1.176 5.00%." in text  # 10 over 8.5 us; 0.4 over sqrt(64)
    assert "sums in fp16" not in "\n".join(library.lines("offline", [m]))
    row = library.cells(replace(m, kernels=tuple(kernels)))
    assert row["nn_plain.sum_bits"] == 16 and row["nn_plain.relative_error"] == 0.05


def test_a_run_without_tuned_baselines_has_a_summary() -> None:
    text = "\n".join(library.lines("offline", [measured("64x64x64", TIMES, {"cuBLAS NN": 30.0, "cuBLAS TN": 20.0})]))
    assert "over our plain ones: the fastest of all baselines 2.353." in text  # 20 over 8.5 us
    assert "| cuBLAS | 1 |" in text and "cuBLASLt-AutoTuning" not in text
    assert "the lowest of the plain launches: 64x64x64 2.353." in text


def test_the_kernel_selected_stands_for_the_shape_not_the_one_that_was_lucky_in_the_report() -> None:
    m = measured("64x64x64", TIMES)
    for dependent, layout, us in ((False, Layout.NN, 8.5), (True, Layout.NN, 6.5)):
        kernel = library.chosen(m, dependent=dependent)
        assert kernel and (kernel.layout, kernel.latency_us.estimate) == (layout, us)
    alone = library.chosen(m, Layout.TN, dependent=False)
    assert alone and alone.latency_us.estimate == 8.0


def test_the_baseline_is_the_fastest_of_the_run_or_of_the_layout_asked_for() -> None:
    m = measured("64x64x64", TIMES)
    kernel = library.chosen(m, dependent=False)
    either, alike = library.ratio(m, kernel), library.ratio(m, kernel, layout=Layout.NN)
    assert either and either.estimate == pytest.approx(10 / 8.5)
    assert alike and alike.estimate == pytest.approx(12 / 8.5)
    assert library.ratio(m, kernel, lambda baseline: baseline.kind == "torch.matmul") is None


def test_what_a_search_found_is_no_autotuned_baseline() -> None:
    m = measured("64x64x64", TIMES, BASELINES | {"cuBLASLt-brute NN": 5.0})
    kernel = library.chosen(m, dependent=False)
    found, strongest = library.ratio(m, kernel), library.ratio(m, kernel, library.any_of_them)
    assert found and found.estimate == pytest.approx(10 / 8.5)
    assert strongest and strongest.estimate == pytest.approx(5 / 8.5)


def test_the_fp16_class_meets_the_faster_of_both_autotuned_classes() -> None:
    baselines = BASELINES | {"cuBLASLt-AutoTuning-32F NN": 9.0, "cuBLASLt-AutoTuning-32F TN": 9.5}
    m = measured("64x64x64:fp16", TIMES, baselines)
    assert m.gemm.accumulate is Accumulate.FP16
    kernel = library.chosen(m, dependent=False)
    found = library.ratio(m, kernel)
    assert found and found.estimate == pytest.approx(9.0 / 8.5)
    alone = library.ratio(m, kernel, lambda baseline: baseline.kind == "cuBLASLt-AutoTuning")
    assert alone and alone.estimate == pytest.approx(10.0 / 8.5)


def test_the_summary_tells_means_wins_and_losses_by_size() -> None:
    slow = dict.fromkeys(TIMES, (20.0, 20.0))
    text = summary(Header("gpu", {}, {}), [measured("64x64x64", TIMES), measured("8192x8192x8192", slow)])
    assert "| <= 23 | 1 | +17.65% |" in text and "| >= 34 | 1 | -50.00% |" in text
    assert "| all | 2 | -16.18% |" in text
    assert "2 shapes, 4 distinct kernels" in text
    assert "8192x8192x8192 0.500, 64x64x64 1.176" in text


def test_a_row_holds_every_kernel_with_its_schedule() -> None:
    (row,) = rows(Header("gpu", {}, {}), [measured("64x64x64", TIMES)])
    assert row["plain_kernel"] == "nn plain" and row["any_launch_kernel"] == "nn dependent"
    assert row["plain_us"] == 8.5 and row["any_launch_us"] == 6.5
    assert row["tn_dependent_us"] == 5.0 and row["tn_dependent_schedule"] == "BM=64"
    assert row["nn_plain_speedup_same_layout"] == pytest.approx(12 / 8.5)
