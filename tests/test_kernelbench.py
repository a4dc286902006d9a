"""kernelbench/opened.py: files in KernelBench's format load and run, or are refused with their reason, in the sandbox."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cuda_l2.kernelbench import reference_server
from cuda_l2.kernelbench.examined import Effort, Examined, Readiness
from cuda_l2.kernelbench.files import Entry, entries, entry_of
from cuda_l2.kernelbench.opened import OpenedFile, _read_case, _read_examined, examine
from cuda_l2.kernelbench.sandboxed import python
from cuda_l2.machine.cpu.target import usable_cores
from cuda_l2.records import Operation, Tensor, from_json, to_json
from cuda_l2.system import process_tree, sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.values import Distribution

CHECKOUT = Path(__file__).with_name("kernelbench")
SECRET = Path(__file__).resolve()
EFFORT = Effort(timeout_s=120, memory_bytes=1 << 30, budget_bytes=1 << 24, budget_flops=10**8)

HEAD = """
import os, sys
import torch
from torch import nn

n = 8

class Model(nn.Module):
    def forward(self, x):
        return {result}

def get_inputs():
    return [{given}]

def get_init_inputs():
    return []
"""


def text(result: str = "x + 1", given: str = "torch.rand(n)", more: str = "", init: str = "", width: str = "") -> str:
    """A file. more: text at its end; init: lines of its constructor, which takes a width where that has a value."""
    source = HEAD.format(result=result, given=given)
    if init:
        source += (
            f"class Model(Model):\n    def __init__(self{', width' if width else ''}):\n        super().__init__()\n"
        )
        source += "".join(f"        {line}\n" for line in init.splitlines())
    return source.replace("return []", f"return [{width}]") + more + "\n"


KEPT = "self.weight = nn.Parameter(torch.ones(n))\nself.hidden = torch.rand(n, n)\n"
STEPS = "steps = []\ndef step():\n    steps.append(1)\n    return 1 + len(steps) % 2 * 2.0**-23"
SHARED = "self.there, self.back = nn.Linear(n, n), nn.Linear(n, n)\nself.back.weight = self.there.weight"


def kept(init: str = KEPT, hidden: str = "self.hidden", then: str = "self.hidden.to(x.device)") -> str:
    """A file whose module keeps a state beside its weights."""
    forward = f"    def forward(self, x):\n        self.hidden = {then}\n        return super().forward(x)"
    return text(f"x @ {hidden} + self.weight", "torch.rand(4, n)", forward, init)


COUNT = "def count(seen=[]):\n    seen.append(1)\n"
REFUSED = {
    "syntax": ("def broken(:", Readiness.IMPORT_ERROR, "SyntaxError"),
    "raises": (text(more="raise KeyError('at import')"), Readiness.IMPORT_ERROR, "KeyError"),
    "leaves": ("import sys\nsys.exit(0)", Readiness.IMPORT_ERROR, "SystemExit"),
    "package": ("import a_package_nobody_has.part", Readiness.NEEDS_PACKAGE, "a_package_nobody_has"),
    "package of its reference": (text("__import__('nobodys_package')"), Readiness.NEEDS_PACKAGE, "nobodys_package"),
    "no inputs": (text().replace("get_inputs", "other"), Readiness.MALFORMED, "get_inputs"),
    "no module": (text(more="class Model: pass"), Readiness.MALFORMED, "no torch module"),
    "huge": (text(given="torch.rand(2**20, 2**16)"), Readiness.TOO_LARGE, "GiB"),
    "huge weights": (text(init="self.layer = nn.Linear(2**18, 2**16)"), Readiness.TOO_LARGE, "GiB"),
    "hidden need": (text("x + len(bytearray(1 << 45))"), Readiness.TOO_LARGE, "memory"),
    "dropout": (text("torch.dropout(x, 0.5, True)"), Readiness.RANDOM, "random"),
    "random state": (text("x + torch.randn(n)"), Readiness.RANDOM, "random"),
    "counts": (text("x + count()", more=COUNT + "    return len(seen)"), Readiness.STATEFUL, ""),
    "shapes": (text("x @ torch.ones(3, 3)"), Readiness.REFERENCE_FAILS, "its reference fails: RuntimeError"),
    "its own storage": (
        text("(self.out.copy_(x + torch.randn(n)), x * 2)", init="self.register_buffer('out', torch.zeros(8))"),
        Readiness.RANDOM,
        "random",
    ),
    "kept from its first inputs": (
        text("x * self.mask(x)") + "\nclass Model(Model):\n    kept = None\n    def mask(self, x):\n"
        "        self.kept = x > 0.5 if self.kept is None else self.kept\n        return self.kept\n",
        Readiness.STATEFUL,
        "ran on other inputs before",
    ),
    "weights without a shape": (
        text("self.layer(x)", init="self.layer = nn.LazyLinear(4)"),
        Readiness.UNSUPPORTED,
        "layer.weight has no shape",
    ),
    "a state that moves": (kept(then="self.hidden * 0.5"), Readiness.STATEFUL, ""),
    "results that differ": (text("x * step()", more=STEPS.replace("-23", "-9")), Readiness.RANDOM, "random numbers"),
    "constant where it is a number": (
        text("x.sqrt().softmax(-1).sum()"),
        Readiness.CONSTANT,
        "whatever its inputs are",
    ),
    "constant": (text("(x.sigmoid() * 2).clamp(min=2)"), Readiness.CONSTANT, "whatever its inputs are"),
    "no numbers": (text("x / 0 - x / 0"), Readiness.REFERENCE_FAILS, "no finite number"),
    "inputs fail": (text(given="1 / 0"), Readiness.REFERENCE_FAILS, "ZeroDivisionError"),
    "gpu": (text(given="torch.rand(n).cuda()"), Readiness.NEEDS_GPU, "GPU"),
    "strings": (text("[x, 'name']"), Readiness.UNSUPPORTED, "str"),
    "complex input": (text("x.real", "torch.rand(n) * 1j"), Readiness.UNSUPPORTED, "x is of complex64: inputs and"),
    "takes a list": (text("x[0]", "[torch.rand(n)]"), Readiness.UNSUPPORTED, "list"),
    "fp32 inside": (text("x @ torch.eye(n, dtype=torch.float32)"), Readiness.NOT_EXACT, "fp64"),
    "crash": (text("os.kill(os.getpid(), 11)"), Readiness.CRASHED, "signal 11"),
    "endless": ("while True: pass", Readiness.TIMED_OUT, "2 s"),
    "reads files": (f"open({str(SECRET)!r}).read()\n" + text(), Readiness.IMPORT_ERROR, "FileNotFoundError"),
    "network": (
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 5)\n" + text(),
        Readiness.IMPORT_ERROR,
        "OSError",
    ),
    "forged": (
        'import os\nopen(\'result.json\', \'w\').write(\'{"name": "x", "status": "ready"}\')\nos._exit(0)',
        Readiness.CRASHED,
        "no result",
    ),
    "deep": (
        "import os\nopen('result.json', 'w').write('[' * 10**5)\nos._exit(0)",
        Readiness.CRASHED,
        "no result",
    ),
    "deep folders": (
        "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nos._exit(0)",
        Readiness.CRASHED,
        "no result",
    ),
    "link": (f"import os\nos.symlink({str(SECRET)!r}, 'result.json')\nos._exit(0)", Readiness.CRASHED, "no result"),
}


@pytest.fixture(scope="module", autouse=True)
def sandboxed(own_folders) -> None:
    if sandbox.kind() is sandbox.Kind.LIMITS:
        pytest.skip("there is no sandbox on this machine")


@pytest.fixture(scope="module")
def examined() -> dict[str, Examined]:
    """Every file of our own checkout, tried once."""
    found = entries(CHECKOUT)
    with ThreadPoolExecutor(usable_cores()) as pool:  # most of a try is the start of its process
        tried = pool.map(lambda e: examine(e, EFFORT), found)
        return {e.name.removeprefix("kernelbench/"): result for e, result in zip(found, tried, strict=True)}


def entry(folder: Path, source: str, name: str = "1_Task") -> Entry:
    (folder / "level1").mkdir(exist_ok=True)
    (folder / "level1" / f"{name}.py").write_text(source)
    return entries(folder)[0]


def tried(folder: Path, source: str) -> Examined:
    return examine(entry(folder, source), EFFORT)


def opened(name: str) -> OpenedFile:
    """A file of our own checkout by a part of its name."""
    return OpenedFile(next(each for each in entries(CHECKOUT) if name in each.name), EFFORT)


def test_a_checkouts_files_are_found_in_their_own_order() -> None:
    names = [found.name for found in entries(CHECKOUT)]
    assert len(names) == 9 and names[0] == "kernelbench/level1/1_Quartic"
    assert names[3] == "kernelbench/level1/10_Masked_Mean", "by number, not by letter"
    assert [e.name for e in entries(CHECKOUT / "KernelBench")] == names
    assert [e.level for e in entries(CHECKOUT / "KernelBench" / "level2", [2])] == [2, 2]
    assert len({e.revision for e in entries(CHECKOUT)}) == 9


LAYOUTS = {
    "levels beside one another": ("level4/1_A.py level5/2_B.py", "level4/1_A level5/2_B"),
    "in KernelBench": ("KernelBench/level1/1_A.py src/model.py", "level1/1_A"),
    "in tasks, with a line": ("tasks/level_1/2_B.py tasks/level_1/1_A.py", "level1/1_A level1/2_B"),
    "further down": ("data/own/Level-2/1_A.py data/readme.py", "level2/1_A"),
    "flat": ("b.py a.py", "a b"),
    "a folder a task": ("tasks.md linear/func_forward.py softmax/func_forward.py", "linear/func_forward"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_other_collections_are_found(layout, tmp_path) -> None:
    files, names = LAYOUTS[layout]
    for path in map(tmp_path.joinpath, files.split()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text())
    (tmp_path / "setup.py").write_text("print('no task')")
    found = [each.name.removeprefix("kernelbench/") for each in entries(tmp_path)]
    assert found[: len(names.split())] == names.split()
    with pytest.raises(UserError, match=r"level 7|a level is asked for"):
        entries(tmp_path, [7])


def test_a_folder_without_tasks_says_what_was_looked_for(tmp_path) -> None:
    (tmp_path / "model.py").write_text("class Model: pass")
    with pytest.raises(UserError, match=r"level_1 .* get_inputs and get_init_inputs"):
        entries(tmp_path)


def test_a_file_is_named_by_itself(tmp_path) -> None:
    (tmp_path / "my reference.py").write_text(text())
    assert entry_of(tmp_path / "my reference.py").name == "kernelbench/my_reference"
    with pytest.raises(UserError, match="no file"):
        entry_of(tmp_path / "other.py")


@pytest.mark.full
def test_every_file_of_the_checkout_is_ready(examined) -> None:
    assert {name: (e.status, e.reason) for name, e in examined.items()} == dict.fromkeys(
        examined, (Readiness.READY, "")
    )
    for found in examined.values():
        assert found.task and found.task.outputs and found.seconds > 0 and 0 <= found.eager_max <= found.max_allowed
        assert from_json(Examined, to_json(found)) == found
        assert Operation.read_identity(str(found.task))[0] == found.name


@pytest.mark.full
def test_tensors_are_named_after_the_file(examined) -> None:
    task = examined["level2/1_Linear_Swish_Scale"].task
    assert [str(tensor) for tensor in (*task.inputs, *task.weights, *task.outputs)] == [
        "x float32[64, 128]",
        "scale float32[96]",
        "linear_weight float32[96, 128]",
        "linear_bias float32[96]",
        "out float32[64, 96]",
    ]
    assert task.flops == 2 * 64 * 128 * 96
    assert [str(tensor) for tensor in examined["level1/2_Shifted_Product"].task.inputs][2] == "shift float32[]"
    assert [tensor.dtype for tensor in examined["level1/3_Row_Range"].task.outputs] == ["float32", "int64"]


@pytest.mark.full
def test_what_does_not_fit_a_cpu_is_tried_smaller(examined) -> None:
    found = examined["level1/1_Quartic"]
    assert found.written_bytes > 1 << 28
    assert dict(found.task.sizes)["rows"] < 8192 and found.task.bytes < EFFORT.budget_bytes
    assert examined["level1/10_Masked_Mean"].task.sizes == ()


PARETO = text(
    "x.cumsum(self.dim)", "torch.distributions.Pareto(0.1, 2).sample((n, *shape))", init="self.dim = width", width="2"
)
PRODUCT = text("x * y", "torch.rand(n, m), torch.rand(n)", "n = m = 2**14").replace("self, x", "self, x, y")
WIDE = text("nn.functional.linear(x, torch.ones(4, n, dtype=x.dtype))", "torch.rand(2, n)", width="")
LAYERS = "self.layers = nn.Sequential(nn.Linear(64, width[0]), nn.ReLU(), nn.Linear(*width))"
VIEWS = "[x.view(-1) for _ in range(64)][0].view(n, n)[None].expand(2**20, n, n)[0].relu()"
SQUARE = "self.layer = nn.Linear(width, width)"
TABLE = f"picks = {list(range(8)) * 8}\nfew = [3, 1, 2]"
SIZES = {
    "of weights, where others do not suffice": (PARETO + "n, shape = 2, (2**20, 4)", {"shape_0": 2**14}),
    "that must agree": (PRODUCT, {"n": 2**8, "m": 2**8}),
    "that come back": (WIDE.replace("n = 8", "n = 2**20").replace("[]", "[n][1:]"), {"n": 2**16}),
    # 16 MiB of weights are six times the budget; 16 rows would take 134 MFLOP
    "that cannot change what is needed": (
        text("self.layer(x)", "torch.rand(batch, 2**11)", "batch, length = 2**10, 2**10", SQUARE, "length * 0 + 2**11"),
        {"batch": 8},
    ),
    "in lists": (text("self.layers(x)", "torch.rand(2, 64)", "wide = [2**14, 64]", LAYERS, "wide"), {"wide_0": 2**12}),
    "read by other functions": (text(given="made()", more="def made():\n    return torch.rand(n, 3)"), {}),
    "of views": (text(VIEWS, "torch.rand(n, n)", "n = 256"), {}),
    "in a table": (text("x[torch.tensor(picks)][few]", "torch.rand(n, len(picks) + len(few))", TABLE), {}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_sizes_shrink(name, tmp_path) -> None:
    source, shrunk = SIZES[name]
    found = tried(tmp_path, source)
    assert (found.status, found.reason) == (Readiness.READY, "")
    assert dict(found.task.sizes) == shrunk
    if name in ("read by other functions", "in a table"):
        assert found.variable == ("n",) and found.sizes[0] == ("n", 8)


FOLLOWING = {
    "a tuple": ("n = 2**12\nshape = (n, n // 4)", {"n": 512}, (512, 128)),
    "a starred part": ("n, more = 2**10, (4, 256)\nshape = (n, *more)", {"n": 256, "more_1": 128}, (256, 4, 128)),
    "a call, twice removed": ("n = 2**12\nhalf = max(1, n // 2)\nshape = [half, half + n]", {"n": 512}, (256, 768)),
    "turned round later": ("n = 2**12\nshape = [n // 2, n // 4]\nshape.reverse()", {"n": 1024}, (256, 512)),
    "assigned again": ("n = 2\nm = n * 2\nn = 2**20", {"n": 2**15}, (2**15, 4)),
    "in a dictionary": ('n = 2**10\nconfig = {"rows": n}\nconfig["columns"] = 2**10', {"n": 128}, (128, 1024)),
    "never to 0": ("n, m = 2**10, 2**9\nblocks = n // 1024\nshape = (blocks, n, m)", {"m": 128}, (1, 1024, 128)),
    "small ones apart": ("few = 2\nn = 2**20 * few\nshape = (n,)", {"n": 2**17}, (2**17,)),
    "looked up": ('config = {"rows": 2**20}\nrows = config["rows"]\nshape = (rows,)', {"rows": 2**17}, (2**17,)),
}


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.corpus(1)
def test_sizes_that_a_file_makes_of_others_follow_them(name, tmp_path) -> None:
    sizes, shrunk, shape = FOLLOWING[name]
    made = {"assigned again": "n, m", "in a dictionary": 'config["rows"], config["columns"]'}.get(name, "*shape")
    found = tried(tmp_path, text("x * 2", f"torch.rand({made})") + sizes)
    assert found.status is Readiness.READY, found.reason
    assert (dict(found.task.sizes), found.task.inputs[0].shape) == (shrunk, shape)
    case = OpenedFile(entry(tmp_path, text("x * 2", f"torch.rand({made})") + sizes), EFFORT).case(seed=1, sizes=shrunk)
    assert case.task.inputs == found.task.inputs


@pytest.mark.full
def test_of_sizes_that_went_in_vain_as_much_comes_back_as_fits(tmp_path) -> None:
    given = "batch, length, width = 16, 32, 2**12"
    found = tried(tmp_path, text("self.layer(x)", "torch.rand(batch, length, width)", given, SQUARE, "width"))
    sizes = dict(found.task.sizes)
    assert sizes["width"] < 2**12 and sizes.get("batch", 16) * sizes.get("length", 32) >= 16
    assert found.task.bytes <= EFFORT.budget_bytes and found.task.flops <= EFFORT.budget_flops


READY = {
    "a state beside weights": kept(),
    "a state in a list": kept(KEPT.replace("torch.rand(n, n)", "[torch.rand(n, n)]"), "self.hidden[0]", "self.hidden"),
    "a state in a buffer": kept(
        KEPT.replace("self.hidden = torch.rand(n, n)", "self.register_buffer('hidden', torch.rand(n, n), False)")
    ),
    "weights that are shared": text("self.back(self.there(x))", "torch.rand(4, n)", init=SHARED),
    "few results": text("x.argmax(-1)", "torch.rand(1, 2)"),
    "complex results": text("torch.fft.rfft(x)", "torch.rand(4, n)"),
    "results that differ by rounding": text("x * step()", more=STEPS),
}


@pytest.mark.full
@pytest.mark.parametrize("name", READY)
def test_a_file_that_looks_like_none_is_a_task(name, tmp_path) -> None:
    found = tried(tmp_path, READY[name])
    assert (found.status, found.reason) == (Readiness.READY, "")


@pytest.mark.full
def test_sizes_that_may_change_are_those_no_weight_depends_on(examined) -> None:
    assert examined["level2/2_Conv_BatchNorm_Min"].variable == ("batch_size", "side")
    assert examined["level2/1_Linear_Swish_Scale"].variable == ("batch_size",)
    assert examined["level1/3_Row_Range"].variable == ("shape_0", "shape_1")


@pytest.mark.full
def test_other_values_that_make_sense_are_known(examined) -> None:
    assert set(examined["level2/1_Linear_Swish_Scale"].distributions) == set(Distribution) - {Distribution.HUGE}


@pytest.mark.full
def test_a_reference_may_move_its_buffers(examined) -> None:
    assert examined["level2/2_Conv_BatchNorm_Min"].moves_buffers
    assert not examined["level2/1_Linear_Swish_Scale"].moves_buffers


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.corpus(2)
def test_what_cannot_be_a_task_is_refused_with_its_reason(name, tmp_path) -> None:
    source, status, says = REFUSED[name]
    effort = Effort(timeout_s=2.0 if name == "endless" else 120.0, memory_bytes=1 << 30)
    found = examine(entry(tmp_path, source), effort)
    assert (found.status, says in found.reason) == (status, True), found.reason
    assert "\n" not in found.reason and found.task is None


@pytest.mark.parametrize("what", ["os.kill(-1, 9)", "os.kill(os.getppid(), 9)", "os.closerange(0, 64)"])
@pytest.mark.corpus(1)
def test_what_a_file_does_to_its_surroundings_is_not_the_next_ones_business(what, tmp_path) -> None:
    attack, honest = tmp_path / "a", tmp_path / "b"
    for folder in (attack, honest):
        folder.mkdir()
    tried(attack, f"import os\n{what}\n" + text())
    assert tried(honest, text()).status is Readiness.READY


# A process that stays behind and, wherever a folder of a file can be reached, makes of its text a link to a victim's.
LINGER = """
import os, time
if not os.fork():
    os.setsid()
    os.closerange(0, 256)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for folder in (HERE, os.path.dirname(HERE)):
            for path in ("task.py", "job/task.py"):
                try:
                    os.symlink(VICTIM, os.path.join(folder, path))
                except OSError:
                    pass
            try:
                open(os.path.join(folder, "left"), "w").close()
            except OSError:
                pass
    os._exit(0)
