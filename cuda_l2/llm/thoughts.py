"""Cuts a reasoning model's thoughts off its answer, and nothing from a text that mentions the tags around them.

Servers that do not know a model's tags leave the thoughts in the content: between two tags, before a closing tag alone
where the chat template opened them, or after an opening tag alone where the answer was cut off in them.
"""

import re
from collections.abc import Sequence

_NAME = "(?:think|thinking|thoughts?|reasoning)"
_OPEN = rf"<{_NAME}>|(?-i:\[THINK\])|◁think▷|<\|channel\|>analysis<\|message\|>"
_CLOSE = rf"</{_NAME}>|(?-i:\[/THINK\])|◁/think▷|<\|channel\|>final<\|message\|>"
_TAG = re.compile(
    rf"(?P<first>^[ \t]*)?(?:(?<=```)|(?<![`\"']))(?:(?P<open>{_OPEN})|(?P<close>{_CLOSE}))(?!`(?!``)|[\"'])"
    r"(?P<last>[ \t]*$)?|^[ \t]{0,3}(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)$",
    re.MULTILINE | re.IGNORECASE,
)
"""Tags, with whether a line begins or ends with them, and fences. A tag that stands in quotes is a mention."""
_WORD = re.compile("think|thought|reasoning|final<", re.IGNORECASE)


def opens_thoughts(text: str) -> bool:
    """Whether the text, as a chat template's, ends with the tag that opens thoughts."""
    tags = list(_TAG.finditer(text, max(0, len(text) - 100)))
    return bool(tags and tags[-1]["open"] and not text[tags[-1].end() :].strip())


def without_thoughts(text: str) -> str:
    """The answer without thoughts. Takes linear time.

    Thoughts begin with a tag outside of a fence: at the answer's beginning, alone on a line, or first on a line and
    closed later. They end with the next closing tag that begins or ends a line, or else with the next one. Where none
    was opened, they end with a closing tag alone on a line, also in a fence that they left open, or right behind the
    last word of a line outside of fences.
    """
    if not _WORD.search(text):
        return text
    tags = list(_TAG.finditer(text))
    closings = _closings(tags)
    beginning = len(text) - len(text.lstrip())
    kept: list[str] = []
    start, i, fence = 0, 0, ""
    while i < len(tags):
        tag = tags[i]
        first, last = tag["first"] is not None, tag["last"] is not None
        if mark := tag["fence"]:
            if not fence:
                fence = mark
            elif mark.startswith(fence) and not tag["info"].strip():
                fence = ""
        elif tag["open"]:
            closed = closings[i]
            if first and not fence and (closed or last or tag.start("open") == beginning):
                kept.append(text[start : tag.start()])
                if not closed:
                    return "".join(kept)
                start, i = tags[closed].end(), closed
        elif last and not kept and (not _within(tags, i) if fence else first or not text[tag.start() - 1].isspace()):
            start, fence = tag.end(), ""
        i += 1
    return "".join([*kept, text[start:]])


def _within(tags: Sequence[re.Match[str]], i: int) -> bool:
    """Whether a closing tag in a fence is a line of the fenced text: not alone on it, or the fence is closed next."""
    following = tags[i + 1] if i + 1 < len(tags) else None
    closed = following is not None and following["fence"] and not following["info"].strip()
    return bool(tags[i]["first"] is None or closed)


def _closings(tags: Sequence[re.Match[str]]) -> list[int]:
    """For each tag the index of the closing tag that would end thoughts opened there; 0 for none."""
    found: list[int] = []
    at_an_edge = anywhere = 0
    for i in range(len(tags) - 1, -1, -1):
        found.append(at_an_edge or anywhere)
        if tags[i]["close"]:
            anywhere = i
            if tags[i]["first"] is not None or tags[i]["last"] is not None:
                at_an_edge = i
    return found[::-1]
