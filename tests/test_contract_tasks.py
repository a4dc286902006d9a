"""contract/buffers.py: contracts for any task by named buffers, of which a matrix product's is one."""

import struct

import pytest
from test_contract_cuda import WHOLE

from cuda_l2 import tasks
from cuda_l2.contract import ContractError, parse, parse_cpu, parse_cuda
from cuda_l2.contract.buffers import GEMM
from cuda_l2.contract.cpu import CpuContract
from cuda_l2.contract.cuda import CudaContract
from cuda_l2.records import Gemm, Operation, Tensor

MEAN_SQUARE = """/* cuda-l2
target = "cuda"
arch = "sm_80"
names = {parts = "cdiv(columns, 1024)"}
workspace = [{name = "sums", bytes = "4 * rows * parts"}]
buffer = [
  {name = "x", shape = ["rows", "columns"]},
  {name = "gain", shape = ["columns"], kind = "weight"},
  {name = "out", shape = ["rows", "columns"], kind = "output"},
]

[[launch]]
kernel = "sum_squares"
grid = ["parts", "rows"]
block = [256]
args = ["x", "sums", "columns"]

[[launch]]
kernel = "scale"
grid = ["cdiv(rows * columns, 1024)"]
block = [256]
args = ["x", "gain", "sums", "out", "rows", "columns", {int32 = "parts"}]
edge = "programmatic"
*/"""

GROUPED = """/* cuda-l2
target = "cpu"
entry = "group_norm"
threads = 2
workspace = "8 * batch * groups"
sizes = ["groups"]
buffer = [
  {name = "x", shape = ["batch", "groups * (all / groups)", "height", "width"]},
  {name = "gain", shape = ["all"], kind = "weight"},
  {name = "shift", shape = ["all"], kind = "weight"},
  {name = "out", shape = ["batch", "all", "height", "width"], kind = "output"},
]
*/"""


def rms_norm(rows: int = 48, columns: int = 3000) -> Operation:
    task = tasks.parse(f"rms_norm:rows={rows},columns={columns}")
    assert isinstance(task, Operation)
    return task


def test_a_cuda_plan_takes_its_sizes_from_the_tasks_tensors() -> None:
    contract = parse(MEAN_SQUARE)
    assert isinstance(contract, CudaContract)
    assert contract.interface.sizes == ("rows", "columns") and contract.interface.names == ("x", "gain", "out")
    plan = contract.plan(rms_norm(), 132)
    assert [(w.name, w.bytes) for w in plan.workspaces] == [("sums", 4 * 48 * 3)]
    first, second = plan.launches
    assert (first.grid, second.grid, second.programmatic) == ((3, 48, 1), (141, 1, 1), True)
    assert [a.name for a in second.arguments if a.kind == "pointer"] == ["x", "gain", "sums", "out"]
    assert [bytes.fromhex(a.data) for a in second.arguments[4:]] == [struct.pack("<i", v) for v in (48, 3000, 3)]


def test_a_cpu_contract_may_use_the_tasks_own_sizes() -> None:
    contract = parse(GROUPED)
    assert isinstance(contract, CpuContract) and contract.entry == "group_norm"
    task = tasks.parse("group_norm:batch=3,groups=4")
    assert contract.interface.bind(task) == {"groups": 4, "batch": 3, "all": 16, "height": 14, "width": 18}
    assert contract.workspace_bytes(task) == 8 * 3 * 4


@pytest.mark.parametrize("shape", ["256x128x512", "256x128x512:tn:fp16"])
def test_a_matrix_product_is_the_special_case(shape) -> None:
    gemm = Gemm.parse(shape)
    contract = parse_cuda(WHOLE)
    assert contract.interface is GEMM
    assert contract.interface.bind(gemm) == {"m": 256, "n": 128, "k": 512}
    assert contract.plan(gemm, 132) == contract.plan(Gemm(256, 128, 512), 132)
    cpu = parse_cpu('/* cuda-l2\ntarget = "cpu"\nworkspace = "m * n + k"\n*/')
    assert cpu.workspace_bytes(gemm) == 256 * 128 + 512


def test_a_product_written_with_buffers_reads_as_one_without() -> None:
    shapes = {"a": '["m", "k"]', "b": '["k", "n"]', "c": '["m", "n"]\nkind = "output"'}
    buffers = (f'[[buffer]]\nname = "{name}"\ndtype = "float16"\nshape = {shape}\n' for name, shape in shapes.items())
    declared = parse_cuda(WHOLE.replace("[[launch]]", "".join(buffers) + "[[launch]]", 1))
    assert declared.interface == GEMM
    assert declared.plan(Gemm(256, 128, 512), 132) == parse_cuda(WHOLE).plan(Gemm(256, 128, 512), 132)


