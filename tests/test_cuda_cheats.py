"""Every CUDA cheat and fault of the corpus: what can be told without a GPU, and on one the whole way."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_cheats import ACCEPTED, TASKS_FOLDER, Cheat, all_cheats, read
from drawing import cases

from cuda_l2.contract import ContractError, parse_cuda
from cuda_l2.records import Build, BuildStatus, Gemm, Trial
from cuda_l2.tasks.products import CpuReferences, ProductCases
from cuda_l2.verify import instructions
from cuda_l2.verify._base import CheckFailed

LEAST = 40
PRIVATE = {"private_include", "private_include_by_macro", "private_include_quoted", "private_embed", "raw_string"}
SMS = 132
CASES = cases(all_cheats(), lambda cheat: cheat.honest, lambda cheat: cheat.name)
cheats = pytest.mark.parametrize("cheat", CASES)
REDUCED = {"fp16_accumulation_mma", "fp16_accumulation_wgmma", "fp16_accumulation_cute", "fp16_chunks_mma"}
REDUCED |= {"bf16_operands_mma", "tf32_mma", "int8_operands_mma"}
"""Those whose tensor instructions alone tell; fp8 is widened to fp16 on Hopper before it is multiplied."""


def test_the_corpus_is_large_and_has_honest_controls() -> None:
    honest = [cheat for cheat in all_cheats() if cheat.honest]
    assert len(all_cheats()) - len(honest) >= LEAST
    assert len(honest) >= 3
    assert len({cheat.source for cheat in all_cheats()}) == len(all_cheats())


@cheats
def test_a_contract_says_what_to_launch_unless_that_is_the_fault(cheat: Cheat) -> None:
    gemm = Gemm.parse(cheat.shape)
    plan = parse_cuda(cheat.source).plan(gemm, SMS)
    defined = all(f" {launch.kernel}(" in cheat.source for launch in plan.launches)
    assert defined == (cheat.name != "no_kernel")


@pytest.mark.corpus(10)
@cheats
def test_a_file_builds_or_is_refused_as_it_says(cheat: Cheat, build_of: Callable[[str], Build]) -> None:
    build = build_of(cheat.source)
    if build.status is BuildStatus.BUILT:
        later = cheat.expect - {"refused", "failed"}
        assert later, "should not have been built"
    else:
        assert cheat.accepts(str(build.status), build.reason), build.reason


@pytest.mark.parametrize("cheat", [cheat for cheat in CASES if cheat.id in PRIVATE])
def test_no_reason_leaks_the_private_file(cheat: Cheat, build_of: Callable[[str], Build]) -> None:
    secret, build = Path("/etc/passwd").read_text().splitlines()[0], build_of(cheat.source)
    assert secret not in build.reason + build.log


@pytest.mark.corpus(10)
@cheats
def test_reduced_precision_shows_in_the_tensor_instructions(cheat: Cheat, build_of: Callable[[str], Build]) -> None:
    build = build_of(cheat.source)
    if build.status is not BuildStatus.BUILT:
        assert cheat.name not in REDUCED
        return
    cases = ProductCases(Gemm.parse(cheat.shape), 1, CpuReferences())
    session: Any = SimpleNamespace(cases=cases, build=build)
    with (
        pytest.raises(CheckFailed, match="allows fp16 operands and fp32 sums only")
        if cheat.name in REDUCED
        else nullcontext()
    ):
        instructions.CHECK.run(session)


def test_a_file_without_expectations_is_an_error(tmp_path: Path) -> None:
    contract = all_cheats()[0].source.split("*/")[0] + "*/\n"
    for comment in (
        "",
        "/* Nothing expected. */\n",
        "/* A typo.\n * expect: refusde */\n",
        "/* x\n * expect: measured refused */\n",
    ):
        path = tmp_path / "bad.cu"
        path.write_text(contract + comment)
        with pytest.raises(ValueError, match=r"bad\.cu"):
            read(path)


def test_a_contract_that_breaks_a_limit_is_refused_for_its_reason() -> None:
    source = next(cheat.source for cheat in all_cheats() if cheat.name == "honest_tma")
    with pytest.raises(ContractError, match="box"):
        parse_cuda(source.replace("box = [16, 16]", "box = [16, 257]")).plan(Gemm(256, 256, 256), SMS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cheat",
    sorted([*all_cheats(), *all_cheats(TASKS_FOLDER)], key=lambda cheat: cheat.shape),
    ids=lambda cheat: f"{cheat.name} {cheat.shape}",
)
def test_a_cheat_ends_as_its_file_says(cheat: Cheat, judge_on_gpu: Callable[[Cheat], Trial]) -> None:
    trial = judge_on_gpu(cheat)
    assert cheat.accepts(trial.status, trial.reason), (trial.status, trial.reason)
    if trial.status != ACCEPTED:
        assert trial.reason and trial.speedup == 0.0 and trial.reward < 0
