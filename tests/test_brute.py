"""The search among cuBLASLt's configurations: numbers of its header, its space, the order of tries, what is reported."""

import math
import os
import re
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clocks import ticking
from cuda.bindings import driver

from cuda_l2.machine.cuda.driver import DriverError
from cuda_l2.measure import brute as brute_search
from cuda_l2.measure import configurations, cublas, graph_rounds
from cuda_l2.measure.baselines._base import all_baselines, beginning, named, product_baselines
from cuda_l2.measure.baselines.cublaslt_brute import KIND
from cuda_l2.measure.brute import FINALISTS, Found, find
from cuda_l2.measure.configurations import (
    COMPUTE_TYPE,
    LEAST_K,
    LIBRARYS_SPLIT,
    Capabilities,
    Configuration,
    Space,
)
from cuda_l2.measure.cublas import AlgoCap, AlgoConfig, Algorithm, Cublas, LtProduct
from cuda_l2.measure.graph_rounds import GraphRounds
from cuda_l2.measure.launches import Buffers
from cuda_l2.measure.libraries import Libraries
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import CUDA_PROTOCOLS, brief
from cuda_l2.measure.selection import Selection
from cuda_l2.measure.tuned import Tuned, TunedLayout
from cuda_l2.records import Accumulate, Arm, Gemm, Interval, Layout, Timing, TimingStatus
from cuda_l2.report import brute, grid, grid_summary
from cuda_l2.report.arms import arms_of
from cuda_l2.rigs import Request, open_rig
from cuda_l2.runs import settings
from cuda_l2.runs.grid import chosen, log2_mnk, read_grid, sample
from cuda_l2.runs.results import RESULTS, Header, KernelFigures, Measurement, ResultsFile
from cuda_l2.runs.settings import SweepSettings
from cuda_l2.runs.sweep import Sweep
from cuda_l2.system.errors import EndOfRunError, MachineError, UserError
from cuda_l2.system.steps import current

SHAPES = Path(__file__).parents[1] / "results" / "h100" / "brute" / "shapes.txt"
LARGE = Capabilities(66, tuple(range(7, 40)), (35,), True, 7, 1, 7)
SMALL = Capabilities(7, (), (), False, 0, 0, 0)


def header() -> Path | None:
    """cublasLt.h beside torch's libraries or of an installed toolkit."""
    roots = [Path(sysconfig.get_path("purelib")) / "nvidia"]
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots.append(Path("/usr/local/cuda"))
    return next((path for root in roots if root.is_dir() for path in root.rglob("cublasLt.h")), None)


def test_numbers_are_those_of_the_librarys_header() -> None:
    path = header()
    if not path:
        pytest.skip("no cublasLt.h here: install a CUDA toolkit, or set CUDA_HOME")
    found = re.findall(r"(CUBLASLT_\w+) = (0x[0-9a-f]+|\d+),", path.read_text())
    numbers = {name: int(value, 0) for name, value in found}
    config = {
        AlgoConfig.ID: "ID",
        AlgoConfig.TILE: "TILE_ID",
        AlgoConfig.SPLIT_K: "SPLITK_NUM",
        AlgoConfig.REDUCTION: "REDUCTION_SCHEME",
        AlgoConfig.SWIZZLE: "CTA_SWIZZLING",
        AlgoConfig.CUSTOM_OPTION: "CUSTOM_OPTION",
        AlgoConfig.STAGES: "STAGES_ID",
        AlgoConfig.INNER_SHAPE: "INNER_SHAPE_ID",
        AlgoConfig.CLUSTER: "CLUSTER_SHAPE_ID",
    }
    assert {each: numbers[f"CUBLASLT_ALGO_CONFIG_{name}"] for each, name in config.items()} == {
        each: int(each) for each in AlgoConfig
    }
    caps = {
        AlgoCap.SPLIT_K: "SPLITK_SUPPORT",
        AlgoCap.REDUCTIONS: "REDUCTION_SCHEME_MASK",
        AlgoCap.SWIZZLE: "CTA_SWIZZLING_SUPPORT",
        AlgoCap.TILES: "TILE_IDS",
        AlgoCap.CUSTOM_OPTION_MAX: "CUSTOM_OPTION_MAX",
        AlgoCap.STAGES: "STAGES_IDS",
    }
    assert {each: numbers[f"CUBLASLT_ALGO_CAP_{name}"] for each, name in caps.items()} == {
        each: int(each) for each in AlgoCap
    }
    schemes = {"NONE": "none", "INPLACE": "in place", "COMPUTE_TYPE": "compute type", "OUTPUT_TYPE": "output type"}
    assert {numbers[f"CUBLASLT_REDUCTION_SCHEME_{name}"]: said for name, said in schemes.items()} == cublas.REDUCTIONS
    clusters = {value for name, value in numbers.items() if name.startswith("CUBLASLT_CLUSTER_SHAPE_")}
    assert clusters == set(configurations.CLUSTERS)
    inner = {value for name, value in numbers.items() if name.startswith("CUBLASLT_MATMUL_INNER_SHAPE_")}
    assert inner == set(configurations.INNER_SHAPES)


