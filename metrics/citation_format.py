"""Valid format of an answer with images: 1 or 0, higher is better.

1 if the answer cites at least one image, every tag is well formed, names an image that was there,
none twice, and nothing in the rest looks like a broken tag. Tags: see `metrics.citations`.

Source: the rules that RAG-IGBench (2025) gives to the model, "each image is inserted once", and its
evaluator's rejection of ids beyond the images. Stricter than that evaluator, which does not see a
misspelt tag and takes the id 0 for the last image. Not checked: citations of documents, JSON.
"""

from __future__ import annotations

import re

from metrics.citations import image_tags, without_images

_BROKEN = re.compile(r"!\s*\[|IMG\s*#|\(\s*IMG\b|\]\s*\(\s*#?\s*[0-9]+\s*\)", re.IGNORECASE)


def citation_format(answer: str, images: int) -> float:
    """1.0 if all image citations of `answer` are valid, else 0.0.

    Args:
        answer: what the model said.
        images: how many images it was shown; ids run from 1 to this.
    """
    tags = image_tags(answer)
    known = {str(k) for k in range(1, images + 1)}
    valid = bool(tags) and len(set(tags)) == len(tags) and known.issuperset(tags)
    return float(valid and _BROKEN.search(without_images(answer)) is None)
