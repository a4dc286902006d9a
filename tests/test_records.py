"""records.py: shapes, invariants, and JSON that comes back as it was."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cuda_l2.records import (
    Accumulate,
    Arm,
    Build,
    BuildStatus,
    BusyCores,
    Candidate,
    Conditions,
    Element,
    Gemm,
    Interval,
    Layout,
    Operation,
    Tensor,
    Timing,
    TimingStatus,
    Trial,
    Verdict,
    VerdictStatus,
    from_json,
    to_json,
)
from cuda_l2.system.errors import UserError

GEMM = Gemm(64, 32, 16)
SOFTMAX = Operation(
    "softmax",
    (("rows", 4), ("columns", 8)),
    "float16",
    inputs=(Tensor("x", "float16", (4, 8)),),
    outputs=(Tensor("out", "float16", (4, 8)),),
    flops=96,
)
BUILT = Build("c", BuildStatus.BUILT, artifact="kernel.so")
CORRECT = Verdict(VerdictStatus.CORRECT, passed=("exact match",))
WRONG = Verdict(VerdictStatus.INCORRECT, check="exact match", reason="wrong", element=Element(1, 2, 3.0, 4.0))
TIMING = Timing(
    TimingStatus.MEASURED,
    "search",
    candidate=Arm("candidate", Interval(10.0, 9.0, 11.0), 6, 24),
    baselines=(Arm("torch", Interval(12.0, -math.inf, math.inf), 1, 1),),
    reference="torch",
    speedup=Interval(1.2, 1.1, 1.3),
    speedups=(("torch", Interval(1.2, 1.1, 1.3)),),
)


@pytest.mark.parametrize(
    ("text", "gemm"),
    [
        ("512x256x128", Gemm(512, 256, 128)),
        ("1X1X1:TN", Gemm(1, 1, 1, Layout.TN)),
        ("8192x512x2048:tn:fp16", Gemm(8192, 512, 2048, Layout.TN, Accumulate.FP16)),
        ("64x64x64:fp16", Gemm(64, 64, 64, Layout.NN, Accumulate.FP16)),
        ("64x64x64:bf16", Gemm(64, 64, 64, dtype="bfloat16")),
        ("8x512x2048:bf16:tn", Gemm(8, 512, 2048, Layout.TN, dtype="bfloat16")),
    ],
)
def test_a_shape_is_read_and_written(text: str, gemm: Gemm) -> None:
    assert Gemm.parse(text) == gemm
    assert Gemm.parse(str(gemm)) == gemm


@pytest.mark.parametrize(
    "text",
    [
        *("", "512", "512x512", "0x5x5", "1.5x2x3", "-1x2x3", "1x2x3x4", "1x2x3:nt", "1x2x3:tf32", "1x2x3:bf16:fp16"),
        *("1x2x3:fp16:bf16", "1x2x3:", "axbxc", "1x2x3\n4x5x6", "9999999999x1x1", "²x2x2"),
    ],
)
def test_a_bad_shape_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        Gemm.parse(text)
    assert "\n" not in str(error.value).replace(repr(text), "")


def test_a_products_type_is_that_of_its_tensors_and_part_of_its_text() -> None:
    half, brain = Gemm(3, 4, 5, Layout.TN), Gemm(3, 4, 5, Layout.TN, dtype="bfloat16")
    assert str(brain) == "3x4x5:tn:bf16" and half != brain
    assert {tensor.dtype for tensor in (*brain.inputs, *brain.outputs)} == {"bfloat16"}
    assert {tensor.dtype for tensor in (*half.inputs, *half.outputs)} == {"float16"}
    assert half.bytes == brain.bytes == 2 * (3 * 5 + 5 * 4 + 3 * 4)
    assert from_json(Gemm, to_json(brain)) == brain
    assert from_json(Gemm, to_json(half).replace(',"dtype":"float16"', "")) == half  # as older files have it
    for wrong in ({"dtype": "float32"}, {"dtype": "bfloat16", "accumulate": Accumulate.FP16}):
        with pytest.raises(UserError):
            Gemm(3, 4, 5, **wrong)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("softmax", ("softmax", "", {}, "float32")),
        ("softmax:rows=4,columns=8:float16", ("softmax", "", {"rows": 4, "columns": 8}, "float16")),
        ("softmax:bfloat16", ("softmax", "", {}, "bfloat16")),
        (
            "kernelbench/level1/7_Some-thing_@0a1b2c3d4e5f:N=16",
            ("kernelbench/level1/7_Some-thing_", "0a1b2c3d4e5f", {"N": 16}, "float32"),
        ),
    ],
)
def test_a_tasks_identity_is_read_and_written(text, parts) -> None:
    assert Operation.read_identity(text) == parts
    name, revision, sizes, dtype = parts
    assert str(Operation(name, tuple(sizes.items()), dtype, revision)) == text


@pytest.mark.parametrize(
    "text",
    [
        *["", "1softmax", "softmax:", "softmax:rows", "softmax:rows=-1", "softmax:rows=1,", "softmax:rows=1,rows=2"],
        *["softmax:float12", "soft max", "a//b", "../a", "softmax@xyz", "softmax:rows=1:float16:nn", "softmax\n"],
    ],
)
def test_a_bad_identity_is_one_clear_line(text) -> None:
    with pytest.raises(UserError) as error:
        Operation.read_identity(text)
    assert "\n" not in str(error.value).replace(repr(text), "")


def test_both_kinds_of_task_name_their_tensors() -> None:
    assert sum(t.bytes for t in (*GEMM.inputs, *GEMM.weights, *GEMM.outputs)) == GEMM.bytes
    assert dict(GEMM.sizes) == {"m": 64, "n": 32, "k": 16}
    assert [str(t) for t in GEMM.inputs] == ["a float16[64, 16]", "b float16[16, 32]"]
    assert SOFTMAX.bytes == 2 * 2 * 32


def test_flops_and_bytes_count_each_matrix_once() -> None:
    assert GEMM.flops == 2 * 64 * 32 * 16
    assert GEMM.bytes == 2 * (64 * 16 + 16 * 32 + 64 * 32)


def test_a_candidates_id_is_its_content() -> None:
    assert Candidate("x", "llm").id == Candidate("x", "schedule").id != Candidate("y").id


@pytest.mark.parametrize(
    "make",
    [
        lambda: Interval(1.0, 1.1, 1.2),
        lambda: Interval(math.nan, 0.0, 1.0),
        lambda: Build("c", BuildStatus.BUILT),
        lambda: Build("c", BuildStatus.FAILED, artifact="kernel.so", reason="x"),
        lambda: Build("c", BuildStatus.FAILED),
        lambda: Verdict(VerdictStatus.CORRECT, reason="why"),
        lambda: Verdict(VerdictStatus.CRASHED),
        lambda: Timing(TimingStatus.MEASURED, "search"),
        lambda: Timing(TimingStatus.CRASHED, "search"),
        lambda: Trial(GEMM, Candidate("x"), "m", "search", BUILT, WRONG, TIMING),
        lambda: Tensor("x y", "float32", (1,)),
        lambda: Tensor("x", "float12", (1,)),
        lambda: Tensor("x", "float32", (-1,)),
        lambda: Operation("softmax", inputs=SOFTMAX.inputs, outputs=SOFTMAX.inputs),
        lambda: Operation("softmax:rows=1"),
        lambda: Trial(GEMM, Candidate("x"), "m", "search", BUILT, None, TIMING),
        lambda: Trial(GEMM, Candidate("x"), "m", "search", Build("c", BuildStatus.FAILED, reason="x"), CORRECT),
    ],
)
def test_nonsense_cannot_be_built(make) -> None:
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize("task", [GEMM, SOFTMAX, Operation("softmax")])
@pytest.mark.parametrize("verdict", [None, CORRECT, WRONG])
def test_a_trial_survives_json(task, verdict: Verdict | None) -> None:
    timing = TIMING if verdict is CORRECT else None
    candidate = Candidate("source", schedule=(("MR", 12),))
    trial = Trial(task, candidate, "m", "search", BUILT, verdict, timing, reward=1.5, environment={"cores": 2})
    back = from_json(Trial, to_json(trial))
    assert to_json(back) == to_json(trial)
    assert back.candidate == candidate and back.task == task
    assert timing is None or back.timing.speedups == timing.speedups


def test_conditions_are_stored_without_what_was_not_measured_and_old_ones_are_read() -> None:
    met = Conditions(sm_mhz_range=(1740, 1770), limited_by=(), other_work=BusyCores(0.5, 2), left_out={"x": "why"})
    timing = replace(TIMING, conditions=met)
    text = to_json(timing)
    stored = {"sm_mhz_range": [1740, 1770], "limited_by": [], "other_work": {"cores": 0.5, "of": 2}}
    assert json.loads(text)["conditions"] == stored | {"left out": {"x": "why"}}
    assert from_json(Timing, text).conditions == met
    old = {"sm_mhz": 1755, "left out": {"x": "why"}, "torch threads": "spin", "fan_rpm": 900}
    fields = json.loads(text) | {"conditions": old}
    found = from_json(Timing, json.dumps(fields)).conditions
    assert found == Conditions(sm_mhz=1755, left_out={"x": "why"}, torch_threads="spin")
    assert from_json(Timing, json.dumps(fields | {"conditions": {}})).conditions == Conditions()


@pytest.mark.parametrize("text", ["128x64x256:nt", "128x64x256:tt:bf16"])
def test_a_shape_with_column_major_a_says_which_shape_reads_it_exactly(text) -> None:
    with pytest.raises(UserError, match=r"A, B and C are all column-major write 64x128x256.*a\.contiguous\(\)"):
        Gemm.parse(text)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Gemm(np.int64(64), np.int32(48), 80, "tn", "fp32", "bfloat16"),
        lambda: Gemm(64, 48, 80, Layout.TN, dtype="bf16"),
        lambda: Gemm(64, 48, 80, "tn", dtype=torch.bfloat16),
    ],
)
def test_a_product_is_the_same_record_however_its_fields_are_written(made) -> None:
    found, wanted = made(), Gemm.parse("64x48x80:tn:bf16")
    assert found == wanted and hash(found) == hash(wanted) and str(found) == str(wanted)
    assert type(found.m) is int and type(found.layout) is Layout and to_json(found) == to_json(wanted)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (("64", 48, 80), "M, N and K must be whole numbers of at least 1, not '64'"),
        ((64.0, 48, 80), "whole numbers"),
        ((None, 48, 80), "whole numbers"),
        ((64, 48, 80, "row"), "there is no layout 'row'; choose from nn, tn"),
        ((64, 48, 80, "tn", "fp64"), "there is no accumulate 'fp64'; choose from fp32, fp16"),
        ((64, 48, 80, "tn", "fp32", torch.float32), "type is float16 or bfloat16, not 'float32'"),
    ],
)
def test_fields_that_cannot_be_are_told(fields, says) -> None:
    with pytest.raises(UserError, match=says):
        Gemm(*fields)


@pytest.mark.parametrize("text", [None, (64, 48, 80), b"64x48x80"])
def test_a_shape_that_is_no_text_is_told(text) -> None:
    with pytest.raises(UserError, match="a shape is a text as in 512x512x512:tn, not"):
        Gemm.parse(text)
