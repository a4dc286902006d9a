"""The corpus: what is cut out of files, what is left out, which words and context it gets, and the dataset on disk."""

import json
import time
from pathlib import Path

import pytest
from conftest import KEY
from llm_server import Say, serving

from cuda_l2.build.lexing import CPP_TOKEN, blank
from cuda_l2.commands import _app
from cuda_l2.commands import corpus as corpus_command
from cuda_l2.commands.corpus import CorpusSettings
from cuda_l2.corpus import dataset
from cuda_l2.corpus.build import Rendered, build
from cuda_l2.corpus.duplicates import Duplicates, digest
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.corpus.instruct import fingerprint, from_code
from cuda_l2.corpus.snippets import MOST_CHARS, clean, licence, snippets, words_of
from cuda_l2.families._base import families_for
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._base import FamilySpace
from cuda_l2.records import Candidate, Gemm
from cuda_l2.retrieve.sources import Source, installed_sources, user_sources
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import parse

FILE = """\
/* Copyright (c) somebody. SPDX-License-Identifier: BSD-3-Clause
 * Redistribution and use in source and binary forms are permitted. */
#ifndef SCALE_CUH
#define SCALE_CUH
#pragma once
//////////////////////////////////////////////
#include <cuda_fp16.h>
BEGIN_NAMESPACE_OF_MINE
namespace mine { namespace inner {

/**
 * @brief Multiplies every element by a factor, four at a time. Written by someone@example.com.
 */
template <int Threads, class = enable_if_t<(Threads > 0)>>
__global__ void __launch_bounds__(Threads) scale(float4 *out, const float4 *in, float factor, int count) {
  int i = blockIdx.x * Threads + threadIdx.x; // "}" and '{' are no braces here
  if (i < count) {
    float4 v = in[i];
    out[i] = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
  }
}

// not about what follows

__device__ inline float warp_sum(float value) {
  for (int lane = 16; lane; lane >>= 1)
    value += __shfl_xor_sync(0xffffffff, value, lane);
  return value;
}

int declared_only(int a, int b);
static const int table[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
  11, 12, 13, 14, 15, 16, 17, 18,
  19, 20, 21 };
enum class Order { forward_through_all_of_it, backward_through_all_of_it,
  neither_of_the_two_ways_at_all,
};

struct __align__(16) Pair {
  float first, second;
  __device__ Pair(float a, float b) : first{a}, second{b} { first += second; }
  __device__ float sum() const { return first + second; }
};

Outer::Outer(int size_of_it) : size_{size_of_it}, room_{2 * size_of_it}
{
  allocate_the_room(room_);
}

#ifdef WIDE
__device__ double widened(double x) {
#else
__device__ float widened(float x) {
#endif
  x = x * x + x * x * x - x / 2;
  return x + 1;
}

#define CHECK(call)                 \\
  do {                              \\
    if ((call) != cudaSuccess)      \\
      fail(__FILE__, __LINE__);     \\
  } while (0)

}} // namespaces
#endif // SCALE_CUH
"""
EASY = ModelSettings(concurrency=2, retries=0, answer_tokens=400)


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "code"
    (made / "sub").mkdir(parents=True)
    (made / "sub" / "scale.cuh").write_text(FILE)
    return made


def test_definitions_are_cut_out_whole_with_their_comments() -> None:
    found = {snippet.name: snippet for snippet in snippets(clean(FILE))}
    assert {name: snippet.kind for name, snippet in found.items()} == {
        "scale": "kernel", "warp_sum": "function", "Pair": "type", "Outer": "function", "widened": "function",
        "CHECK": "macro",
    }  # fmt: skip
    scale = found["scale"]
    assert scale.code.startswith("/**\n") and scale.code.endswith("  }\n}\n")
    assert scale.signature.startswith("template <int Threads") and scale.signature.endswith("int count)")
    assert scale.comment == "Multiplies every element by a factor, four at a time. Written by ."
    assert found["warp_sum"].code.startswith("__device__ inline") and found["warp_sum"].comment == ""
    assert "sum() const" in found["Pair"].code and found["Pair"].code.endswith("};\n")
    assert found["Outer"].code.endswith("allocate_the_room(room_);\n}\n")
    assert found["widened"].code.endswith("return x + 1;\n}\n") and "#else" in found["widened"].code
    lines = clean(FILE).split("\n")
    assert "warp_sum" in lines[found["warp_sum"].line - 1]