def test_single_numbers_and_numbered_dimensions() -> None:
    source = (
        '/* cuda-l2\ntarget = "cpu"\n[[buffer]]\nname = "x"\nshape = [3, "n"]\n'
        '[[buffer]]\nname = "scale"\nshape = []\n[[buffer]]\nname = "out"\nshape = ["n"]\nkind = "output"\n*/'
    )
    x, scale, out = Tensor("x", "float32", (3, 7)), Tensor("scale", "float32", ()), Tensor("out", "float32", (7,))
    assert parse(source).interface.bind(Operation("t", inputs=(x, scale), outputs=(out,))) == {"n": 7}
    with pytest.raises(ContractError, match=r"\[3, 7\]"):
        wide = Tensor("x", "float32", (4, 7))
        parse(source).interface.bind(Operation("t", inputs=(wide, scale), outputs=(out,)))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "gain"', 'name = "gain weight"', "identifier"),
        ('name = "gain"', 'name = "x"', "twice"),
        ('name = "gain"', 'name = "rows"', "twice"),
        ('name = "gain"', 'name = "sms"', "reserved"),
        ('shape = ["columns"]', 'shape = ["sms"]', "reserved"),
        ('shape = ["columns"]', 'shape = "columns"', "list"),
        ('shape = ["columns"]', "shape = [1.5]", "whole number"),
        ('shape = ["columns"]', "shape = [true]", "whole number"),
        ('shape = ["columns"]', 'shape = ["columns +"]', "cannot read"),
        (', shape = ["columns"]', "", "shape"),
        ('shape = ["columns"]', 'shape = ["columns"], dtype = "half"', "half"),
        ('shape = ["columns"]', 'shape = ["columns"], stride = 4', "unknown fields: stride"),
        ('kind = "weight"', 'kind = "state"', "state"),
        ('kind = "output"', 'kind = "input"', "output"),
        ("buffer = ", "buffers = ", "'x'"),
        ('arch = "sm_80"', 'arch = "sm_80"\nsizes = "rows"', "list of names"),
        ('arch = "sm_80"', 'arch = "sm_80"\nsizes = [4]', "identifier"),
        ('args = ["x", "sums", "columns"]', 'args = ["y", "sums", "columns"]', "'y'"),
        ('args = ["x", "sums", "columns"]', 'args = ["x", "sums", "m"]', "'m'"),
        ('name = "sums"', 'name = "out"', "twice"),
        ("parts = ", "rows = ", "twice or reserved"),
        ('arch = "sm_80"', 'arch = "sm_80"\nlayouts = ["nn"]', "layouts"),
    ],
)
def test_what_a_contract_cannot_say_is_refused_by_name(old, new, says) -> None:
    assert old in MEAN_SQUARE
    with pytest.raises(ContractError, match=says):
        parse(MEAN_SQUARE.replace(old, new))


def test_sizes_of_its_own_need_buffers() -> None:
    with pytest.raises(ContractError, match="buffer"):
        parse('/* cuda-l2\ntarget = "cpu"\nsizes = ["groups"]\n*/')


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"gain"', '"factor"', "no tensor factor"),
        ('kind = "weight"', 'kind = "input"', "weight gain"),
        ('shape = ["columns"]', 'shape = ["columns"], dtype = "float16"', "float16"),
        ('shape = ["columns"]', 'shape = ["rows"]', "rows is 48, but 3000"),
        ('shape = ["columns"]', 'shape = ["columns", 1]', "rank 2"),
        ('shape = ["columns"]', 'shape = ["columns + 1"]', r"\[3001\]"),
        ('arch = "sm_80"', 'arch = "sm_80"\nsizes = ["groups"]', "no size groups"),
        ('arch = "sm_80"', 'arch = "sm_80"\nsizes = ["rows"]', ""),
    ],
)
def test_a_task_that_a_contract_was_not_written_for_is_refused(old, new, says) -> None:
    assert old in MEAN_SQUARE
    contract = parse(MEAN_SQUARE.replace(old, new))
    if says:
        with pytest.raises(ContractError, match=says):
            contract.plan(rms_norm(), 132)
    else:
        assert contract.plan(rms_norm(), 132) == parse(MEAN_SQUARE).plan(rms_norm(), 132)


def test_every_output_must_be_declared() -> None:
    x = Tensor("x", "float32", (4, 4))
    outputs = (Tensor("out", "float32", (4, 4)), Tensor("other", "float32", (4,)))
    gain = Tensor("gain", "float32", (4,))
    with pytest.raises(ContractError, match="no output other"):
        parse(MEAN_SQUARE).interface.bind(Operation("two", inputs=(x,), weights=(gain,), outputs=outputs))


@pytest.mark.parametrize("source", [MEAN_SQUARE, GROUPED])
def test_where_a_matrix_product_is_asked_for_other_buffers_are_refused(source) -> None:
    with pytest.raises(ContractError, match="a, b and c"):
        parse(source).interface.bind(Gemm(8, 8, 8))


def test_a_contract_of_a_matrix_product_does_not_serve_another_task() -> None:
    with pytest.raises(ContractError, match="no tensor a"):
        parse_cuda(WHOLE).plan(rms_norm(), 132)
    with pytest.raises(ContractError, match="float16"):
        parse_cuda(WHOLE).plan(tasks.parse("matmul"), 132)
