"""The Python interface for the user's own program: what the commands do, on objects instead of files.

::

    model, optimizer, loader = asa.parallelize(model, optimizer, loader)   # your loop stays
    job = asa.Job(model, optimizer, loader, loss_fn)                       # pipelines, checkpoints, re-planning
    plan = asa.plan(model, example_input, gpus=8)                          # planner only
"""

from __future__ import annotations
