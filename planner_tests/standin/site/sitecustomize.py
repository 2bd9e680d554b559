"""Python imports this at its start: processes that are spawned, not forked, see the stand-in's GPUs, too."""

import os
import sys

if "STANDIN_LOG" in os.environ:
    sys.path[:0] = [os.environ["STANDIN_ROOT"], os.path.join(os.environ["STANDIN_ROOT"], "planner_tests")]
    from planner_tests.standin.scenarios import begin

    begin()
