"""Questions with several answers: a frontier, finalists to measure, and why the plan is not another one."""