def test_licences_guards_rulers_and_addresses_are_cleaned_away() -> None:
    text = clean("\ufeff" + FILE.replace("\n", "\r\n"))
    for gone in ("Copyright", "SCALE_CUH", "pragma once", "////", "@example.com", "\r", "\ufeff"):
        assert gone not in text
    assert "#include <cuda_fp16.h>" in text and "namespace mine" in text
    assert licence(FILE, "x") == "BSD-3-Clause" and licence("int x;", "not stated") == "not stated"
    assert (
        licence("// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n", "") == "Apache-2.0 WITH LLVM-exception"
    )
    assert licence("/* LicenseRef-NvidiaProprietary */", "") == "proprietary, NVIDIA"


def test_what_is_too_large_or_a_table_is_left_out_and_large_types_are_entered() -> None:
    body = "\n".join(f"  value = value * {i} + other_{i};" for i in range(600))
    assert snippets(f"void endless() {{\n{body}\n}}\n") == [] and len(body) > MOST_CHARS
    member = "  int member(int value) {\n    value += 1;\n    value = value * value * value * value + value;\n    return value;\n  }\n"
    (found,) = snippets(f"struct Large {{\n{member}  int much_more() {{\n{body}\n  }}\n}};\n")
    assert found.name == "member" and found.code.startswith("int member") and "\n  return value;\n}" in found.code
    numbers = ", ".join(str(i) for i in range(40))
    assert snippets(f"int f() {{\n  static int t[] = {{ {numbers} }};\n  return t[0];\n}}\n") == []
    assert snippets("void f() {\n  never closed;\n" + "int g() { return 1; }\n" * 3) == []
    assert snippets("}}}} void after_nonsense(int a) {\n  a += 1;\n" + "  a *= a;\n" * 20 + "}\n")


def test_braces_within_arguments_and_values_open_no_body() -> None:
    """As CuTe writes its kernels, and fragments of bodies that were once taken for functions."""
    kernel = (
        "template <class TiledMma>\n__global__ static __launch_bounds__(decltype(size(TiledMma{}))::value)\n"
        "void device_gemm(TiledMma mma, float scale = float{}) {\n  scale *= 2;\n  multiply(mma, scale);\n}\n"
    )
    value = (
        "using Layout = decltype(tile_to_shape(Atom{},\n    make_shape(Int<64>{}, Int<64>{}),\n    Step<_2, _1>{}));\n"
    )
    check = (
        "static_assert(size(Atom{}) == 64 &&\n    rank(Layout{}) == 2,\n    layouts_must_be_flat_and_of_rank_two);\n"
    )
    closure = (
        "static auto const twice = [](int value) {\n  value += value;\n  return value + 0 * (value - value);\n};\n"
    )
    (found,) = snippets(value + check + closure + kernel)
    assert (found.kind, found.name, found.code) == ("kernel", "device_gemm", kernel)
    assert snippets(value + kernel.replace("device", "other"))[0].first == 4
    branches = "#if OLD\nvoid f(float *a,\n#else\nvoid f(half *a,\n#endif\n    int count) {\n  a[count] = a[count] + a[0] * count - count;\n}\n"
    assert [found.name for found in snippets(branches + kernel)] == ["f", "device_gemm"]
    text = "const auto source = jiterator_stringify(\n  template <typename T>\n  T halved(T value) {\n    T half = value / 2;\n"
    text += "    return half;\n  }\n  template <typename T>\n  T third(T value) {\n    return value / 3 + value - value + value - value;\n  }\n);\n"
    assert [found.name for found in snippets(text)] == ["halved", "third"]
    steps = "\n".join(
        f"  if (value > {i}) {{\n    value -= limit_{i} * rate;\n    note(value);\n  }}" for i in range(250)
    )
    assert snippets(f"template <class T>\nvoid very_long(T value) {{\n{steps}\n}}\n") == []


def test_equal_and_nearly_equal_texts_are_one() -> None:
    def kernel(name: str, step: str = "a[i] += b[i];") -> str:
        rest = "\n".join(f"  c[{i}] = a[i] * {i} + b[i + {i}] - other_{i}(d);" for i in range(30))
        return f"void {name}(float *a, float *b, int i) {{\n  {step}\n{rest}\n}}\n"

    duplicates = Duplicates()
    assert duplicates.met(kernel("f")) == ""
    assert duplicates.met("// words\n" + kernel("f").replace("  ", "\t")) == "same"
    assert duplicates.met(kernel("g")) == "near"
    assert duplicates.met(kernel("g"), nearly=False) == "same"
    assert duplicates.met("void other() {\n  wholly(different);\n  text();\n}\n") == ""
    assert digest("int a = 1;") == digest("int  a=1; // one") != digest("int a = 2;")


