"""Plain HTTP calls to a server's control side: no proxy in between, and one kind of error."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping

# A proxy named in the environment is for the world outside; the load generator ignores it too.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpFailure(OSError):
    """A call that got no good answer.

    Attributes:
        status: the HTTP status, if there was one.
    """

    def __init__(self, words: str, status: int | None = None) -> None:
        super().__init__(words)
        self.status = status


def call(
    url: str,
    body: bytes | None = None,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """GET, or with a body POST, and give the body of the answer.

    Raises:
        HttpFailure: no connection, no HTTP, a malformed URL, or a status of 400 and more; the message
            holds the start of the answer.
    """
    kind = {} if body is None else {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, body, {**kind, **(headers or {})})
        with _OPENER.open(request, timeout=timeout_s) as response:
            data: bytes = response.read()
            return data
    except urllib.error.HTTPError as e:
        detail = " ".join(e.read(500).decode(errors="replace").split())
        raise HttpFailure(f"status {e.code}: {detail}", e.code) from e
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise HttpFailure(str(e) or type(e).__name__) from e