# the space


def size(space: Space) -> int:
    """Number of configurations, existing or not."""
    return sum(math.prod(map(len, values.values())) for values in space._values.values())


def test_no_configuration_rounds_parts_of_sums() -> None:
    space, rng = Space([LARGE, SMALL], 4096), np.random.default_rng(0)
    drawn = [space.draw(space.ids, rng) for _ in range(2000)]
    drawn += space.neighbours(Configuration(66, 20, 35))
    assert {(each.split_k > 1 or each.split_k < 0, each.reduction) for each in drawn} == {
        (False, configurations.NO_REDUCTION),
        (True, COMPUTE_TYPE),
    }


def test_an_algorithm_that_reduces_in_the_output_type_alone_is_not_split() -> None:
    space = Space([replace(LARGE, reductions=5)], 4096)
    assert {each.split_k for each in space.neighbours(Configuration(66, 20, 35))} == {1}


def test_parts_of_a_split_have_some_k() -> None:
    splits = {each.split_k for each in Space([LARGE], 4 * LEAST_K).neighbours(Configuration(66, 20, 35))}
    assert splits == {1, 2, 3, 4, LIBRARYS_SPLIT}


def test_neighbours_differ_in_one_attribute_and_are_all_there() -> None:
    space, middle = Space([LARGE], 64), Configuration(66, 20, 35, cluster=5)
    near = list(space.neighbours(middle))
    fields = {
        tuple(name for name in Configuration.__slots__ if getattr(each, name) != getattr(middle, name)) for each in near
    }
    assert fields == {
        *(("tile",), ("swizzle",), ("custom_option",), ("inner_shape",), ("cluster",), ("split_k", "reduction"))
    }
    # tiles, splits, swizzle, custom options, inner shapes, clusters
    assert len(near) == len(set(near)) == 32 + 1 + 1 + 7 + 4 + 50
    assert size(space) == 33 * 2 * 2 * 8 * 5 * 51


def test_draws_are_repeated_by_their_seed_and_reach_every_value() -> None:
    space = Space([LARGE, SMALL], 64)
    first, second = ([space.draw(space.ids, rng) for _ in range(3000)] for rng in map(np.random.default_rng, (3, 3)))
    assert first == second
    for name, values in (("tile", {0, *LARGE.tiles}), ("cluster", set(configurations.CLUSTERS))):
        assert {getattr(each, name) for each in first} == values


# through the library's calls


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """fp16 and bf16 products on a library that says what it may be asked."""
    path = tmp_path_factory.mktemp("fake") / "libcublasLt.so"
    source = Path(__file__).with_name("fake_cublaslt_configurations.c")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas, "file_name", lambda library: str(path))
        cublas.libraries.cache_clear()
        blas = Cublas(0, 256 << 20)
        yield lambda text: LtProduct(blas, Gemm.parse(text), Gemm.parse(text).layout)
        blas.close()
    cublas.libraries.cache_clear()


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("64x64x64", [68, 0, 2, 2, 2, 2]),
        ("64x64x64:tn:bf16", [68, 0, 14, 14, 14, 14]),
        ("64x64x64:fp16", [64, 2, 2, 2, 2, 2]),
    ],
)
def test_algorithms_are_asked_for_by_the_products_types(product, text, types) -> None:
    made = product(text)
    assert made.algorithm_ids() == [66, 7, 9]
    assert list((cublas.ctypes.c_int * 6).in_dll(cublas.libraries()[1], "types")) == types


