"""What loaders raise."""

from __future__ import annotations


class DatasetError(ValueError):
    """A data set cannot be used; the message names the file, the item and the field."""
