"""What tests draw without a seed is the same on the same tree, here and in the processes they start."""

import secrets
import subprocess
import sys

import chance
import numpy as np
import torch
from pool_servants import FOLDER

from cuda_l2.evaluator import Evaluator
from cuda_l2.records import Gemm

DRAWS = "import chance, secrets; chance.install(setattr); print(secrets.randbits(48))"


def drawn() -> tuple[int, float, float]:
    return secrets.randbits(48), float(np.random.default_rng().random()), float(torch.rand(()))


def test_a_test_draws_the_same_again_and_another_test_other_numbers(request) -> None:
    first = drawn()
    assert drawn() != first, "each drawing is another"
    chance.begin(request.node.nodeid)
    assert drawn() == first
    chance.begin("another test")
    assert drawn() != first


def test_evaluators_draw_by_it_and_a_seed_that_is_given_stays(rig) -> None:
    chance.begin("one test")
    seeds = [Evaluator(Gemm(8, 8, 8), rig)._seed for _ in range(2)]
    chance.begin("one test")
    assert [Evaluator(Gemm(8, 8, 8), rig)._seed for _ in range(2)] == seeds and len(set(seeds)) == 2
    assert np.random.default_rng(3).random() == np.random.Generator(np.random.PCG64(3)).random()


def test_what_tests_share_is_drawn_by_its_own_name_and_leaves_theirs_alone() -> None:
    chance.begin("one test")
    alone = secrets.randbits(48)
    for name in ("one test", "another test"):
        chance.begin(name)
        with chance.apart("what they share"):
            shared = secrets.randbits(48)
        with chance.apart("what they share"):
            assert secrets.randbits(48) == shared
        assert (secrets.randbits(48) == alone) == (name == "one test")


def test_a_process_that_a_test_starts_draws_by_it_too(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    chance.begin("one test")
    started = [subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True).stdout for _ in range(2)]
    assert started == [f"{secrets.randbits(48)}\n"] * 2