def test_capabilities_are_read(product) -> None:
    made = product("64x64x64")
    assert made.capabilities(66) == Capabilities(66, (20, 24, 31), (35,), True, 7, 1, 3)
    assert made.capabilities(7) == SMALL
    assert made.capabilities(9) is None


def test_what_is_set_is_what_the_algorithm_has(product) -> None:
    asked = Configuration(66, 24, 35, 4, COMPUTE_TYPE, 1, 3, 0, 5)
    made = product("64x64x1024").configured(asked)
    assert made and made.configuration == asked
    assert (made.reduction, made.workspace_bytes) == ("compute type", 4096)
    stream_k = replace(asked, split_k=LIBRARYS_SPLIT)
    again = product("64x64x1024").configured(stream_k)
    assert again and again.configuration == stream_k


@pytest.mark.parametrize("change", [{"cluster": 4}, {"inner_shape": 1}, {"reduction": 0}, {"split_k": 8}, {"id": 9}])
def test_what_the_library_refuses_or_has_no_workspace_for_is_none(product, change) -> None:
    asked = Configuration(66, 24, 35, 4, COMPUTE_TYPE, cluster=5)
    assert product("64x64x1024").configured(asked)
    assert product("64x64x1024").configured(replace(asked, **change)) is None


# the order of tries


def algorithm(configuration: Configuration, **changes: object) -> Algorithm:
    """One whose descriptor says its configuration."""
    asked = configuration
    data = repr(configuration).encode()
    values = {name: getattr(asked, name) for name in Configuration.__slots__} | {
        "reduction": cublas.REDUCTIONS[asked.reduction],
        "data": (data.hex() + "00" * 64)[-2 * 64 :]
        if len(data) < 64
        else np.random.default_rng(list(data)).bytes(64).hex(),
        "workspace_bytes": 0,
        "waves": 1.0,
    }
    return Algorithm(**values | changes)


def cost(found: Algorithm) -> float:
    """Microseconds: the least at tile 31, cluster 9, custom option 6."""
    return 10.0 + abs(found.tile - 31) + (found.cluster != 9) + abs(found.custom_option - 6)


SEEDS = [algorithm(Configuration(66, 20, 35, cluster=5)), algorithm(Configuration(66, 12, 35, cluster=3))]


def run(within_s: float = 1.0, *, check=algorithm, time_us=cost, seeds=SEEDS, space=None) -> Found:
    space = space or Space([LARGE, SMALL], 64)
    return find(space, seeds, check, time_us, within_s, np.random.default_rng(0), ticking())


def test_the_best_of_a_large_space_is_found_in_few_tries() -> None:
    found = run()
    us, _, best = found.ranked[0]
    assert (us, best.tile, best.cluster, best.custom_option) == (10.0, 31, 9, 6)
    assert len(found.tried) < 0.05 * size(Space([LARGE, SMALL], 64))


def test_what_the_heuristic_returned_comes_first_however_short_the_time() -> None:
    timed: list[Algorithm] = []

    def time_us(found: Algorithm) -> float:
        timed.append(found)
        return cost(found)

    found = run(1e-9, time_us=time_us)
    assert timed == SEEDS and found.valid == len(found.tried) == 2


def test_the_time_is_kept() -> None:
    short, long = run(0.05), run(0.5)
    assert len(short.tried) < len(long.tried) < 600


def test_wrong_and_refused_configurations_are_counted_and_never_lead() -> None:
    def time_us(found: Algorithm) -> float:
        return float("inf") if found.tile == 31 else cost(found)

    found = run(check=lambda asked: None if asked.cluster == 9 else algorithm(asked), time_us=time_us)
    assert found.wrong and found.wrong + len(found.ranked) == found.valid < len(found.tried)
    assert not [each for *_, each in found.ranked if each.tile == 31 or each.cluster == 9]
    assert found.ranked == sorted(found.ranked, key=lambda each: each[:2])


def test_what_rounds_parts_of_sums_is_not_even_timed() -> None:
    found = run(check=lambda asked: algorithm(asked, reduction="output type"), seeds=SEEDS[:1])
    assert found.valid == 1 and len(found.tried) > 100


