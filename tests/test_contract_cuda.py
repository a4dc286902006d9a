"""contract/cuda.py: what a CUDA contract may say, and the plan it gives."""

import dataclasses
import struct

import pytest

from cuda_l2.contract import ContractError, declares_constant, parse, parse_cpu, parse_cuda, plan_cuda
from cuda_l2.contract.cuda import Plan
from cuda_l2.records import Gemm, from_json, to_json

WHOLE = """/* cuda-l2
target = "cuda"
arch = "sm_90a"

[names]
tiles = "cdiv(m, 64) * cdiv(n, 64)"
pairs = "tiles / 2"

[[workspace]]
name = "partial"
bytes = "4 * m * n"

[[workspace]]
name = "flags"
bytes = "4 * tiles"
kind = "persistent"
fill = 0xffffffff

[[table]]
name = "order"
length = "tiles"
value = "i % 2 * 256 + i / 2"

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m"]
strides = ["2 * k"]
box = [64, 64]
swizzle = "128B"

[[launch]]
kernel = "first"
grid = ["pairs * 2", 1, 2]
block = [128]
cluster = [2]
shared_bytes = 1024
args = ["map_a", "partial", "flags", "order", "m", {int32 = "cdiv(k, 64)"}, {float32 = 1}]
coresident = true

[[launch]]
kernel = "second"
grid = ["cdiv(m * n, 1024)"]
block = [32, 8]
args = ["partial", "c", "n"]
edge = "programmatic"
*/"""


def test_a_plan_is_the_contract_in_numbers() -> None:
    contract = parse_cuda(WHOLE)
    assert contract.kernels == ("first", "second") and contract.programmatic
    plan = contract.plan(Gemm(256, 128, 512), 132)
    assert [(w.name, w.bytes, w.persistent) for w in plan.workspaces] == [
        ("partial", 131072, False),
        ("flags", 32, True),
    ]
    assert plan.workspaces[1].fill == 0xFFFFFFFF and plan.workspace_bytes == 131104
    first, second = plan.launches
    assert (first.grid, first.block, first.cluster, first.shared_bytes) == ((8, 1, 2), (128, 1, 1), (2, 1, 1), 1024)
    assert first.coresident and not first.programmatic and second.programmatic
    assert second.grid == (32, 1, 1) and second.block == (32, 8, 1)
    table, sizes = first.arguments[3], [bytes.fromhex(a.data) for a in first.arguments[4:]]
    assert struct.unpack("<8H", bytes.fromhex(table.data)) == (0, 256, 1, 257, 2, 258, 3, 259)
    assert sizes == [struct.pack("<i", 256), struct.pack("<i", 8), struct.pack("<f", 1.0)]
    (tensor_map,) = plan.tensor_maps
    assert (tensor_map.dims, tensor_map.strides, tensor_map.element_strides) == ((512, 256), (1024,), (1, 1))
    assert from_json(Plan, to_json(plan)) == plan


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('arch = "sm_90a"', "", "arch"),
        ('arch = "sm_90a"', 'arch = "sm_90"', "arch"),
        ('kernel = "first"', 'kernel = "a b"', "identifier"),
        ('kernel = "first"', 'kernel = "first"\nstream = 1', "unknown fields: stream"),
        ('"map_a", "partial"', '"map_b", "partial"', "map_b"),
        ('{int32 = "cdiv(k, 64)"}', '{int16 = "k"}', "int16"),
        ('args = ["partial", "c", "n"]', "", "args"),
        ("block = [128]", "block = []", "block"),
        ('name = "flags"', 'name = "partial"', "twice"),
        ('name = "flags"', 'name = "k"', "twice or reserved"),
        ('pairs = "tiles / 2"', "pairs = 1.5", "pairs"),
        ("fill = 0xffffffff", "fill = -1", "from 0 to 4294967295"),
        ('kind = "persistent"', 'kind = "scratch"', "only a persistent"),
        ('tensor = "a"', 'tensor = "z"', "tensor"),
        ('strides = ["2 * k"]', "strides = []", "strides"),
        ('swizzle = "128B"', 'swizzle = "256B"', "swizzle"),
        ('edge = "programmatic"', 'edge = "early"', "edge"),
        ("[[launch]]", "[[launches]]", "launch"),
        ("coresident = true", 'coresident = "yes"', "coresident"),
    ],
)
def test_what_a_contract_cannot_say_is_refused_by_name(old, new, says) -> None:
    assert old in WHOLE
    with pytest.raises(ContractError, match=says.replace("[", r"\[")):
        parse(WHOLE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("block = [128]", "block = [2048]", "limit 1024"),
        ("cluster = [2]", "cluster = [3]", "multiple of the cluster"),
        ("cluster = [2]", "cluster = [32]", "limit 16"),
        ('"pairs * 2", 1, 2', '"pairs - 4", 1, 2', "grid"),
        ('"pairs * 2", 1, 2', '1, "m * 512", 2', "grid"),
        ('strides = ["2 * k"]', 'strides = ["2 * k + 2"]', "multiples of 16"),
        ("box = [64, 64]", "box = [64, 512]", "256"),
        ("box = [64, 64]", "box = [128, 64]", "swizzle"),
        ("box = [64, 64]", "box = [4, 64]", "multiple of 16"),
        ('dims = ["k", "m"]', 'dims = ["k - 512", "m"]', "dims"),
        ('value = "i % 2 * 256 + i / 2"', 'value = "i * 10000"', "does not fit"),
        ('length = "tiles"', 'length = "m * n"', "16384 bytes"),
        ('{int32 = "cdiv(k, 64)"}', '{int32 = "k * 100000000"}', "does not fit"),
        ('bytes = "4 * m * n"', 'bytes = "4 * m / (n - 128)"', "zero"),
    ],
)
def test_a_shape_for_which_a_limit_breaks_is_refused(old, new, says) -> None:
    assert old in WHOLE
    contract = parse_cuda(WHOLE.replace(old, new))
    with pytest.raises(ContractError, match=says):
        contract.plan(Gemm(256, 128, 512), 132)


