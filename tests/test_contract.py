"""contract.py: the leading comment and its expressions."""

import pytest

from cuda_l2.contract import ContractError, CpuContract, evaluate, parse
from cuda_l2.records import Gemm

NAMES = {"m": 7, "n": 5, "k": 3, "threads": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("m*n + k", 38),
        ("m - n - 1", 1),
        ("2 * (m + n) * threads", 48),
        ("cdiv(m, 4) * 4096", 8192),
        ("m / 2 + m % 4", 6),
        ("min(m, n) + max(k, threads)", 8),
        ("max(k, 512) - 512", 0),
    ],
)
def test_expressions_are_whole_number_arithmetic(text: str, value: int) -> None:
    assert evaluate(text, NAMES) == value


@pytest.mark.parametrize(
    "text",
    ["", "1.5", "m +", "q", "m ** 9", "__import__('os')", "m n", "(m", "m / 0", "m - 100", "9" * 30, "min(m)", "abs(m)",
     "(" * 100 + "1" + ")" * 100, "m*" * 3000 + "1", "1" + "*9999999" * 20, "m;n", "0x10", "²"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ContractError):
        evaluate(text, NAMES)


def test_a_source_without_a_contract_is_told_that_and_not_of_toml() -> None:
    with pytest.raises(ContractError, match=r"^the source does not begin with a /\* cuda-l2"):
        parse("int x;")


def test_a_contract_is_read() -> None:
    contract = parse('/* cuda-l2\ntarget = "cpu"\nthreads = 2\nworkspace = "threads * m"\n*/\nvoid gemm(void);')
    assert (contract.entry, contract.threads) == ("gemm", 2)
    assert contract.workspace_bytes(Gemm(10, 1, 1)) == 20


@pytest.mark.parametrize(
    "source",
    [
        "void gemm(void);",
        'int x; /* cuda-l2\ntarget = "cpu" */',
        "/* cuda-l2\n*/",
        '/* cuda-l2\ntarget = "gpu"\n*/',
        '/* cuda-l2\ntarget = "cpu"\nthreads = 0\n*/',
        '/* cuda-l2\ntarget = "cpu"\nthreads = true\n*/',
        '/* cuda-l2\ntarget = "cpu"\nthreads = 2.5\n*/',
        '/* cuda-l2\ntarget = "cpu"\nworkspace = "-1"\n*/',
        '/* cuda-l2\ntarget = "cpu"\nworkspace = [1]\n*/',
        '/* cuda-l2\ntarget = "cpu"\nentry = "a b"\n*/',
        '/* cuda-l2\ntarget = "cpu"\nstream = 1\n*/',
        "/* cuda-l2\ntarget = cpu\n*/",
    ],
)
def test_a_bad_contract_is_refused(source: str) -> None:
    with pytest.raises(ContractError):
        parse(source)


@pytest.mark.parametrize(
    ("stated", "known"),
    [
        ('target = "cpu"\nthread = 2', "buffer, dtype, entry, sizes, target, threads, workspace"),
        ('target = "cpu"\n[[buffer]]\nname = "x"\nshape = []\ntype = "int8"', "dtype, kind, name, shape"),
        (
            'target = "cuda"\narch = "sm_80"\nthread = 1\n[[launch]]\nkernel = "f"\ngrid = [1]\nblock = [1]\nargs = []',
            "arch, buffer, constant, dtype, launch, layouts, names, sizes, table, target, tensor_map, workspace",
        ),
    ],
)
def test_beside_an_unknown_field_the_known_ones_are_listed(stated: str, known: str) -> None:
    with pytest.raises(ContractError, match=rf": unknown fields: (thread|type); known fields: {known}$"):
        parse(f"/* cuda-l2\n{stated}\n*/")


def test_a_product_of_another_type_names_the_field_that_the_header_needs() -> None:
    half = parse('/* cuda-l2\ntarget = "cpu"\n*/')
    brain = parse('/* cuda-l2\ntarget = "cpu"\ndtype = "bfloat16"\n*/')
    for contract, task in ((half, Gemm(8, 8, 8, dtype="bfloat16")), (brain, Gemm(8, 8, 8))):
        assert isinstance(contract, CpuContract)
        with pytest.raises(ContractError, match=f'{task} has others: the header needs dtype = "{task.dtype}"$'):
            contract.workspace_bytes(task)
