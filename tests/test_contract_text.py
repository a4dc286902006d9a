"""What a model is told of the launch contract: no rule refuses a source that the contract has not named."""

import ast
import re
from pathlib import Path

import pytest

import cuda_l2
from cuda_l2 import tasks
from cuda_l2.contract.text import contract_text
from cuda_l2.tasks import describe
from cuda_l2.verify._base import all_checks

PACKAGE = Path(cuda_l2.__file__).parent
PRODUCT, TASK = tasks.parse("512x512x512"), tasks.parse("softmax:rows=64,columns=1000")
BOTH = ("cpu", "cuda")

COMMON = {
    "the source is larger than": "256 KiB",
    "the source holds the character": "printable characters, tabs and newlines",
    "trigraphs are": "trigraphs",
    "digraphs are": "digraphs",
    "raw strings are": "raw strings",
    "#include{}": "#include",
    "#pragma{}": ("Pragmas: `GCC unroll`", "`#pragma` and `_Pragma"),
    "#{} is not allowed": "`#line`",
    "__has_include": "__has_include",
    "{}, or its pieces, is not allowed": "`__DATE__`",
    "a quote that is not closed": ("", "Quotes and comments are closed"),  # of CUDA candidates alone
    "a comment that is not closed": ("", "Quotes and comments are closed"),
    "the source does not begin with": "begins with a comment|leading comment",
    "the contract is not TOML": ("TOML", "leading comment what it needs"),
    'the contract must say target = "cpu" or': "| `target` |",
    "this machine's candidates must say target = ": "| `target` |",
    "expression of more than": (
        "`workspace` | bytes of scratch memory: a number, or an expression",
        "an expression 2,000",
    ),
    "expression nested": ("parentheses", "nested at most 40 deep"),
    "{} is negative": ("division that rounds up", "A negative result"),
    "{} divides by zero": ("division that rounds up", "a division by zero"),
    "{} is beyond 2^62": ("division that rounds up", "beyond 2^62"),
    "unknown fields": "| field | meaning | default |",
    "{} must be a C identifier": ("the exported function", "Every name is a C identifier"),
    "{} must be one of": "| field | meaning",
    "{} must be a whole number": "| field | meaning",
    "{} must be true or false": "| field | meaning",
    "{} must be a table": "| field | meaning",
    "[{}] must be a table": "| field | meaning",
    "{} must be a list": "| field | meaning",
    "write [[{}]] with double brackets": ("| field | meaning", "### `[[launch]]`"),
    "{}: {}": "| field | meaning",
}
"""By the beginning of a refusal's reason: what the long contract says of its rule; for the CPU and CUDA apart in pairs."""
CPU = {
    "assembly is not allowed": "No assembly in any spelling",
    "[[attributes]]": "never `[[...]]`",
    "{} is not allowed: a kernel has no use for its caller": "__builtin_return_address",
    "__attribute__(({})) is": "Attributes from a list",
    "the instruction {} is not allowed: it reads or sets a register": "another register of the system",
    "the instruction {} is not allowed in a matrix product": "In a matrix product no integer dot product",
    "the instruction {} is not allowed: it {}": "No instruction that reads a clock",
    "the registers of MMX": "No registers of MMX",
    "thread-local variables are": "No `_Thread_local` variables",
    "memory of the thread itself": "nor other memory of a thread",
    "the address of a nested function": "No address of a nested function",
    "a conversion needs the compiler's": "Conversions that need a helper of the compiler",
    "a macro of the source changes": "Macros that headers use are defined after",
    "expands to more than": "8 MiB once macros are expanded",
    "code that runs when the library loads": "runs or resolves when the library loads",
    "indirect functions": "runs or resolves when the library loads",
    "the library may not need other": "needs another library",
    "{} is not available to a candidate; only": "From outside the file only calls of `memcpy`",
    "the address of {} is not allowed": "their addresses",
    "the source defines no function": "the exported function",
    "memory that is both writable and executable": "executable data",
    "static data larger than": "64 MiB of static data",
    "an executable stack": "an executable stack",
}
CUDA = {
    "outside comments and strings the source must be ASCII": "outside them all is ASCII",
    "a quote that is not closed on its line is not allowed in assembly": "open quotes",
    "_Pragma is allowed": '`_Pragma("...")`',
    "__managed__ variables": "`__managed__`",
    "compiles to more than": "16 MiB of PTX",
    "a backslash is not allowed in assembly": "backslashes",
    "preprocessor lines are not allowed in assembly": "preprocessor lines",
    "cannot read the PTX statement": "PTX through `asm` whose text is one of the instructions of a list",
    "the directive .{}": "No directives (`.section`",
    "the PTX instruction {}": "one of the instructions of a list",
    "reading %{} is": "No reading of clocks",
    "{} reads {}: no clocks": "No reading of clocks",
    "{} is not available to a candidate, which": "no call of what the source does not define",
    "the variable {} lies in global memory": "no `__device__` variables",
    "variables of {} KiB": "many KiB of those that no code names",
    "{} reads the launch's constant": "no address of a parameter beyond the kernel's own",
    'the source defines no extern "C"': '`extern "C" __global__` function',
    "launch {}: {}": "must match the kernel's parameters",
    "launch {} has a programmatic edge": "must execute `griddepcontrol.wait`",
    "{} takes {}, the contract passes": "Number and sizes must match the kernel's parameters",
    "parameter {} of {} has": "Number and sizes must match the kernel's parameters",
    "cp.async copies": "with their commit, wait and fence",
    "bulk copies": "with their commit, wait and fence",
    "bulk stores": "with their commit, wait and fence",
    "accesses to other blocks of a cluster": "`barrier.cluster.wait`",
    "barrier.cluster.arrive.relaxed, and": "`barrier.cluster.arrive.relaxed` needs a fence or an arrival",
    "counts in global memory beside": "beside a fence for the block alone",
    "counts in global memory before": "before the count too",
    "a wait gives up after": "A wait does not give up after fewer than 2^20 polls",
    "launch {}: blocks of": "unless they first take a number by an atomic",
    "the address of the function": "no address\n  of a function",
    "reads by ld.global.nc": "`ld.global.nc` (`__ldg`) reads through no pointer that the kernel also writes through",
    "a bulk copy follows mbarrier.init": "After `mbarrier.init` a fence",
    "a release that nothing acquires": "a release at\n  gpu scope with an acquire",
    "an acquire of what nothing releases": "a release at\n  gpu scope with an acquire",
    "needs {}; the target is": "the least architecture",
    "the kernel reads B as": "shapes of the other are refused",
    "layouts: only a matrix product's B": "which layouts of B",
    "the table {} has": "At most\n16 KiB",
    "the table {} is too long": "entries times characters",
    "an entry of the table": "each entry within its type",
    "the tensor map {} cannot be encoded": "As `cuTensorMapEncodeTiled` takes them",
    "dims {} must": "each at most 2^32",
    "strides {} must": "multiples of 16 below 2^40",
    "box {} must": "at most 256 a side",
    "element_strides {} must": "1 to 8",
    "the box's inner side takes {} bytes, which": "the inner side a multiple of 16 bytes",
    "the box's inner side takes {} bytes; a": "at most the swizzle's span",
    "{} cannot be launched": "one to 16, in order",
    "a grid of": "one to three numbers",
    "a block of": "at most 1024 together",
    "a cluster of": "at most 16 together",
    "the grid {} is not a multiple": "the grid must be a multiple",
    "{} bytes of parameters": "at most 32,764 bytes",
    "{} is {}, which does not fit": "value must fit its kind",
    "the name {} is used twice": "used once",
    "the contract has {} workspaces": "at most 16 of them",
    "the contract needs between 1 and": "one to 16, in order",
    "only a persistent workspace": "of persistent ones alone",
    "args must be a list": "the kernel's parameters in order",
    "cannot pass {}": "An argument is",
}
BUFFERS = {
    "the contract declares elements of {}, {} has others": "| `dtype` |",
    "the contract declares the buffers": "A contract|`[[buffer]]`",
    "{} must be": "| field | meaning",
    "the task {} has no size": "names of the task's own sizes",
    "the task {} has no tensor": "the task's name for the tensor",
    "the contract declares the {}; the task": "only outputs may be written",
    "{} is {}, but": "everywhere to the same value",
    "{} is declared as": "numbers or expressions, outermost first",
    "the contract declares no output": "all of the task's must be declared",
    "sizes": "names of the task's own sizes",
    "dtype: each": "| `dtype` |",
    "write 1 to": "At most 128 buffers",
    "the name {} is used twice": "no name is used twice",
    "no [[buffer]] has kind": "`output`",
    "{}: {}": "numbers or expressions",
}
TOLD = {
    "build/rules.py": (("cpu",), CPU),
    "build/binary.py": (("cpu",), CPU),
    "build/cpu.py": (("cpu",), CPU),
    "build/cuda_rules.py": (("cuda",), CUDA),
    "build/cubin.py": (("cuda",), CUDA),
    "build/unpaired.py": (("cuda",), CUDA),
    "build/noncoherent.py": (("cuda",), CUDA),
    "build/spins.py": (("cuda",), CUDA),
    "build/cuda.py": (("cuda",), CUDA),
    "build/lexing.py": (BOTH, COMMON),
    "contract/__init__.py": (BOTH, COMMON),
    "contract/expressions.py": (BOTH, COMMON),
    "contract/fields.py": (BOTH, COMMON),
    "contract/cpu.py": (("cpu",), CPU),
    "contract/cuda.py": (("cuda",), CUDA),
    "contract/cuda_reader.py": (("cuda",), CUDA),
    "contract/buffers.py": (BOTH, BUFFERS),
}
OURS = (
    "the compiled library cannot be read",
    "the compiled file is not a shared library",
    "the compiler did not finish",
    "the compiler ended",
    " ",
)
"""Failures that no rule is behind."""


