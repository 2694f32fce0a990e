"""`python -m holdall` is the command `holdall`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from holdall.common.errors import HoldallError


def main() -> None:
    """Run the command line. Ctrl-C while packages are imported, which takes seconds, ends it as later on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from holdall.cli import main as run
    except HoldallError as error:  # a package that it needs is missing
        print(f"holdall: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End at once during an import, where an exception could be lost or changed; else raise `KeyboardInterrupt`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"holdall: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
