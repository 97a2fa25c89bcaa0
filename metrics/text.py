"""Words of a text in any script, for the metrics that compare words."""

from __future__ import annotations

import re
import unicodedata

# Scripts written without spaces, in which each character counts as a word: kana, CJK ideographs
# (with extensions and compatibility forms), Hangul syllables stay words of their own.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def words(text: str) -> list[str]:
    """Lower-case words in order: runs of letters and digits, and single CJK ideographs and kana.

    The text is first brought to Unicode form NFKC, so that full-width letters and digits equal
    plain ones. Punctuation separates words and is dropped ("3.5" is two words).
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())