def test_inputs_alone_can_be_declared_constant() -> None:
    assert parse_cuda(WHOLE).constant == ()
    stated = WHOLE.replace('arch = "sm_90a"', 'arch = "sm_90a"\nconstant = ["b"]')
    assert parse_cuda(stated).constant == ("b",) and declares_constant(stated) and not declares_constant(WHOLE)
    for wrong in ('["c"]', '["partial"]', "[]", '"b"'):
        with pytest.raises(ContractError, match="constant must be a list of some of a, b"):
            parse_cuda(stated.replace('["b"]', wrong))


def test_a_contract_of_the_other_machine_is_refused() -> None:
    with pytest.raises(ContractError, match="cpu"):
        parse_cpu(WHOLE)
    with pytest.raises(ContractError, match="cuda"):
        parse_cuda('/* cuda-l2\ntarget = "cpu"\n*/')


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_cuda(WHOLE).plan(Gemm(256, 128, 512), 132).launches = ()  # type: ignore[misc]


def test_a_layout_that_the_kernel_does_not_read_is_refused_by_name() -> None:
    one = WHOLE.replace('arch = "sm_90a"\n', 'arch = "sm_90a"\nlayouts = ["tn"]\n')
    assert parse_cuda(one).layouts == ("tn",)
    assert parse_cuda(WHOLE).layouts == ("nn", "tn")
    assert plan_cuda(one, Gemm.parse("256x128x512:tn"), 132) == plan_cuda(WHOLE, Gemm(256, 128, 512), 132)
    with pytest.raises(ContractError, match=r"reads B as tn alone.*shape has nn: write 256x128x512:tn"):
        plan_cuda(one, Gemm(256, 128, 512), 132)


def test_a_products_type_is_that_of_its_contract_and_of_its_tensor_maps() -> None:
    brain = WHOLE.replace('arch = "sm_90a"\n', 'arch = "sm_90a"\ndtype = "bfloat16"\n')
    half, gemm = Gemm(128, 128, 128), Gemm(128, 128, 128, dtype="bfloat16")
    assert {tensor_map.dtype for tensor_map in plan_cuda(WHOLE, half, 132).tensor_maps} == {"float16"}
    assert {tensor_map.dtype for tensor_map in plan_cuda(brain, gemm, 132).tensor_maps} == {"bfloat16"}
    for source, task in ((WHOLE, gemm), (brain, half)):
        with pytest.raises(ContractError, match=f'{task} has others: the header needs dtype = "{task.dtype}"'):
            plan_cuda(source, task, 132)
    with pytest.raises(ContractError, match="dtype must be one of float16, bfloat16, not 'float32'"):
        parse_cuda(brain.replace('"bfloat16"', '"float32"'))


@pytest.mark.parametrize("layouts", ['"tn"', "[]", '["tt"]', "[1]", '[["nn"]]', "[{ a = 1 }]"])
def test_layouts_are_a_list_of_those_there_are(layouts: str) -> None:
    with pytest.raises(ContractError, match="layouts must be a list"):
        parse_cuda(WHOLE.replace('arch = "sm_90a"\n', f'arch = "sm_90a"\nlayouts = {layouts}\n'))