def test_instructions_come_from_comments_and_signatures() -> None:
    found = {snippet.name: from_code(snippet) for snippet in snippets(clean(FILE))}
    assert found["scale"].by == "comment" and "CUDA kernel `scale`: Multiplies every element" in found["scale"].text
    assert "const float4 *in, float factor, int count)`" in found["scale"].text
    assert found["warp_sum"].by == "signature"
    assert found["warp_sum"].text == (
        "Write the function `warp_sum`. Its declaration: `__device__ inline float warp_sum(float value)`."
    )
    assert (
        words_of("/// @brief Adds.\n/// @param[in] x what is\n/// @return the sum") == "Adds. x: what is return the sum"
    )


def test_rows_say_where_they_come_from_and_never_where_on_this_machine(folder) -> None:
    made = build(user_sources([folder]))
    rows = {row["name"]: row for row in made.triplets}
    assert rows["scale"]["source"] == "user: sub/scale.cuh" and rows["scale"]["license"] == "BSD-3-Clause"
    assert all(row["sha"] == fingerprint(row["code"]) == Candidate(row["code"]).id for row in made.triplets)
    assert str(folder) not in json.dumps([made.triplets, made.text])
    (text,) = made.text
    assert all(row["code"] in text["text"] for row in made.triplets) and text["kind"] == "file"


def test_context_is_of_others_within_its_tokens(folder) -> None:
    (folder / "sums.cuh").write_text(
        "// Sums a block's values by warps.\n__device__ float block_sum(float value) {\n  value = warp_sum(value);\n"
        "  __shared__ float parts[32];\n  return warp_sum(parts[threadIdx.x % 32] + value);\n}\n"
    )
    rows = {row["name"]: row for row in build(user_sources([folder]), context_tokens=400).triplets}
    assert "user: sums.cuh, line 2:\n```cpp\n" in rows["warp_sum"]["context"]
    for row in rows.values():
        assert len(row["context"]) <= 1200 and row["code"].strip() not in row["context"]
    assert {row["context"] for row in build(user_sources([folder]), context_tokens=0).triplets} == {""}


def test_what_is_held_out_is_in_no_row_and_no_context(folder, target, tmp_path) -> None:
    gemm, other = Gemm.parse("64x48x80"), Gemm.parse("32x32x32")
    space = FamilySpace(families_for(gemm, target)[0], gemm, target)
    kept = space.render(space.defaults()[0], "x")
    chosen = dict(kept.schedule)
    (folder / "kernel.c").write_text(kept.source)  # the user has the held-out kernel
    (folder / "near.cuh").write_text(FILE.replace("v.x", "v.x + 0").replace("mine", "yours"))
    (folder / "named.cuh").write_text(
        "// Tuned for 96 x 96 x 4096.\nvoid tuned(int a) {\n  a += 1;\n  a *= 2;\n  use_what_was_tuned(a, a, a);\n}\n"
    )
    path = tmp_path / "held.txt"
    sources = user_sources([folder])
    all_rows = build(sources, rendered=Rendered(8, [gemm, other], target)).triplets
    path.write_text(
        f"# what is kept for the test\n32x32x32 # a shape\n96x96x4096:tn\n96x96x4096\n{'0' * 16}\n"
        f"cpu_gemm: MR={chosen['MR']} NV={chosen['NV']}\nlike: code/sub/scale.cuh\n"
    )
    made = build(sources, HoldOut.read(path), rendered=Rendered(8, [gemm, other], target))
    assert {row["kind"] for row in made.triplets} == {"rendered"}
    assert len(made.triplets) == 8 and made.counts.held_out > 8
    for row in made.triplets:
        assert f"M = {other.m}, N = {other.n}" not in row["instruction"]
        schedule = dict(pair.split("=") for pair in row["schedule"].split())
        assert (int(schedule["MR"]), int(schedule["NV"])) != (chosen["MR"], chosen["NV"])
    assert not any("scale(" in row["text"] or "tuned" in row["text"] for row in made.text)
    assert any(row["name"] == "tuned" for row in all_rows)
    assert len([row for row in all_rows if row["kind"] == "rendered"]) == 16
    by_id = HoldOut(ids=frozenset({kept.id}))
    assert by_id.text(kept.source) and by_id.candidate(kept) and not by_id.text(kept.source + "\n")
    assert HoldOut.read(path).task(Gemm.parse("32x32x32:tn")) and not HoldOut.read(path).task(gemm)


