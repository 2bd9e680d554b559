"""Questions that ask for several answers: a frontier, finalists to be measured, why not another plan."""