"""


@pytest.mark.full
def test_no_process_of_a_file_outlives_it_nor_turns_a_later_ones_text_into_a_link(tmp_path) -> None:
    attack, honest, victim = tmp_path / "a", tmp_path / "b", tmp_path / "victim"
    for folder in (attack, honest):
        folder.mkdir()
    victim.write_text("kept")
    source = LINGER.replace("HERE", "os.getcwd()").replace("VICTIM", repr(str(victim)))
    spy = "import os\nif os.path.lexists('left') or os.path.lexists('../left'): raise KeyError('not alone')\n"
    tried(attack, source + text())
    for _ in range(3):
        found = tried(honest, spy + text())
        assert (found.status, found.reason) == (Readiness.READY, "")
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("distribution", [None, Distribution.NORMAL])
def test_a_case_judges_without_running_the_file_again(distribution) -> None:
    with opened("Linear_Swish") as file:
        case = file.case(seed=7, sizes={"batch_size": 33}, distribution=distribution)
        again, other = (file.case(seed=s, sizes={"batch_size": 33}, distribution=distribution) for s in (7, 8))
    assert case.task.sizes == (("batch_size", 33),) and case.tensors["x"].shape == (33, 128)
    assert bool((case.tensors["x"] < 0).any()) == (distribution is not None)
    assert case.initial == [128, 96, 0.5] and case.keys["linear_weight"] == "linear.weight"

    def ours(x, linear_weight, linear_bias, scale):
        y = x @ linear_weight.T + linear_bias
        return y * torch.sigmoid(y) * scale

    assert case.bounds[0].violation(ours(**case.tensors)) == ""
    half = {name: tensor.half().float() for name, tensor in case.tensors.items()}
    assert "off by" in case.bounds[0].violation(ours(**half))
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in case.tensors.items())
    assert not torch.equal(other.tensors["x"], case.tensors["x"])
    assert not torch.equal(other.tensors["linear_weight"], case.tensors["linear_weight"])


def test_a_case_of_several_outputs_and_numbers() -> None:
    with opened("Row_Range") as file:
        ranges = file.case(seed=1)
    x = ranges.tensors["x"]
    assert ranges.bounds[0].violation(x.amax(1) - x.amin(1)) == ""
    assert ranges.bounds[1].violation(x.argmax(1)) == ""
    assert "differs" in ranges.bounds[1].violation(x.argmin(1))
    with opened("Shifted") as file:
        product = file.case(seed=1)
    a, b, shift = (product.tensors[name] for name in ("a", "b", "shift"))
    assert float(shift) == 0.5 and product.bounds[0].violation((a + shift) @ b) == ""
    assert product.numbers == {"shift": 0.5}


def test_one_tensor_of_a_case_is_changed_in_one_element_or_wholly() -> None:
    with opened("Linear_Swish") as file:
        case, one, all_ = (
            file.case(seed=7),
            file.case(seed=7, changed="scale"),
            file.case(seed=7, changed="x", wholly=True),
        )
        weights = file.case(seed=7, weights_seed=8)
    assert int((case.tensors["scale"] != one.tensors["scale"]).sum()) == 1
    assert torch.equal(all_.tensors["x"], 1 - case.tensors["x"]) and torch.equal(
        all_.tensors["scale"], case.tensors["scale"]
    )
    assert torch.equal(weights.tensors["x"], case.tensors["x"])
    assert not torch.equal(weights.tensors["linear_weight"], case.tensors["linear_weight"])
    exact = [each.bounds[0].exact for each in (case, one, all_, weights)]
    assert not any(torch.equal(exact[0], other) for other in exact[1:])


@pytest.mark.full
def test_zeros_and_symmetry_that_a_file_means_stay(tmp_path) -> None:
    for draw in ("torch.rand(n, n).triu()", "(lambda a: a + a.T)(torch.rand(n, n))"):
        with OpenedFile(entry(tmp_path, text("x @ x", draw)), EFFORT) as file:
            cases = [file.case(seed=3, distribution=Distribution.NORMAL)]
            cases += [file.case(seed=3, changed="x", wholly=wholly) for wholly in (False, True)]
        for case in cases:
            x = case.tensors["x"]
            assert torch.equal(x, x.triu() if "triu" in draw else x.T) and bool(x.any())


def test_one_sandbox_serves_many_cases_and_ends_with_all_its_processes(tmp_path) -> None:
    stays = "import os, time\nif not os.fork():\n    os.setsid()\n    os.closerange(3, 256)\n    time.sleep(9999)\n    os._exit(0)\n"
    with OpenedFile(entry(tmp_path, stays + text()), EFFORT) as file:
        first = file.case(seed=0)
        root = file._process.pid
        cases = [file.case(seed=seed) for seed in range(1, 4)]
        sets = file.inputs(seeds=[0, 1])
        assert file._process.pid == root
        held = process_tree.processes(root)
        assert len(held) >= 6, "those that stay behind are there as long as the file is open"
    assert not torch.equal(first.tensors["x"], cases[0].tensors["x"]) and torch.equal(first.tensors["x"], sets[0]["x"])
    assert torch.equal(sets[1]["x"], cases[0].tensors["x"])
    assert not [pid for pid in held if Path(f"/proc/{pid}/exe").exists()]


JUDGE = """
import os, signal, sys
from cuda_l2.kernelbench.process import Module, Resources
from cuda_l2.system import process_tree
module = Module(b"", "Model", Resources("cpu", 1, 2 << 30, 1 << 20, 600))
print(*process_tree.stop(module.pid), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_where_the_judge_is_killed_while_a_process_is_stopped() -> None:
    judge = subprocess.run([sys.executable, "-c", JUDGE], capture_output=True, text=True, check=False)
    pids = [int(word) for word in judge.stdout.split()]
    assert len(pids) >= 2
    process_tree.wait_gone(pids, 300)
    assert [pid for pid in pids if process_tree._state(pid) not in ("", "Z", "X")] == []


def test_a_run_that_ends_its_sandbox_leaves_the_file_open_for_others(tmp_path) -> None:
    source = "import time\n" + text("x + (time.sleep(9999) or 1 if len(x) == 9 else 1)")
    with OpenedFile(entry(tmp_path, source), EFFORT) as file:
        file.effort = replace(EFFORT, timeout_s=0.1)
        with pytest.raises(UserError, match="timed-out"):
            file.case(seed=0, sizes={"n": 9})
        file.effort = EFFORT
        assert file.case(seed=0).bounds[0].violation(file.case(seed=0).tensors["x"] + 1) == ""


@pytest.mark.full
def test_processes_of_a_file_may_not_take_more_memory_together(tmp_path) -> None:
    share = """
import mmap, os, time
pages = mmap.mmap(-1, 600 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for _ in range(5):
    if not os.fork():
        pages.write(b"x" * (600 << 20))
        time.sleep(9999)
        os._exit(0)
time.sleep(9999)
"""
    found = tried(tmp_path, share + text())
    assert (found.status, "together" in found.reason) == (Readiness.TOO_LARGE, True), found


@pytest.mark.full
def test_a_file_whose_processes_multiply_is_ended(tmp_path) -> None:
    bomb = """
import mmap, os, time
seen = mmap.mmap(-1, 2048)
while True:  # as many as the machine bears, should nobody end them
    number = seen.find(b"\\0", 0)
    if number < 0:
        time.sleep(9999)
    seen[number] = 1
    os.fork()
"""
    effort = replace(EFFORT, timeout_s=240)  # a fork is milliseconds here, a tenth of a second there
    found = examine(entry(tmp_path, bomb + text()), effort)
    assert (found.status, "processes" in found.reason) == (Readiness.CRASHED, True), found


def test_a_case_that_cannot_be_is_one_line(tmp_path) -> None:
    random = entry(tmp_path, text("torch.rand_like(x)"))
    with OpenedFile(random, EFFORT) as file, pytest.raises(UserError, match="random") as error:
        file.case(seed=1)
    assert "\n" not in str(error.value)
    with OpenedFile(entry(tmp_path, text()), EFFORT) as file, pytest.raises(UserError, match="no size m"):
        file.case(seed=1, sizes={"m": 4})


def test_without_a_sandbox_nothing_is_run(monkeypatch, tmp_path) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setattr(sandbox, "kind", lambda: sandbox.Kind.LIMITS)
    with pytest.raises(UserError, match="no sandbox"):
        examine(entry(tmp_path, f"open({str(ran)!r}, 'w')"))
    assert not ran.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.full
def test_for_a_gpu_runs_share_a_process_that_is_replaced_once_cuda_fails_in_it(tmp_path) -> None:
    with OpenedFile(entry(tmp_path, text()), replace(EFFORT, device="cuda")) as file:
        first = file.examine()
        process = file._process
        second = file.examine()
        assert process is not None and file._process not in (None, process)
    assert first == second and first.status is Readiness.CRASHED and "CUDA" in first.reason


def test_for_a_gpu_a_run_ends_with_whoever_asked_for_it(tmp_path) -> None:
    (tmp_path / reference_server.TASK).write_text("open('begun', 'w').close()\nwhile True:\n    pass\n")
    ours, theirs = socket.socketpair()
    command = [*python(reference_server.__name__), str(theirs.fileno()), "cuda"]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=tmp_path, start_new_session=True) as server:
        theirs.close()
        assert json.loads(ours.makefile().readline()) == {"ready": True}
        job = {"action": "examine", "name": "endless", "revision": "", "sizes": {}, "seed": 0, "parts": False}
        job |= asdict(replace(EFFORT, device="cuda"))
        ours.sendall(json.dumps(job).encode() + b"\n")
        while not (tmp_path / "begun").exists():
            assert server.poll() is None
            os.sched_yield()
        ours.shutdown(socket.SHUT_RDWR)
        assert server.wait() == -signal.SIGKILL


