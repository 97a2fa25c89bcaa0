"""The one error that every reader and writer of result files raises."""

from __future__ import annotations


class ResultsError(Exception):
    """Results are missing, damaged or in the way; the message is one line and names the file."""
