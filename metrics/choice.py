r"""Multiple choice: which option an answer names, and whether it is the right one. Higher is better.

The reading is deterministic and never guesses: an answer that names no option, or several, is
wrong. Read are, in this order, and the first rule that finds anything decides:

1. the whole answer: a letter, bracketed or not (``B``, ``b.``, ``（B）``), or an option's exact text;
2. an announced option: ``答案是B``, ``选 B``, ``The answer is (b)``, ``ANSWER: B``, ``\boxed{B}``, or
   the same before an option's exact text;
3. a letter at the start of a line, set off by a mark (``B. …``, ``B）…``, ``(B) …``) or followed by
   nothing but its option's text (``B 故宫``);
4. a letter in round brackets anywhere.

Full-width letters and marks equal plain ones; case, outer marks and repeated spaces of an option's
text do not matter. A capital A before an English word is an article, not option A.

Published evaluators of CCBench and MMBench differ here: VLMEvalKit's rules do not read Chinese
sentences (``答案是B。`` is wrong) and read "A very tall palace" as option A; with a judge model, what
even that cannot read becomes a random option.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

_OUTER = " \t\n\r.,;:!?\"'`*_()[]{}<>。、，；：！？“”‘’「」『』《》【】"
_ALONE = re.compile(r"(?:选项|(?i:option))?[\s(\[{*\"'`]*([A-Za-z])[\s)\]}.,:;!*\"'`。、]*")
_LINE = re.compile(
    r"[*\s]*(?:[(\[]([A-Za-z])[)\]]|([A-Za-z])\)|([A-Z])(?:[.:、,]|\*\*|(?=\s)))[*\s]*(.*)"
)
_MORE = re.compile(r"(?:(?:和|或|、|and|or|[,/&\s])*[(\[]?[A-Z][)\]]?)+[\s.。]*")
_BRACKETED = re.compile(r"\(([A-Za-z])\)")
_ANNOUNCED = re.compile(
    r"""(?:
        \\boxed\s*\{ (?:\\text\s*\{)?
      | (?:答案|正解) (?:应该?|就)? (?:是|为|选择?)? \s*:?
      | (?<![不别非没])(?<!不[能应该可要会]) (?:选项 \s* (?:应?是|应?为|:) | 选择? \s* :?)
      | \b(?:answer|choice|option) \s* (?:\b(?:is|should\ be|would\ be)\b \s*:? | :)
        (?:\s*\b(?:option|choice)\b)?
      | \bI\ (?:choose|pick|select)\b (?:\s*\b(?:option|choice)\b)?
    )
    [\s*"'`]*
    (?: [(\[] (?P<bracketed>[A-Za-z]) [)\]] | (?P<plain>[A-Z]) (?![A-Za-z0-9']) )""",
    re.VERBOSE | re.IGNORECASE,
)
_ANNOUNCED_TEXT = re.compile(
    r"(?:(?:答案|正解)(?:应该?|就)?(?:是|为)?\s*:?|\banswer\s*(?:\bis\b|:))\s*(.+)", re.IGNORECASE
)
_AFTER_A = re.compile(r"\s+(?!(?:because|since|as|for|and)\b)[A-Za-z]")


def choice(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that the answer names; `None` if none or several.

    Args:
        answer: what the model said.
        options: text of each option by its letter, "A" and up.
    """
    said = unicodedata.normalize("NFKC", answer).strip()
    texts = {letter: _plain(text) for letter, text in options.items()}
    for found in (
        _whole(said, texts),
        _announced(said, texts),
        _leading(said, texts),
        {m[1].upper() for m in _BRACKETED.finditer(said)} & set(texts),
    ):
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def correct(answer: str, options: Mapping[str, str], letter: str) -> float:
    """1.0 if the answer names the option `letter` and no other, else 0.0."""
    return float(choice(answer, options) == letter)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_OUTER)


def _by_text(text: str, texts: Mapping[str, str]) -> set[str]:
    plain = _plain(text)
    return {letter for letter, option in texts.items() if plain and option == plain}


def _whole(said: str, texts: Mapping[str, str]) -> set[str]:
    alone = _ALONE.fullmatch(said)
    if alone and alone[1].upper() in texts:
        return {alone[1].upper()}
    return _by_text(said, texts)


def _announced(said: str, texts: Mapping[str, str]) -> set[str]:
    found = set()
    for match in _ANNOUNCED.finditer(said):
        letter = match["bracketed"] or match["plain"]
        # The whole pattern ignores case, so that a plain "a" must be ruled out here.
        if match["plain"] and (letter.islower() or (letter == "A" and _article(said, match.end()))):
            continue
        found |= {letter.upper()} & set(texts)
    if found:
        return found
    for match in _ANNOUNCED_TEXT.finditer(said):
        found |= _by_text(match[1], texts)
    return found


def _leading(said: str, texts: Mapping[str, str]) -> set[str]:
    found = set()
    for line in said.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        letter = (match[1] or match[2] or match[3]).upper()
        if letter not in texts:
            continue
        named = _by_text(match[4], texts)
        marked = not match[3] or not line[match.end(3)].isspace()
        # "B. <text of C>" contradicts itself.
        if named and letter not in named:
            found |= {letter} | named
        elif marked and _MORE.fullmatch(match[4]):
            found |= {letter, *(c for c in match[4] if c in texts)}
        elif named or marked:
            found.add(letter)
    return found


def _article(said: str, end: int) -> bool:
    return _AFTER_A.match(said, end) is not None