@pytest.mark.parametrize("says", [b"[]\n", b'{"status": "0"}\n', b'{"status": []}\n', b"[" * 10**5 + b"\n"])
def test_an_answer_of_another_kind_is_a_crash(says, tmp_path, monkeypatch) -> None:
    send = f"os.write(int(sys.argv[1]), {says[:1]!r} * {len(says) - 1} + b'\\n')" if len(says) > 10**4 else ""
    send = send or f"os.write(int(sys.argv[1]), {says!r})"
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nos.write(int(sys.argv[1]), b'{}\\n')\nos.read(int(sys.argv[1]), 1 << 16)\n" + send
    )
    command = [sys.executable, "-I", str(program)]
    wrap = sandbox.wrap
    monkeypatch.setattr(
        sandbox,
        "wrap",
        lambda arguments, work, reads, **_: wrap([*command, arguments[-2]], work, reads=[*reads, tmp_path]),
    )
    found = tried(tmp_path, text())
    assert (found.status, "took the process" in found.reason) == (Readiness.CRASHED, True)


@pytest.mark.parametrize("shape", [[1 << 40], [1 << 62], [1 << 90], [-4], [[4]], ["4"], 4])
def test_a_case_whose_tensors_cannot_be_is_a_crash(shape, tmp_path) -> None:
    found = entry(tmp_path, text())
    named = Tensor("x", "float32", (4,))
    task = Operation(found.name, revision=found.revision, inputs=(named,), outputs=(replace(named, name="out"),))
    header = {"task": json.loads(to_json(task)), "tensors": [["given", "x", "float32", shape]], "bounds": {}}
    (tmp_path / "result.json").write_text(json.dumps(header))
    (tmp_path / "tensors").write_bytes(b"x" * 16)
    with pytest.raises(Exception, match="no case"):
        _read_case(tmp_path, found)


