"""`python -m holdall` is the command `holdall`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from holdall.common.errors import HoldallError


def main() -> None:
    """Run the command line. Ctrl-C while it is imported, which takes seconds, ends it as later on."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    try:
        from holdall.cli import main as run
    except HoldallError as error:  # a package that it needs is missing
        print(f"holdall: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: an exception could be lost or changed in the modules that are being imported."""
    os.write(2, b"holdall: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