def test_a_small_space_is_tried_to_its_end() -> None:
    space = Space([SMALL], 64)
    found = run(1e9, seeds=[], space=space, time_us=lambda each: 1.0 + each.cluster)
    assert len(found.tried) == size(space) == len(found.ranked)
    assert len(found.ranked[:FINALISTS]) == FINALISTS


def test_a_library_without_algorithms_ends_at_once() -> None:
    assert run(1e9, seeds=[], space=Space([], 64)).tried == set()


class ScriptedTuner:
    """Times by algorithm; each launch that is timed writes its descriptor down."""

    def __init__(self, product: LtProduct) -> None:
        self.product, self.last, self.final = product, None, []

    def launcher(self, chosen: Algorithm):
        def launch(stream: int, *addresses: int) -> None:
            self.last = chosen

        return launch

    def quick(self, enqueue, launches: int) -> float:
        enqueue(0)
        return cost(self.last)

    def by_replays(self, enqueues, heat_s: float) -> Selection:
        for enqueue in enqueues:
            enqueue(0)
            self.final.append(self.last)
        times = tuple(cost(each) for each in self.final)
        return Selection(times.index(min(times)), times, (3,) * len(times), 0.0)


def searched(product, monkeypatch, returned: list[Algorithm], right, faults: Path):
    """What a search finds on the made library, and the tuner that timed it. right: of an algorithm and launches."""
    made = product("64x64x1024")
    tuner = ScriptedTuner(made)
    monkeypatch.setattr(made, "launcher", tuner.launcher)
    tuned = TunedLayout(tuple(returned), ("k",) * len(returned), (20.0,) * len(returned), (3,) * len(returned), 0, 0.0)

    def looks(launch, launches: int) -> bool:
        launch(0, 0, 0, 0, 0)
        return right(tuner.last, launches)

    return brute_search.search(made, 1024, tuned, tuner, Buffers(0, 0, 0, 0), looks, 0.3, faults, ticking()), tuner


def test_the_heuristics_best_is_timed_beside_the_finalists(product, monkeypatch, tmp_path) -> None:
    faults = tmp_path / "faults.txt"
    first = product("64x64x1024").configured(Configuration(66, 20, 35, cluster=3))
    found, tuner = searched(product, monkeypatch, [first], lambda *_: True, faults)
    assert found and (found.algorithm.tile, found.algorithm.custom_option, found.returned) == (31, 3, False)
    assert first in tuner.final and len(tuner.final) == FINALISTS + 1
    assert found.us == cost(found.algorithm) and found.tried > found.valid > found.wrong == 0
    found, _ = searched(product, monkeypatch, [found.algorithm], lambda *_: True, faults)
    assert found and found.returned


def test_a_search_gives_what_is_right_or_nothing(product, monkeypatch, tmp_path) -> None:
    faults = tmp_path / "faults.txt"
    made = product("64x64x1024")
    first = made.configured(Configuration(66, 20, 35, cluster=3))
    found, tuner = searched(product, monkeypatch, [first], lambda each, _: each.tile == 24, faults)
    assert found and found.wrong and {each.tile for each in tuner.final} == {24}
    rounded = replace(first, reduction="output type", split_k=4, data="11" * 64)
    found, tuner = searched(product, monkeypatch, [rounded], lambda *_: True, faults)
    assert found and rounded not in tuner.final
    assert searched(product, monkeypatch, [first], lambda *_: False, faults)[0] is None

    def refused(*_: object) -> bool:
        raise cublas.CublasError("cublasLtMatmul", 15)

    assert searched(product, monkeypatch, [first], refused, faults)[0] is None


def test_a_finalist_that_is_right_at_times_is_not_chosen(product, monkeypatch, tmp_path) -> None:
    faults = tmp_path / "faults.txt"
    first = product("64x64x1024").configured(Configuration(66, 20, 35, cluster=3))
    found, tuner = searched(
        product, monkeypatch, [first], lambda each, launches: launches == 1 or each.tile != 31, faults
    )
    assert found and min(tuner.final, key=cost).tile == 31
    left = [cost(each) for each in tuner.final if each.tile != 31]
    assert found.algorithm.tile != 31 and found.us == cost(found.algorithm) == min(left) and found.wrong
    assert searched(product, monkeypatch, [first], lambda each, launches: launches == 1, faults)[0] is None


