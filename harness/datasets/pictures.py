"""Encoded pictures as the data sets hold them: kept byte for byte, once they are known to decode."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image as PillowImage

from harness.datasets.errors import DatasetError
from harness.datasets.sample import Image


def picture(data: bytes, name: str, source: str) -> Image:
    """An encoded picture, checked by decoding it; its media type comes from its content.

    Args:
        data: the encoded bytes.
        name: what a report may call it.
        source: where it comes from, for the error.

    Raises:
        DatasetError: the bytes are no picture that can be decoded.
    """
    try:
        with PillowImage.open(io.BytesIO(data)) as opened:
            kind = PillowImage.MIME.get(opened.format or "", "")
            # `verify` checks structure only in some formats; decoding finds truncation in all.
            opened.load()
    # Pillow's decoders raise these, SyntaxError included, for bytes that are no valid picture.
    except (OSError, ValueError, SyntaxError, PillowImage.DecompressionBombError) as error:
        raise DatasetError(f"{source}: not a picture that can be decoded ({error})") from error
    if not kind:
        raise DatasetError(f"{source}: format {opened.format} has no media type")
    return Image(data, kind, name)


def read_picture(file: Path, name: str) -> Image:
    """The picture in a file.

    Raises:
        DatasetError: the file cannot be read, or holds no picture that can be decoded.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DatasetError(f"{file}: cannot be read ({error.strerror})") from error
    return picture(data, name, str(file))