def texts(node: ast.AST | None) -> list[str]:
    """The texts that an expression may give, {} for what is filled in."""
    match node:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(value.value if isinstance(value, ast.Constant) else "{}" for value in values)]
        case ast.IfExp(body=one, orelse=other):
            return texts(one) + texts(other)
        case ast.BinOp(left=left, right=right):
            return [a + b for a in texts(left) or [""] for b in texts(right) or [""]]
        case ast.BoolOp(values=values) | ast.Tuple(elts=values):
            return [text for value in values for text in texts(value)]
    return []


def reasons(path: Path) -> set[str]:
    """Why a file of rules may refuse a source: what its functions return, raise and pass on, and the rules of a table."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Return(value=value) | ast.Assign(targets=[ast.Name(id="reason")], value=value):
                found += texts(value)
            case ast.Raise(exc=ast.Call(func=ast.Name(id="ContractError"), args=[said])):
                found += texts(said)
            case ast.Call(func=ast.Name(id="fail" | "_rule" | "finish") | ast.Attribute(attr="fail"), args=arguments):
                found += [text for argument in arguments for text in texts(argument)]
    return {text for text in found if re.search(r"[a-z}] ", text) and not text.startswith(OURS) and "\\" not in text}


def test_every_file_that_refuses_by_the_contract_is_walked() -> None:
    files = {str(path.relative_to(PACKAGE)) for room in ("build", "contract") for path in (PACKAGE / room).glob("*.py")}
    refusing = {
        name for name in files if re.search(r"REFUSED|ContractError\(|def _?refuse", (PACKAGE / name).read_text())
    }
    assert refusing | {"contract/cpu.py", "contract/fields.py"} == set(TOLD)


@pytest.mark.parametrize("file", TOLD)
def test_every_rule_that_can_refuse_a_source_is_told(file: str) -> None:
    devices, told = TOLD[file]
    table = told | (COMMON if told is not BUFFERS else {})
    task = TASK if told is BUFFERS else PRODUCT
    for reason in reasons(PACKAGE / file):
        keys = sorted((key for key in table if reason.startswith(key)), key=len)
        assert keys, f"{file} refuses by {reason!r}: name the rule in docs/contract.md, and here where it stands"
        for device in devices:
            phrase = table[keys[-1]]
            phrase = phrase if isinstance(phrase, str) else phrase[BOTH.index(device)]
            said = contract_text(device, task, full=True)
            assert any(each in said for each in phrase.split("|")) or phrase in said, (reason, phrase)


@pytest.mark.parametrize("device", BOTH)
def test_every_check_is_told_by_its_name_in_short_too(device: str) -> None:
    names = {check.name for check in all_checks() if check.device in ("", device) and check.products is not False}
    names -= {"other shapes"} if device == "cuda" else {"other shapes", "races"}  # by what a session is
    for full in (False, True):
        table = contract_text(device, PRODUCT, full=full).partition("### What is checked")[2]
        assert names <= {name for row in re.findall(r"^\| (.+?) \|", table, re.M) for name in re.split(", | \\(", row)}
    assert "same bits from the same inputs" in contract_text(device, TASK) and "Tolerance: " in describe(TASK)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("task", [PRODUCT, TASK], ids=str)
def test_the_short_contract_is_shorter_and_has_signature_example_and_ten_refusals(device: str, task: object) -> None:
    short, full = (contract_text(device, task, full=full) for full in (False, True))  # type: ignore[arg-type]
    assert len(short) < 0.96 * len(full) and "### What the text may say" not in short
    assert re.findall(r"^(\d+)\. ", short, re.M) == [str(number) for number in range(1, 11)]
    (example,) = re.findall(
        r"^    /\* cuda-l2\n    target = \"\w+\"\n(?:    arch.*\n)?(?!    entry = \"gemm\")", short, re.M
    )[:1]
    assert example and example in full
