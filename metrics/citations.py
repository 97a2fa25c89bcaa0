"""Images that an answer cites, RAG-IGBench's way: ``![alt text](IMG#k)``, k from 1.

A tag is ``!``, alternative text in square brackets on one line without ``](`` or ``![`` in it, and
``(IMG#k)`` in just this spelling, k of at most nine ASCII digits.

The published evaluator's pattern lets the alternative text run on: an ordinary picture link before a
tag is swallowed together with all text between them, and so vanishes from the answer.
"""

from __future__ import annotations

import re

_ALT = r"!\[(?:(?!\]\(|!\[)[^\n])*\]"
_IMAGE = re.compile(_ALT + r"\(IMG#([0-9]{1,9})\)")
_DOCUMENT = re.compile(r"<sup>\[[^\]\n<]*\]\([^)\n<]*\)</sup>")


def image_tags(answer: str) -> list[str]:
    """The digits of each image tag, as written, in order of appearance; repeats are kept."""
    return [match[1] for match in _IMAGE.finditer(answer)]


def image_ids(answer: str) -> list[int]:
    """Ids of the cited images in order of appearance; repeats are kept, ``01`` is 1."""
    return [int(digits) for digits in image_tags(answer)]


def without_images(answer: str) -> str:
    """The answer less its image tags."""
    return _IMAGE.sub("", answer)


def without_citations(answer: str) -> str:
    """The answer less its image tags and its citations of documents, ``<sup>[n](DOC#n)</sup>``."""
    return _DOCUMENT.sub("", without_images(answer))
