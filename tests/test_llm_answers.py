"""Reading models' answers: whatever they look like, a whole file, or why there is none."""

from pathlib import Path

import numpy as np
import pytest
from linear import require_linear

from cuda_l2.propose._answer import Fault, parse_answer

CONTRACT = '/* cuda-l2\ntarget = "cpu"\n*/\n'
FILE = CONTRACT + "#include <stdint.h>\nvoid gemm(void) { char c = '}'; /* { */ const char *s = \"}\"; }\n"
OTHER = FILE.replace("void gemm(void)", "void gemm(void) /* better */")


def block(code: str, fence: str = "```", language: str = "c") -> str:
    return f"{fence}{language}\n{code}{fence}\n"


WHOLE = {
    "as asked": f"### Performance analysis\nslow\n\n### Algorithm design\ntiles\n\n### Code\n{block(FILE)}",
    "bold headings": f"**Performance analysis:**\nslow\n**Algorithm design:**\ntiles\n**Code:**\n{block(FILE)}",
    "prose around": f"Sure! Here it is:\n\n{block(FILE)}\nI hope this helps; it runs in `O(n^3)`.",
    "no language": block(FILE, language=""),
    "tildes": block(FILE, "~~~"),
    "longer fence": block(FILE, "`````", "cpp"),
    "indented fence": f"1. the file:\n   ```c\n{FILE}   ```\n",
    "no fences": f"Here is the file:\n{FILE}That is all.",
    "Windows": block(FILE).replace("\n", "\r\n"),
    "fence never closed": f"```c\n{FILE}",
    "a draft first": block(OTHER) + "No, better:\n" + block(FILE),
    "a snippet first": block("for (;;) {}\n") + block(FILE) + block("gcc -O3 x.c\n", language="sh"),
    "a second version cut off": block(FILE) + "Even better:\n```c\n" + OTHER[:-10],
    "thoughts": f"<think>maybe\n```c\n{OTHER}```\n</think>\n{block(FILE)}",
    "contract and code apart": f"The contract:\n{block(CONTRACT)}\nThe code:\n{block(FILE[len(CONTRACT) :])}",
    "text before the contract": block("\n\n" + FILE),
    "thoughts that the prompt began": f"maybe\n```c\n{OTHER}```\n</think>\n\n{block(FILE)}",
    "a draft within an open fence": f"<think>\n```c\n{OTHER[:-10]}\n</think>\n{block(FILE)}",
    "thoughts that quote their end": f"<think>I end with `</think>`, or </think>, and write\n{block(OTHER)}</think>\n{block(FILE)}",
    "tags of another model": f"[THINK]{block(OTHER)}[/THINK]{block(FILE)}",
    "thoughts twice": f"<think>a</think>\nFirst:\n<thinking>\n{block(OTHER)}</thinking>\n{block(FILE)}\n</think>\n",
    "channels": f"<|channel|>analysis<|message|>{block(OTHER)}<|end|>assistant<|channel|>final<|message|>\n{block(FILE)}",
    "the tag as a word": f"Without a <think> block, and with no </think>:\n{block(FILE)}The tag `<think>` is not C, nor is </think>.",
    "the tag in quotation marks": f"`<think>`\n{block(FILE)}\n'</think>'\n",
}


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_a_whole_file_is_found(text) -> None:
    finish = "length" if "cut off" in text or text.endswith(OTHER[:-10]) else "stop"
    answer = parse_answer(text, finish)
    assert answer.fault is None
    assert [line for line in answer.source.splitlines() if line] == FILE.splitlines()


def test_a_file_that_mentions_tags_of_thoughts_is_whole() -> None:
    tagged = FILE + "/* <think> and\n<think>\n</think> */ // no </think>\n"
    alone = FILE + "/*\n</think>\n*/\n"
    assert parse_answer(block(alone)).source == alone
    for text in (block(tagged), f"<think>hm</think>\n{block(tagged)}"):
        assert parse_answer(text).source == tagged


PIECES = [
    CONTRACT,
    "#include <stdint.h>\n",
    *(f"static int f{i}(void) {{ return {i}; }}\n" for i in range(7)),
    "void gemm(void) {}\n",
]
TEN = "".join(PIECES)


@pytest.mark.parametrize(
    "pieces",
    [
        PIECES,
        [CONTRACT + PIECES[1] + PIECES[2], *PIECES[3:]],  # it looks whole, but lacks the function that it names
        [*PIECES, "for (;;) {}\n"],
        [OTHER, *PIECES],
        [*PIECES[1:], CONTRACT],
        [CONTRACT, "".join(PIECES[1:9]) + "void gemm(void) {\n", "}\n"],
    ],
    ids=["ten", "begun", "a snippet last", "a draft first", "contract last", "within a function"],
)
def test_a_file_in_pieces_is_put_together(pieces) -> None:
    text = block("pip install x\n", language="bash").join(
        f"Part {i}:\n{block(piece)}" for i, piece in enumerate(pieces)
    )
    lines = [line for line in parse_answer(text).source.splitlines() if line]
    assert lines == TEN.replace("{}", "{\n}" if len(pieces) == 3 else "{}").splitlines()


