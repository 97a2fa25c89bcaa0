"""Text of the training split: the tokens that training had, without the pictures'."""

from __future__ import annotations

import random

import torch
from transformers import AutoTokenizer

from harness.pocket import sheets
from harness.pocket.held_in import held_in_texts
from harness.pocket.model import FOLDER
from harness.pocket.special import token_id
from harness.pocket.world.batch import TASKS, draw
from harness.pocket.world.draw import TRAIN, Draws
from harness.pocket.world.text import Codec


def test_same_seed_same_texts_and_a_longer_list_goes_on() -> None:
    texts = held_in_texts(30, seed=4)
    assert held_in_texts(30, seed=4) == texts
    assert held_in_texts(7, seed=4) == texts[:7]
    assert len(set(texts)) > 25
    assert not set(texts) & set(held_in_texts(30, seed=5))


def test_tasks_in_turns_with_prompts_and_answers() -> None:
    texts = held_in_texts(12, seed=0)
    for i, text in enumerate(texts):
        assert text.startswith("<|im_start|>user\n")
        assert text.count("<|im_start|>assistant\n") == text.count("<|im_end|>") / 2 >= 1
        assert ("DOC#1: " in text) == (i % len(TASKS) == TASKS.index("rag"))
        assert "<|vision" not in text and "<|image_pad|>" not in text
        assert "<|endoftext|>" not in text


def test_tokens_are_those_of_training() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    pictures = [token_id(t) for t in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")]
    seed, codec = 2, Codec(sheets.load())
    texts = held_in_texts(8 * len(TASKS), seed)
    for t, task in enumerate(TASKS):
        rng = random.Random(f"pocket text/{task}/{seed}/0")
        draws = Draws(torch.Generator().manual_seed(rng.getrandbits(62)))
        batch = draw(codec, draws, rng, task, 8, TRAIN)
        kept = batch.valid & ~torch.isin(batch.tokens, torch.tensor(pictures))
        for item, text in enumerate(texts[t :: len(TASKS)][: len(batch.tokens)]):
            expected = batch.tokens[item][kept[item]].tolist()
            assert tokenizer(text)["input_ids"] == expected
