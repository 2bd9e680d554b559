"""Commands that are given on stdin, a JSON list of arguments a line, run in this one process; answers on stdout.

A process of its own for each would load torch, CUDA and its kernels every time, and let cuDNN try its kernels on the
same shapes again: most of a minute for a network with many convolutions. An answer is one JSON document: ``exit_code``,
``said`` (stdout) and ``error`` (stderr).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import sys
import traceback


def answer(argv: list[str]) -> int:
    """Run ``python -m`` of ``argv`` here; its exit code."""
    module, *rest = argv
    sys.argv = [module, *rest]
    try:
        if module == "asa":
            from asa.cli.entry import run

            return run(rest)
        return int(importlib.import_module(module).main() or 0)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        gc.collect()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()


def main() -> None:
    """Serve until stdin ends."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what writes past sys.stdout is no answer
    for line in sys.stdin:
        said, wrong = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
            code = answer(json.loads(line))
        found = {"exit_code": code, "said": said.getvalue(), "error": wrong.getvalue()}
        print(json.dumps(found), file=told, flush=True)


if __name__ == "__main__":
    main()