def test_the_last_of_ten_whole_files_counts() -> None:
    texts = [block(FILE + f"/* {i} */\n") for i in range(10)]
    assert parse_answer("or\n".join(texts)).source == FILE + "/* 9 */\n"


ROOT = Path(__file__).parents[1]
REAL = [*ROOT.glob("examples/*.cu"), *ROOT.glob("tests/cheats/honest*.c"), *ROOT.glob("tests/cuda_cheats/honest*.cu")]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_real_kernels_come_through_unchanged(path) -> None:
    source = path.read_text().strip("\n") + "\n"
    for text in (f"Here:\n{block(source)}Done.", f"Here:\n{source}Done.", f"```cuda\n{source}"):
        assert parse_answer(text).source == source


def test_the_design_is_found_by_its_heading() -> None:
    for name in ("as asked", "bold headings"):
        assert parse_answer(WHOLE[name]).design == "tiles"
    assert parse_answer(block(FILE)).design == ""


def test_an_include_before_the_contract_comes_after_it() -> None:
    answer = parse_answer(block("#include <stddef.h>\n" + FILE))
    assert answer.source.startswith(CONTRACT) and "#include <stddef.h>\n" in answer.source


def test_code_without_a_contract_goes_to_the_build_which_says_so() -> None:
    assert parse_answer(block("void gemm(void) {}\n")).source == "void gemm(void) {}\n"


@pytest.mark.parametrize(
    ("text", "finish", "fault"),
    [
        ("", "stop", Fault.NO_CODE),
        ("I cannot help with that.", "stop", Fault.NO_CODE),
        ("Use `wgmma` and TMA, in my opinion.", "stop", Fault.NO_CODE),
        ("```c\n```", "stop", Fault.NO_CODE),
        ("<think>" + block(FILE), "stop", Fault.NO_CODE),
        ("Maybe:\n" + block(FILE) + "No.\n</think>\n\n", "stop", Fault.NO_CODE),
        ("Maybe:\n" + block(FILE) + "so it is done.</think>\nI give up.", "stop", Fault.NO_CODE),
        ("A plan.\n<think>\n" + block(FILE), "length", Fault.CUT_OFF),
        ("Let me think about tiles, and then", "length", Fault.CUT_OFF),
        ("```c\n" + FILE[:-4], "length", Fault.CUT_OFF),
        ("```c\n" + FILE[:-4], "stop", Fault.CUT_OFF),
        (FILE[:-4] + "\n void f(void) {", "length", Fault.CUT_OFF),
        ("```c\n" + CONTRACT + "/* a comment that never", "stop", Fault.CUT_OFF),
    ],
)
def test_half_a_file_and_no_code_are_told_apart(text, finish, fault) -> None:
    answer = parse_answer(text, finish)
    assert answer.fault is fault and answer.source == ""


@pytest.mark.corpus(6)
@pytest.mark.parametrize(
    "piece", ["/*", "`", "```\n", "``` `", "/*  ", '"', "{", "<think>", "\n<think>\n", "<think></think>", "</think>", "\n</think> x", "\n", "/* cuda-l2", "*/", "\\\n", "'", "~~~c\n/* cuda-l2\n", " \t", '\\"', "\\'"]
)  # fmt: skip
@pytest.mark.parametrize("before", ["", "```c\n" + CONTRACT, "```c\n" + CONTRACT + '"'])
def test_megabytes_of_anything_are_read_in_linear_time(piece, before) -> None:
    require_linear(lambda text: parse_answer(before + text, "length"), piece * (400_000 // len(piece)))


def test_no_answer_makes_the_reader_fail() -> None:
    rng = np.random.default_rng(0)
    pieces = [
        "```",
        "```c\n",
        "~~~",
        "{",
        "}",
        "/*",
        "*/",
        "<think>",
        "</think>",
        "\n<think>\n",
        "\n</think>\n",
        "\n",
        "code",
        '"',
        "\\",
    ]
    pieces += [CONTRACT, FILE]
    for _ in range(2000):
        text = "".join(rng.choice(pieces, int(rng.integers(12))))
        answer = parse_answer(text, str(rng.choice(["stop", "length", ""])))
        assert bool(answer.source) != (answer.fault is not None)