def test_what_is_no_file_of_the_checkouts_own_is_refused_unread(tmp_path) -> None:
    level = tmp_path / "level1"
    level.mkdir()
    os.mkfifo(level / "1_Pipe.py")
    (level / "2_Link.py").symlink_to(SECRET)
    (level / "3_Long.py").write_bytes(b"#" * (1 << 21))
    (level / "4_Changed.py").write_text("a")
    found = entries(tmp_path)
    (level / "4_Changed.py").write_text("b")
    examined = [examine(each, EFFORT) for each in found]
    assert {each.status for each in examined} == {Readiness.MALFORMED}
    for each, says in zip(examined, ("regular", "regular", "longer", "changed"), strict=True):
        assert says in each.reason


def test_a_result_is_read_as_data(tmp_path) -> None:
    found = entry(tmp_path, text())
    honest = Examined(found.name, Readiness.MALFORMED, "a reason")
    (tmp_path / "result.json").write_text(to_json(honest))
    assert to_json(_read_examined(tmp_path, found)) == to_json(honest)
    for lie in (
        "[]",
        "{}",
        to_json(honest).replace("a reason", "\\u001b[2J"),
        to_json(honest).replace("Task", "Other"),
        "[" * 10**5,
    ):
        (tmp_path / "result.json").write_text(lie)
        with pytest.raises(Exception, match="no result"):
            _read_examined(tmp_path, found)
