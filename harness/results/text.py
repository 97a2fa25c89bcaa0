"""Text that somebody else wrote (a model, a file, a data set) made safe to show."""

from __future__ import annotations

import re

# C0 controls (without tab and line end), DEL, and C1 controls.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile("\r\n|[\r\u2028\u2029\x85\x0b\x0c]")
# A spreadsheet takes a cell that starts so for a formula.
_FORMULA = re.compile(r"\s*[=+\-@|]")


def visible(text: str) -> str:
    r"""The text with line ends as ``\n`` and what cannot be shown made visible.

    Control characters become their pictures (NUL is ␀); halves of characters become ``\ud83d``.
    """
    text = _LINE_END.sub("\n", text)
    text = _CONTROL.sub(_picture, text)
    return _SURROGATE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def one_line(text: str, limit: int = 500) -> str:
    """`visible` text on one line, cut to `limit` characters."""
    return cut(" ".join(visible(text).split()), limit)


def cut(text: str, limit: int) -> str:
    """The text, or its first `limit` characters and a note of how many more there are."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit} more characters)"


def spreadsheet_safe(text: str) -> str:
    """`text` with a leading apostrophe where a spreadsheet would run it as a formula."""
    return "'" + text if _FORMULA.match(text) else text


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\x{code:02x}"
