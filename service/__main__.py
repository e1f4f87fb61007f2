"""The command's first step: a signal ends it from the first moment on, also as PID 1; then the rest is imported.

SIGHUP is kept by the kernel until it is known which command this is: `serve` reads its settings again, others end.
"""

import os
import signal


def main() -> None:
    """Entry point of the `tpvision` command."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    from tp.process import without_collections  # noqa: PLC0415 - not before signals are seen to

    with without_collections():
        from service.cli import main as run  # noqa: PLC0415 - takes most of a second, in which a container may be stopped
    run()


def _end(number: int, frame: object) -> None:
    """What the kernel does by itself, but not for PID 1. Nothing is started yet that would have to be ended."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
