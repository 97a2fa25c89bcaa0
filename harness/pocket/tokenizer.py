"""The bundled model's tokenizer: byte-level BPE whose merges only join a character's own bytes.

A byte's id is its value; then come the special tokens of Qwen3-VL, one token for each Chinese
character that the pocket world knows, the two-byte steps towards them, and the world's template
phrases. Any text survives encoding and decoding unchanged: there is no normalisation and no unknown
token, and a character that the world does not know stays its bytes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from harness.pocket.phrases import PHRASES
from harness.pocket.special import SPECIAL_TOKENS

CHARACTERS_FILE = Path(__file__).parent / "assets" / "characters.txt"

CHAT_TEMPLATE = """\
{%- set pictures = namespace(seen=0) -%}
{%- set clips = namespace(seen=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part -%}
{%- set pictures.seen = pictures.seen + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}
{{- 'Picture ' ~ pictures.seen ~ ': ' -}}
{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or part.type == 'video_url' or 'video' in part -%}
{%- set clips.seen = clips.seen + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}
{{- 'Video ' ~ clips.seen ~ ': ' -}}
{%- endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt is defined and add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML: every turn between ``<|im_start|>role`` and ``<|im_end|>``, parts in their order, one
pad token for each image or video (the processor repeats it). No system turn of its own."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies, by value.

    Bytes that print as themselves in Latin-1 keep their character; the others take, in order,
    the code points from 256 up. This is the convention of byte-level BPE since GPT-2, and what
    the ``ByteLevel`` components of the `tokenizers` library use.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in own else next(others)) for b in range(256)]


@functools.cache
def characters() -> str:
    """The characters besides ASCII that the pocket world prints or says, in order of their ids."""
    return CHARACTERS_FILE.read_text(encoding="utf-8").replace("\n", "")


def character_id(character: str) -> int:
    """Id of a character that is one token: printable ASCII, newline, or one of `characters`.

    Raises:
        ValueError: it is several tokens.
    """
    if ord(character) < 128:
        return ord(character)
    return 256 + len(SPECIAL_TOKENS) + characters().index(character)


def phrase_id(phrase: str) -> int:
    """Id of a phrase in `PHRASES`.

    Raises:
        ValueError: it is not one.
    """
    return vocab_size() - len(PHRASES) + PHRASES.index(phrase)


def vocab_size() -> int:
    """Number of tokens; no unused ids."""
    return 256 + len(SPECIAL_TOKENS) + len(characters()) + len(_first_pairs()) + len(PHRASES)


def _spelling(text: str) -> str:
    """The text's UTF-8 bytes as a byte-level vocabulary writes them."""
    alphabet = byte_alphabet()
    return "".join(alphabet[b] for b in text.encode())


def _first_pairs() -> list[str]:
    """The first two bytes of every known character, each once, in order of appearance."""
    return list(dict.fromkeys(_spelling(c)[:2] for c in characters()))


def _merges() -> list[list[str]]:
    pairs = [list(pair) for pair in _first_pairs()]
    return pairs + [[s[:2], s[2]] for s in (_spelling(c) for c in characters())]


def _vocabulary() -> dict[str, int]:
    tokens = [
        *byte_alphabet(),
        *SPECIAL_TOKENS,
        *(_spelling(c) for c in characters()),
        *_first_pairs(),
        *PHRASES,
    ]
    return {token: value for value, token in enumerate(tokens)}


def tokenizer_json() -> dict[str, Any]:
    """``tokenizer.json`` of the `tokenizers` library."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    vocabulary = _vocabulary()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocabulary[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in (*SPECIAL_TOKENS, *PHRASES)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(),
        },
    }


def tokenizer_config(model_max_length: int) -> dict[str, Any]:
    """``tokenizer_config.json``. The generic fast class: Qwen's own would add its own rules."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": model_max_length,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
