"""Retrieval: what is indexed, refreshed, found, and how much of it a prompt takes."""

import fcntl
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from llm_server import Say, serving
from test_llm_prompts import TARGETS
from waiting import kill_when

from cuda_l2.archive import Archive
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._base import Hooks
from cuda_l2.propose._model_policy import ModelPolicy
from cuda_l2.propose._references import excerpts, query
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, Trial
from cuda_l2.retrieve.chunks import MOST_CHARS, MOST_LINES, chunks, words
from cuda_l2.retrieve.index import Index, index_folder, refresh
from cuda_l2.retrieve.sources import Source, files, installed_sources, user_sources
from cuda_l2.system.errors import UserError

COPY = """// Copyright (c) somebody. All rights reserved.
// Licensed under some licence.

#pragma once

/// Copies sixteen bytes from global to shared memory without passing registers.
__device__ void copy_async_16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global));
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "code"
    made.mkdir()
    (made / "copy.cuh").write_text(COPY)
    (made / "same.cuh").write_text(COPY)  # the same piece twice
    (made / "near.cuh").write_text(COPY.replace("sixteen bytes", "16 bytes, or so,"))
    (made / "vector.h").write_text("inline __m512 widen(__m256i half) { return _mm512_cvtph_ps(half); }\n")
    (made / "notes.txt").write_text("cp.async is not code here")
    return made


def test_one_refresh_waits_for_another(cache, folder, monkeypatch) -> None:
    sources, flock, asking = user_sources([folder]), fcntl.flock, threading.Event()
    seen = []

    def asked(lock, kind: int) -> None:
        if threading.current_thread() is thread:
            asking.set()
        flock(lock, kind)

    def other() -> None:
        refresh(sources, lambda progress: seen.append("second"), anew=True)

    thread = threading.Thread(target=other)

    def first(progress) -> None:
        if not seen:
            thread.start()
            asking.wait()
        seen.append("first")

    monkeypatch.setattr(fcntl, "flock", asked)
    refresh(sources, first)
    thread.join()
    assert seen == ["first", "second"] and Index().search("cp.async")


def test_words_are_identifiers_whole_and_in_parts() -> None:
    assert set(words("SM90_TMA_LOAD_2D")) >= {"sm90_tma_load_2d", "sm90", "sm", "90", "tma", "load"}
    assert set(words("warpGroupArrive x")) == {"warpgrouparrive", "warp", "group", "arrive"}
    assert "cp" in words("cp.async") and "async" in words("cp.async")


def test_pieces_are_whole_lines_of_bounded_size_without_licences() -> None:
    (piece,) = chunks(COPY)
    assert piece.text.startswith("#pragma once") and "Copyright" not in piece.text
    assert COPY.split("\n")[piece.line - 1] == "#pragma once"
    text = "\n".join(f"int f{i}(); {'// ' + 'x' * (i % 7)}" + ("\n" if i % 9 == 0 else "") for i in range(900))
    pieces = chunks(text)
    assert all(len(p.text.split("\n")) <= MOST_LINES and len(p.text) <= MOST_CHARS for p in pieces)
    for i in range(900):
        assert sum(f"int f{i}()" in p.text for p in pieces) == 1
    lines = text.split("\n")
    assert all(lines[p.line - 1].rstrip() == p.text.split("\n")[0] for p in pieces)
    assert chunks("") == [] and len(chunks("y" * 1_000_000)) == 1


def test_the_index_finds_names_what_it_finds_and_shows_nothing_twice(cache, folder) -> None:
    progress = refresh(user_sources([folder]))
    assert (progress.files, progress.read, progress.pieces) == (4, 4, 3)
    index = Index()
    found = index.search("cp.async shared global 16 bytes")
    assert found[0].name.startswith("user: ") and "cp.async" in found[0].text
    assert len([piece for piece in found if "copy_async_16" in piece.text]) == 1  # same and near are one
    assert found[0].text.startswith("#pragma once") and found[0].line == 4
    assert index.search("widen half vector cvtph")[0].name == "user: vector.h"
    assert index.search("nothing of the kind") == [] and index.search("cp.async", sources=("cuda",)) == []
    index.close()


def test_only_what_changed_is_read_again(cache, folder) -> None:
    sources = user_sources([folder])
    refresh(sources)
    assert refresh(sources).read == 0
    (folder / "vector.h").write_text("void wholly_new_name();\n")
    os.utime(folder / "vector.h", ns=(1, 1))
    (folder / "near.cuh").unlink()
    progress = refresh(sources)
    assert (progress.read, progress.removed) == (1, 1)
    index = Index()
    assert index.search("wholly_new_name")[0].name == "user: vector.h" and index.search("cvtph") == []
    index.close()
    assert len([path for path in index_folder().iterdir() if path.is_dir()]) == 1  # older ones are gone


def test_an_interrupted_build_goes_on(cache, tmp_path) -> None:
    code = tmp_path / "much"
    code.mkdir()
    for i in range(400):
        (code / f"file{i}.h").write_text("\n".join(f"void name_{i}_{j}();" for j in range(60)))
    script = (
        "import sys, signal; from pathlib import Path; from cuda_l2.retrieve import index, sources;"
        "wait = lambda progress: progress.read >= 200 and signal.pause();"
        "index.refresh(sources.user_sources([Path(sys.argv[1])]), wait)"
    )
    kill_when(lambda: _files_read(cache) >= 100, [sys.executable, "-c", script, code])
    before = _files_read(cache)
    assert 100 <= before < 400
    with pytest.raises(UserError, match="cuda-l2 index"):
        Index()  # half an index is none
    progress = refresh(user_sources([code]))
    assert progress.files == 400 and progress.read == 400 - before
    index = Index()
    assert "name_399_7" in index.search("name_399_7")[0].text
    index.close()


def _files_read(cache: Path) -> int:
    import sqlite3  # noqa: PLC0415

    try:
        with sqlite3.connect(next(cache.glob("retrieve/pieces-*.db"))) as db:
            return db.execute("SELECT count(*) FROM files WHERE source = 'user'").fetchone()[0]
    except (StopIteration, sqlite3.Error):
        return 0


def test_without_an_index_the_command_to_build_it_is_named(cache) -> None:
    with pytest.raises(UserError, match="cuda-l2 index"):
        Index()


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        user_sources([tmp_path / "nowhere"])


def test_files_that_lead_out_of_a_folder_are_left_alone(folder, tmp_path) -> None:
    (tmp_path / "private.h").write_text("int secret;")
    (folder / "link.h").symlink_to(tmp_path / "private.h")
    (folder / "loop").symlink_to(folder)
    (folder / "big.h").write_text("x" * (2 << 20))
    (source,) = user_sources([folder])
    assert {file.path.name for file in files(source)} == {"copy.cuh", "same.cuh", "near.cuh", "vector.h"}


def test_a_search_quotes_from_the_index(cache, folder, tmp_path) -> None:
    refresh(user_sources([folder]))
    target, settings = TARGETS["cpu"], ModelSettings(concurrency=1, repairs=0)
    with serving([Say("no code")]) as server, Archive(tmp_path / "archive.db"):
        policy = ModelPolicy(f"openai:stub@{server.address}", settings, tmp_path / "archive.db")
        rng, stages = np.random.default_rng(0), []
        proposer = policy.proposer(Gemm(64, 64, 64), target, list, rng, Hooks(on_stage=stages.append))
        assert proposer.propose(1) == []
        policy.close()
    assert "user: vector.h, line 1" in server.prompts[0] and "_mm512_cvtph_ps" in server.prompts[0]
    assert stages[0] == "waiting for openai:stub"
    held = tmp_path / "held.txt"
    held.write_text("like: code/vector.h\n")
    with serving([Say("no code")]) as server:
        hidden = HoldOut.read(held).text
        policy = ModelPolicy(f"openai:stub@{server.address}", settings, tmp_path / "archive.db", "collect 0", hidden)
        policy.proposer(Gemm(64, 64, 64), target, list, rng, Hooks(on_stage=stages.append)).propose(1)
        policy.close()
    assert server.prompts and "_mm512_cvtph_ps" not in server.prompts[0]


def test_the_installed_headers_answer_what_kernels_ask(cache) -> None:
    """On CUTLASS's and CUDA's headers alone, which every developer has installed."""
    sources = {source.name: source for source in installed_sources()}
    assert {"aten", "cccl", "cuda", "cutlass"} <= set(sources)
    cute = Source("cutlass", sources["cutlass"].root, ("include/cute/arch",))
    progress = refresh([cute, sources["cuda"]])
    assert progress.files > 100
    index = Index()
    for text, name in (
        ("TMA load 2d multicast", "copy_sm90_tma.hpp"),
        ("wgmma m64n256k16 f32 f16", "mma_sm90_gmma.hpp"),
        ("ldmatrix x4 transposed", "copy_sm75.hpp"),
        ("cluster arrive wait barrier", "cluster_sm90.hpp"),
        ("cp.async commit group", "copy_sm80.hpp"),
        ("half2 fused multiply add hfma2", "cuda_fp16"),
    ):
        assert any(name in piece.name for piece in index.search(text, 8)), text
    assert index.search("fp16 load fp16") == index.search("fp16 load")
    target = TARGETS["cuda"]
    for accumulate, types in (("fp32", "f32 f16"), ("fp16", "f16")):
        words = query(Gemm(64, 64, 64, accumulate=accumulate), target, [])
        assert words.endswith(f" pipeline {types}")
        assert any("mma_sm90_gmma" in piece.name for piece in index.search(words, 3))
    build = Build("x", BuildStatus.FAILED, reason="identifier cooperative_groups is undefined")
    failure = Trial(Gemm(64, 64, 64), Candidate("x"), "m", "search", build)
    for tokens in (0, 500, 3000):
        found = excerpts(index, target, query(Gemm(64, 64, 64), target, [failure]), tokens, lambda text: len(text) // 3)
        assert sum(len(text) // 3 for text in found) <= tokens and bool(found) == (tokens > 0)
    assert found[0].startswith(("cutlass: ", "cuda: ")) and ", line " in found[0] and found[0].endswith("```")
    assert any("cooperative_groups" in text for text in found)  # what failed is looked up
    index.close()