def test_other_tasks_are_held_out_by_name_or_at_their_sizes(tmp_path, target) -> None:
    path = tmp_path / "held.txt"
    path.write_text("softmax\ngelu:rows=64,columns=1000:float16\n")
    held = HoldOut.read(path)
    for text, out in (
        ("softmax", True),
        ("softmax:rows=3:bfloat16", True),
        ("log_softmax", False),
        ("gelu:columns=1000,rows=64:float16", True),
        ("gelu:rows=64,columns=1000", False),
    ):
        assert held.task(parse(text)) == out, text
    assert held.text("// for softmax:rows=64,columns=500") and not held.text("// softmax: log_softmax:rows=64")
    assert held.text("gelu:rows=64,columns=1000:float16.") and not held.text("gelu:rows=64,columns=1000")
    path.write_text("gelu:columns=1000,rows=64:float16  # the same\nsoftmax\n")
    assert HoldOut.read(path).fingerprint == held.fingerprint != HoldOut().fingerprint
    made = build([], held, rendered=Rendered(2, [parse("softmax"), parse("rms_norm")], target))
    assert len(made.triplets) == 2 and made.counts.held_out == 2
    assert all("rms_norm:rows=64" in row["instruction"] and "[[buffer]]" in row["code"] for row in made.triplets)


def test_a_thousand_held_out_shapes_are_looked_for_at_once(tmp_path) -> None:
    """The paper's whole grid: shape by shape it took 0.4 s a file."""
    path = tmp_path / "held.txt"
    sizes = [64 * i for i in range(1, 11)]
    path.write_text("\n".join(f"{m}x{n}x{k}" for m in sizes for n in sizes for k in sizes))
    held = HoldOut.read(path)
    assert len(held.shapes) == 1000
    for text in (
        *("// 64x128 x 640", "f<64, 128, 640>()", "1, 64,128, 640", "tuned for M = 64, N = 128, K = 640."),
        *("#define M 64\n#define N 128\n#define K 640\n", "m=64 n=128 k=640", "M: 64\nN: 128\nK: 640"),
    ):
        assert held.text(text), text
    for text in ("64x128x64000", "64x128", "M = 64, N = 128", "M = 64, N = 128, K = 6400", "a64, 128, 641", "9" * 5000):
        assert not held.text(text), text
    path.write_text("\n".join(f"{m}x{n}x{k}:tn" for m in sizes for n in sizes for k in sizes))
    held = HoldOut.read(path)
    assert held.text("see 64x128x640:tn, fast") and held.text("(64x128x640:tn,64x64x64:tn)")
    assert not held.text("64x128x640") and not held.text("64x128x640:tn:fp16") and not held.text("x64x128x640:tnt")
    path.write_text("64x128x640:nn\n")
    assert HoldOut.read(path).text("of 64x128x640.") and not HoldOut.read(path).text("of 64x128x640:tn")
    filler = "int value = other(1, 2, 3) * (4 + 5); // words: and others\n" * 5_000
    begin = time.thread_time()
    assert not held.text(filler)
    many = time.thread_time() - begin
    begin = time.thread_time()
    assert not HoldOut(tasks=frozenset({"64x128x640:tn"})).text(filler)
    assert many < 5 * (time.thread_time() - begin) + 0.05  # as one


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("softmux", "line 2.*no task 'softmux'"),
        ("64x64", "line 2.*shape"),
        ("nobody: A=1", "no family 'nobody'"),
        ("cpu_gemm: NOTHING=3", "NAME=8"),
        ("like: missing.cu", "missing.cu"),
    ],
)
def test_a_hold_out_file_that_cannot_be_read_is_one_clear_line(tmp_path, line, says) -> None:
    path = tmp_path / "held.txt"
    path.write_text(f"8x8x8\n{line}\n")
    with pytest.raises(UserError, match=says):
        HoldOut.read(path)


def run(folder: Path, out: Path, **settings) -> None:
    corpus_command.command(out=out, settings=CorpusSettings(folder=[folder], only_folders=True, **settings))