def test_a_configuration_that_faults_ends_the_run_and_is_not_launched_again(product, monkeypatch, tmp_path) -> None:
    first = product("64x64x1024").configured(Configuration(66, 20, 35, cluster=3))
    faults, faulted = tmp_path / "faults.txt", []

    def right(each: Algorithm, _: int) -> bool:
        assert each.data not in faulted
        if each.tile == 31:
            faulted.append(each.data)
            raise RuntimeError("an illegal memory\naccess")
        return True

    for _ in range(2):
        with pytest.raises(EndOfRunError, match=r"an illegal memory access.*it goes on without this configuration"):
            searched(product, monkeypatch, [first], right, faults)
    assert faults.read_text().split() == faulted and len(faulted) == 2

    (tmp_path / "file").touch()
    with pytest.raises(EndOfRunError, match=r"an illegal address.*the next run may meet it again: "):
        searched(
            product, monkeypatch, [first], raising(RuntimeError("an illegal address")), tmp_path / "file" / "faults"
        )

    full = DriverError("cuGraphInstantiate", driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    for error in (torch.cuda.OutOfMemoryError(), full):
        with pytest.raises(type(error)):
            searched(product, monkeypatch, [first], raising(error), faults)
    assert faults.read_text().split() == faulted
    found, _ = searched(product, monkeypatch, [first], lambda *_: True, faults)
    assert found and found.wrong == 2 and found.algorithm.data not in faulted


def test_a_fault_in_the_finalists_rounds_leaves_them_out(product, monkeypatch, tmp_path) -> None:
    first, faults = product("64x64x1024").configured(Configuration(66, 20, 35, cluster=3)), tmp_path / "faults.txt"
    with monkeypatch.context() as patch:
        error = DriverError("cuEventSynchronize", driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        patch.setattr(ScriptedTuner, "by_replays", raising(error))
        with pytest.raises(EndOfRunError, match="illegal address"):
            searched(product, monkeypatch, [first], lambda *_: True, faults)
    left_out = faults.read_text().split()
    found, tuner = searched(product, monkeypatch, [first], lambda *_: True, faults)
    assert found and 0 < found.wrong <= len(left_out) == FINALISTS + 1
    assert not {each.data for each in tuner.final} & set(left_out)


class MadeLibraries(Libraries):
    """One product on the made library, tuned before; nothing is launched."""

    def __init__(self, made: LtProduct) -> None:
        (first,) = [made.configured(Configuration(66, 20, 35, cluster=3))]
        layout = TunedLayout((first,), ("k",), (20.0,), (3,), 0, 0.0)
        self._made, self._target, self._tuner = made, SimpleNamespace(model="gpu", driver="1"), None
        self._tuned = {Gemm(64, 64, 1024): Tuned(64, 64, 1024, Accumulate.FP32, "adaptive", layout, None, 1.0, "")}
        self._searches, self._searched = dict.fromkeys(Layout, 2.0), {}

    def product(self, gemm: Gemm, layout: Layout) -> LtProduct:
        return self._made


def test_a_search_in_which_the_library_fails_finds_nothing(product, monkeypatch) -> None:
    made, shown = product("64x64x1024"), []

    def fails() -> list[int]:
        shown.append(current())
        raise cublas.CublasError("cublasLtMatmulAlgoGetIds", 14)

    monkeypatch.setattr(made, "algorithm_ids", fails)
    libraries, gemm = MadeLibraries(made), Gemm(64, 64, 1024)
    libraries.search(gemm, Buffers(0, 0, 0, 0), lambda *_: True)
    assert libraries.is_searched(gemm) and [libraries.searched(gemm, each) for each in Layout] == [None, None]
    (step,) = shown  # the finalists' rounds come after the time of the search
    assert "for 2 s, then timing the best, B NN" in step.name and math.isinf(step.limit_s)


def test_an_attribute_that_cannot_be_read_is_the_default() -> None:
    unread = dict.fromkeys(Configuration.__slots__, configurations.UNREAD) | {"id": 66, "reduction": "-1"}
    assert replace(SEEDS[0], **unread).configuration == Configuration(66)


# options, and what is reported


def test_a_search_is_made_only_where_it_is_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(settings, "chosen", lambda target: "cuda")
    request = SweepSettings(grid="64x64x64").request()
    assert not request.searches and not [each for each in request.baselines if each.searched]
    request = SweepSettings(grid="64x64x64", brute="3s").request()
    assert request.searches == {Layout.NN: 3.0, Layout.TN: 3.0}
    request = SweepSettings(grid="64x64x64", brute="2s", arms=f"{KIND} TN,cuBLASLt-AutoTuning").request()
    assert request.searches == {Layout.TN: 2.0}
    assert request.retune and not SweepSettings(grid="64x64x64").request().retune
    with pytest.raises(UserError, match="name it in --arms too"):
        SweepSettings(grid="64x64x64", brute="2s", arms="cuBLAS NN").request()
    for arms in (KIND, f"cuBLASLt-AutoTuning,{KIND} NN"):
        with pytest.raises(UserError, match=rf"{KIND}.* needs --brute 3s"):
            SweepSettings(grid="64x64x64", arms=arms).request()


def test_without_a_gpu_the_option_says_so() -> None:
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        SweepSettings(grid="64x64x64", brute="3s", target="cpu").request()
    with pytest.raises(UserError, match="positive time"):
        SweepSettings(grid="64x64x64", brute="soon", target="cpu").request()


def test_results_of_another_search_are_not_gone_on_with(monkeypatch) -> None:
    with Sweep(SweepSettings(target="cpu", baselines_only=True)) as opened:
        plain = opened.header([])
        opened.settings = replace(opened.settings, brute="3s")
        assert opened.header([]).settings == plain.settings | {"brute_s": 3.0} and "brute_s" not in plain.settings


def test_a_fault_of_a_search_ends_the_run_at_its_shape(tmp_path, monkeypatch) -> None:
    gemms, opened = read_grid("2x8x8,3x8x8"), Sweep(SweepSettings(target="cpu", baselines_only=True))
    with opened, monkeypatch.context() as patch, ResultsFile(tmp_path / RESULTS, opened.header(gemms)) as results:
        patch.setattr(opened.rig, "open", raising(EndOfRunError("faulted")))
        patch.setattr(opened.rig, "close", raising(MachineError("lost")))
        with pytest.raises(EndOfRunError, match="2x8x8: faulted"), opened:
            opened.run(gemms, results)
        assert not results.records
        patch.setattr(opened.rig, "close", raising(UserError("a full disk")))
        with pytest.raises(EndOfRunError, match="2x8x8: faulted") as ended, opened:
            opened.run(gemms, results)
        assert ended.value.__notes__ == ["then, while closing: a full disk"]
        patch.setattr(opened.rig, "close", raising(MachineError("lost")))
        with pytest.raises(MachineError, match="lost"), opened:
            pass


def raising(error: Exception):
    def raises(*_: object, **__: object) -> None:
        raise error

    return raises


def test_nothing_is_ready_that_was_not_searched() -> None:
    class Libraries:
        def searched(self, gemm: Gemm, layout: Layout) -> None:
            return None

    for baseline in all_baselines().values():
        if baseline.searched:
            assert not baseline.ready(Libraries(), Gemm(64, 64, 64))
    assert [each.name for each in product_baselines("cuda") if each.searched] == [f"{KIND} NN", f"{KIND} TN"]


def measurement(ours: bool, gemm: Gemm = Gemm(1024, 1024, 1024)) -> Measurement:
    """Autotuned 10 us, brute 9 us, and ours 8 us where it is there."""

    def arm(name: str, us: float) -> Arm:
        return Arm(name, Interval(us, us * 0.99, us * 1.01), 11, 100)

    autotuned, found = arm("cuBLASLt-AutoTuning NN", 10.0), arm("cuBLASLt-brute NN", 9.0)
    subject, us = (arm("candidate", 8.0), 8.0) if ours else (autotuned, 10.0)
    others = (autotuned, found) if ours else (found,)
    speedups = tuple(
        (each.name, Interval(value, value * 0.995, value * 1.005))
        for each in others
        for value in (each.latency_us.estimate / us,)
    )
    timing = Timing(
        TimingStatus.MEASURED,
        "offline",
        candidate=subject,
        baselines=others,
        reference=others[0].name,
        speedup=speedups[0][1],
        speedups=speedups,
        among=((autotuned.name, found.name, Interval(10 / 9, 1.1, 1.122)),),
    )
    facts = {"id": 66, "tile": 31, "stages": 35, "split_k": 1, "cluster": 9, "custom_option": 6, "regret": 0.0}
    counts = {"tried": 900, "valid": 80, "wrong": 2, "returned": False}
    counts["kernels"] = ["memset", "nvjet_sm90_hsh_64x64_64x13_2x4_h_bz_NNT 2x64x1", "reduce 8x16x1"]
    return Measurement(gemm, "offline", "measured", timing=timing, arms={found.name: facts | counts})


def test_tuned_baselines_and_searched_ones_are_compared_where_they_read_b_alike() -> None:
    known = {each.name: each for each in product_baselines("cuda")}
    rounds = SimpleNamespace(_baselines=known, ratio=lambda theirs, ours: (theirs, ours))
    autotuned = "cuBLASLt-AutoTuning"
    assert {(*names, ratio) for *names, ratio in GraphRounds._among(rounds)} == {
        (f"{kind} {layout.name}", f"{KIND} {layout.name}", (f"{kind} {layout.name}", f"{KIND} {layout.name}"))
        for kind in (autotuned, f"{autotuned}-32F")
        for layout in Layout
    }


def test_a_searched_baseline_that_is_wrong_in_a_round_is_left_out(monkeypatch) -> None:
    autotuned, found = named("cuBLASLt-AutoTuning NN"), named(f"{KIND} NN")
    begun: list[list[str]] = []

    class Wrong(GraphRounds):
        """Rounds whose searched arm gives a wrong result."""

        def __init__(self, gpu, baselines, *_: object) -> None:
            begun.append([each.name for each in baselines])

        def run(self) -> None:
            if found.name in begun[-1]:
                raise graph_rounds.WrongSearchedError(found.name)

        def finish(self, start: float) -> dict[str, str]:
            return {"candidate": "timed"}

        def close(self) -> None:
            pass

    monkeypatch.setattr(graph_rounds, "GraphRounds", Wrong)
    gpu, terms = graph_rounds.Gpu(None, 1, 1), SimpleNamespace(clock=ticking())
    timed = graph_rounds.measure_cuda(gpu, [autotuned, found], {}, None, terms)
    assert timed == {"candidate": "timed"} and begun == [[autotuned.name, found.name], [autotuned.name]]
    with pytest.raises(UserError, match=f"{found.name} was right when it was searched and wrong in a timed round"):
        graph_rounds.measure_cuda(gpu, [found], {}, None, terms)


def test_rounds_tell_a_wrong_search_from_a_wrong_library(monkeypatch) -> None:
    class Rounds(GraphRounds):
        """One sample of a baseline whose result is wrong."""

        def __init__(self, name: str) -> None:
            self._baselines, self.kernels, self.slots, self._layouts = {name: named(name)}, {}, {}, {name: None}
            self.protocol, self.clock, self.rng = CUDA_PROTOCOLS["offline"], ticking(), np.random.default_rng(0)
            self._launch_s, self._sampled_at, self._heated, self.number = {}, 0.0, False, 0
            self.check_elements, outputs_of = True, lambda place: place
            self._memory = SimpleNamespace(
                task=Gemm(64, 64, 64), draws_power=False, outputs_of=outputs_of, poison_baselines=lambda: None
            )
            self._memory.check_baseline, self._memory.require_untouched = raising(WrongOutput("2")), lambda: None

        def _played(self, *_: object) -> tuple[None, list[int]]:
            return None, [0]

        def _replay(self, *_: object) -> float:
            return 1e-6

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(graph_rounds.WrongSearchedError, match=f"{KIND} NN"):
        Rounds(f"{KIND} NN").sample(f"{KIND} NN", 1)
    with pytest.raises(UserError, match="cuBLAS NN gave a wrong result"):
        Rounds("cuBLAS NN").sample("cuBLAS NN", 1)


def test_our_launch_is_the_one_that_was_selected() -> None:
    kernels = tuple(
        KernelFigures(Layout.NN, False, name, "f", (), selected, Interval(us, us, us), ((f"{KIND} NN", over),))
        for name, selected, us, over in (("a", 7.0, 8.5, Interval(1.1, 1, 1.2)), ("b", 7.5, 8.0, Interval(1.2, 1, 1.3)))
    )
    (found,) = brute.searched([replace(measurement(True), kernels=kernels)])
    assert (found.ours_us, found.over_ours) == (8.5, Interval(1.1, 1, 1.2))


@pytest.mark.parametrize("ours", [False, True])
def test_what_was_searched_is_compared_with_autotuned(ours) -> None:
    (found,) = brute.searched([measurement(ours)])
    assert found.ratio == Interval(10 / 9, 1.1, 1.122)
    assert (found.ours_us, found.over_ours and found.over_ours.estimate) == ((8.0, 9 / 8) if ours else (None, None))


def test_the_summary_tells_ratio_algorithm_and_means() -> None:
    text = "\n".join(brute.lines("offline", [measurement(True), measurement(True, Gemm(512, 512, 512))]))
    assert "| 512x512x512 | NN | 10.00 | 9.00 | 1.111 [1.100, 1.122] | 8.00 | 1.125 [1.119, 1.131] |" in text
    assert (
        "| nvjet_sm90_hsh_64x64_64x13_2x4_h_bz_NNT id 66 tile 31 stages 35 splits 1 cluster 9 option 6 | 900 /" in text
    )
    assert "2 products: geometric mean 1.1111; interval above 1 in 2, below 1 in 0" in text
    assert "1.1250 times as fast as brute, 1.2500 times as fast as autotuned" in text
    plain = replace(measurement(True), timing=None, status="failed", reason="no memory")
    assert brute.lines("offline", [plain]) == []


def test_tables_and_summary_have_the_search() -> None:
    about = Header("a GPU", {"torch": "2"}, {}, "2026-01-01T00:00:00+00:00")
    (row,) = grid.rows(about, [measurement(False)])
    over = "cublaslt_autotuning_nn_over_cublaslt_brute_nn"
    assert [row[over], row[f"{over}_low"], row[f"{over}_high"]] == [10 / 9, 1.1, 1.122]
    columns = {name.removeprefix("cublaslt_brute_nn_"): value for name, value in row.items()}
    assert (columns["us"], columns["cluster"], columns["custom_option"], columns["tried"]) == (9.0, 9, 6, 900)
    assert "searched beyond its heuristic's list" in grid_summary.summary(about, [measurement(False)])


def test_the_shapes_are_those_that_the_seed_draws() -> None:
    found = [each for each in read_grid("paper") if log2_mnk(each) >= 20 and each.m * each.n * each.k <= 1 << 36]
    listed = read_grid(str(SHAPES))
    assert sorted(listed) == sorted(sample(found, 41, 28)) and len(chosen(listed, None, 0)) == 41
    assert {log2_mnk(each) for each in listed} >= {20, 36}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["512x512x512", "256x384x2048:tn:bf16", "256x512x1024:fp16"])
def test_a_search_finds_right_configurations_that_are_timed_beside_autotuned_ones(shape) -> None:
    gemm = Gemm.parse(shape)
    wanted = beginning([KIND, "cuBLASLt-AutoTuning"], product_baselines("cuda"))
    request = Request(tuple(wanted), brute_s=1.0)
    with open_rig("cuda", request) as rig, rig.open(gemm, 0) as bench:
        timing = bench.time_baselines(brief(rig.protocols["offline"]))
        assert timing.status is TimingStatus.MEASURED, timing.reason
        pairs = [(first, second) for first, second, _ in timing.among]
        for layout in Layout:
            name = f"{KIND} {layout.name}"
            assert (f"cuBLASLt-AutoTuning {layout.name}", name) in pairs
            assert name in arms_of(timing)
            facts = rig.describe(gemm, named(name))
            assert facts["reduction"] not in cublas.ROUNDED and facts["b_layout"] == str(layout)
            assert facts["tried"] > facts["valid"] > facts["wrong"], facts
