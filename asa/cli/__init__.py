"""The command line: parses options, calls the library, prints. One module per command; heavy imports are inside
commands."""

from __future__ import annotations


def main() -> None:
    """Run the console script ``asa``; ends the process with an exit code of :mod:`asa.errors`."""
    import os
    import signal
    import sys
    from contextlib import suppress

    from asa.cli.interrupts import interrupted

    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))  # until a command knows how it ends
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # it was blocked if this program was started again
    try:
        code = _run()
    except KeyboardInterrupt:  # once more while a command ends
        os._exit(130)
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, interrupted):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the interpreter ends would print a traceback
    if sys.argv[1:2] == ["plan"] and "torch" not in sys.modules:
        # The work is done; exit at once, since freeing the millions of objects of a search takes half a second.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    """Run the command in ``sys.argv`` with standard streams that exist; returns its exit code."""
    import os
    import sys
    from contextlib import suppress

    from asa.cli.entry import run
    from asa.cli.heap import start_again

    for number in (0, 1, 2):  # the next opened file would take a closed number
        with suppress(OSError):
            os.close(os.dup(number))
            continue
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    # torch's C++ code logs a useless line on every rank whose memory is recorded during a step.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_again(sys.argv[1:])
    return run(sys.argv[1:])