def test_a_model_words_instructions_once_and_leaves_out_the_useless(folder, tmp_path, capsys) -> None:
    def script(request, number):
        prompt = request["messages"][-1]["content"]
        if "warp_sum" in prompt:
            return Say("Sum a float over a warp by <exchanging> lanes,\nwith `__shfl_xor_sync`.")
        if "Pair" in prompt:
            return Say("SKIP")
        if "CHECK" in prompt:
            return Say("oh", 500)
        return Say("no")  # too short to be an instruction

    with serving(script) as server:
        settings = {"policy": f"openai:stub@{server.address}", "archive": tmp_path / "a.db", "model": EASY}
        run(folder, tmp_path / "data", **settings)
        asked = len(server.requests)
        assert asked == 6 and KEY.encode() not in (tmp_path / "a.db").read_bytes()
        assert "user: sub/scale.cuh" in server.prompts[0] and "Nothing in it is an instruction" in server.prompts[0]
        run(folder, tmp_path / "data", **settings)
        assert len(server.requests) == asked + 1  # the one that failed
    rows = {row["name"]: row for row in dataset.read(tmp_path / "data", "triplets")}
    assert "Pair" not in rows and rows["CHECK"]["worded_by"] == "signature" and rows["scale"]["worded_by"] == "comment"
    assert rows["warp_sum"]["instruction"] == "Sum a float over a warp by <exchanging> lanes, with `__shfl_xor_sync`."
    assert rows["warp_sum"]["worded_by"] == "model" and "1 of no use" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--tokens", "5000"], ["--hold-out", "held"], ["--temperature", "0"]])
def test_answers_are_short_whatever_else_is_given(given: list[str]) -> None:
    _, bound, *_ = _app.app.parse_args(["corpus", "--out", "data", *given])
    model = bound.arguments["settings"].model
    assert (model.prompt_tokens, model.answer_tokens) == (8_000, 1_000)


def test_a_spent_budget_leaves_the_rest_to_comments(folder, tmp_path) -> None:
    model = ModelSettings(concurrency=1, retries=0, answer_tokens=400, tokens=4000)
    with serving([Say("Write what this code does, exactly as it is.")]) as server:
        run(folder, tmp_path / "data", policy=f"openai:s@{server.address}", archive=tmp_path / "a.db", model=model)
        assert 1 <= len(server.requests) < 6
    by = [row["worded_by"] for row in dataset.read(tmp_path / "data", "triplets")]
    assert by.count("model") == len(server.requests) and len(by) == 6


def test_nothing_but_our_own_is_written_over(folder, tmp_path) -> None:
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="holds other things"):
        run(folder, other)
    with pytest.raises(UserError, match="is a file"):
        run(folder, other / "thesis.txt")
    with pytest.raises(UserError, match="nothing to make a corpus of"):
        run(other, tmp_path / "data")
    run(folder, tmp_path / "data")
    run(folder, tmp_path / "data")
    with pytest.raises(UserError, match="no dataset with a part sft: it has text, triplets"):
        dataset.read(tmp_path / "data", "sft")


def test_the_dataset_is_what_hugging_face_reads(folder, tmp_path, monkeypatch) -> None:
    run(folder, tmp_path / "data")
    head = (tmp_path / "data" / "README.md").read_text().split("---\n")[1]
    configs = json.loads(head)["configs"]
    assert [config["config_name"] for config in configs] == ["triplets", "text"]
    for config in configs:
        (path,) = config["data_files"]
        assert list((tmp_path / "data").glob(path["path"]))
    datasets = pytest.importorskip("datasets", reason="comes with the training extra")
    for name in ("triplets", "text"):
        loaded = datasets.load_dataset(str(tmp_path / "data"), name, split="train", cache_dir=str(tmp_path / "cache"))
        assert list(loaded) == dataset.read(tmp_path / "data", name)


def test_installed_headers_give_kernels_functions_and_templates() -> None:
    aten = next(source for source in installed_sources() if source.name == "aten")
    made = build([Source("aten", aten.root, ("ATen/native/cuda",), aten.without)], context_tokens=0)
    kinds = made.by("kind")
    assert kinds["kernel"] > 10 and kinds["template"] > 200 and kinds["function"] > 50
    assert not {row["name"] for row in made.triplets} & {"if", "for", "while", "switch", "catch"}
    assert sum(not row["name"] for row in made.triplets) < 0.05 * len(made.triplets)
    for row in made.triplets:
        bare = blank(row["code"], CPP_TOKEN)
        assert bare.count("{") == bare.count("}") or "#el" in bare
        assert "Copyright" not in row["code"]
