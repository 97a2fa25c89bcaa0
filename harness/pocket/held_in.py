"""Text of the pocket world's training split, for measuring what needs ordinary text and no labels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch

from harness.pocket import sheets
from harness.pocket.items import text_of
from harness.pocket.special import SPECIAL_TOKENS, token_id
from harness.pocket.world.batch import TASKS, draw
from harness.pocket.world.draw import TRAIN, Draws
from harness.pocket.world.text import Codec

_AT_ONCE = 8
_PICTURE = {token_id(t) for t in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")}


def held_in_texts(n: int, seed: int) -> list[str]:
    """Conversations as the model was trained on them, prompts and answers, without their pictures.

    The bundled tokenizer makes of them the tokens that training had, but for those of pictures.

    Args:
        n: texts, of the tasks in turns; a longer list begins with the shorter one.
        seed: draws them.
    """
    codec = Codec(sheets.load())
    tasks = [_conversations(codec, task, seed) for task in TASKS]
    return [next(tasks[i % len(tasks)]) for i in range(n)]


def _conversations(codec: Codec, task: str, seed: int) -> Iterator[str]:
    for chunk in itertools.count():
        rng = random.Random(f"pocket text/{task}/{seed}/{chunk}")
        draws = Draws(torch.Generator().manual_seed(rng.getrandbits(62)))
        batch = draw(codec, draws, rng, task, _AT_ONCE, TRAIN)
        lengths = batch.valid.sum(1).tolist()
        for ids, length in zip(batch.tokens.tolist(), lengths, strict=True):
            yield _text(ids[:length])


def _text(ids: list[int]) -> str:
    first = token_id(SPECIAL_TOKENS[0])
    words = []
    for i in ids:
        if i in _PICTURE:
            continue
        special = first <= i < first + len(SPECIAL_TOKENS)
        words.append(SPECIAL_TOKENS[i - first] if special else text_of([i]))
    return "".join(words)
