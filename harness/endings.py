"""How a command of its own ends when it is told to: tidied up, with one line and the usual status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType


class Terminated(BaseException):
    """SIGTERM came; raised where the program was, so that `finally` runs."""


def ended(main: Callable[[], int], left: str = "nothing was written") -> int:
    """Run a command to its end, whatever that is.

    Args:
        main: gives an exit status.
        left: what it leaves when it is told to stop.

    Returns:
        Its status; 130 after Ctrl-C and 143 after SIGTERM, once all that was open has been closed.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return main()
    except KeyboardInterrupt:
        print(f"interrupted; {left}", file=sys.stderr)
        return 130
    except Terminated:
        print(f"terminated; {left}", file=sys.stderr)
        return 143
    finally:
        signal.signal(signal.SIGTERM, before)
