"""The one exception that a user is meant to see, and how a command shows it.

Bad input gets one sentence: what is wrong, where, what to do. Everything else is a fault of ours
and keeps its stack trace.
"""

import sys
from collections.abc import Callable


class Fp4ReproError(Exception):
    """Bad input or a missing means; the message is one full sentence for the user."""


def run_stage(stage: str, main: Callable[[], None]) -> None:
    """Run a command line's `main`; an `Fp4ReproError` becomes a sentence and exit code 2, and so does
    what the operating system refuses (a full disk, a folder that may not be written)."""
    try:
        main()
    except Fp4ReproError as error:
        print(f"{stage}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"{stage}: error: {error.strerror or error}:{where or ' (no file named)'}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{stage}: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
