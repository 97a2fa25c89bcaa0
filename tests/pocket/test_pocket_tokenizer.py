"""The tokenizer of bytes, known characters and phrases, and the chat template."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harness.pocket.phrases import PHRASES
from harness.pocket.recipe import Recipe
from harness.pocket.special import SPECIAL_TOKENS, token_id
from harness.pocket.tokenizer import (
    CHAT_TEMPLATE,
    byte_alphabet,
    character_id,
    characters,
    phrase_id,
    tokenizer_config,
    tokenizer_json,
    vocab_size,
)

TOKENIZER = Tokenizer.from_str(json.dumps(tokenizer_json()))


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    # As Transformers and vLLM set their environments up.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, **options)


@settings(deadline=None)
@given(st.text().filter(lambda text: not any(t in text for t in (*SPECIAL_TOKENS, *PHRASES))))
def test_any_text_survives_as_characters_and_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < phrase_id(PHRASES[0])
    if text.isascii():
        assert ids == list(text.encode())


def test_a_known_character_is_one_token_and_others_are_bytes() -> None:
    known = characters()
    assert len(set(known)) == len(known) > 100
    for character in known:
        assert TOKENIZER.encode(character).ids == [character_id(character)]
    assert TOKENIZER.encode(known).ids == [character_id(c) for c in known]
    assert TOKENIZER.encode("🙂").ids == list("🙂".encode())
    assert TOKENIZER.encode("é").ids == list("é".encode())


def test_a_phrase_is_one_token() -> None:
    for phrase in PHRASES:
        assert TOKENIZER.encode(f"x{phrase}x").ids == [ord("x"), phrase_id(phrase), ord("x")]
    assert phrase_id(PHRASES[-1]) == vocab_size() - 1


@pytest.mark.parametrize("text", ["", " a  b\n\t", "né 日本 🙂‍↔️", "\x00\x7f\u0301", "<|nope|>"])
def test_texts_that_other_tokenizers_change(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_special_tokens_follow_the_bytes() -> None:
    assert TOKENIZER.get_vocab_size() == Recipe().vocab_size == vocab_size()
    for token in SPECIAL_TOKENS:
        assert TOKENIZER.token_to_id(token) == token_id(token)
        assert TOKENIZER.encode(f"a{token}b").ids == [97, token_id(token), 98]
    assert TOKENIZER.decode([97, token_id("<|im_end|>")]) == "a"
    assert set(tokenizer_config(8)["additional_special_tokens"]) == set(SPECIAL_TOKENS)


def test_alphabet_names_every_byte_once() -> None:
    assert len(set(byte_alphabet())) == 256
    assert byte_alphabet()[ord("A")] == "A"
    assert byte_alphabet()[ord(" ")] == "Ġ"


def test_chat_template_frames_turns_and_pictures() -> None:
    image = {"type": "image"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "and"}, image]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{picture}and{picture}<|im_end|>\n"
        "<|im_start|>assistant\nTwo.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
    )
    assert render(messages) == expected
    assert render(messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_chat_template_numbers_pictures_across_turns_when_asked() -> None:
    turn = {"role": "user", "content": [{"type": "image_url"}, {"type": "video"}]}
    text = render([turn, turn], add_vision_id=True)
    assert [n for n in (1, 2, 3) if f"Picture {n}: " in text] == [1, 2]
    assert [n for n in (1, 2, 3) if f"Video {n}: " in text] == [1, 2]
    assert "<|vision_start|><|video_pad|><|vision_end|>" in text
