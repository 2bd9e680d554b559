"""One thread everywhere: a test process that computed with more could fork no rank that does."""

from __future__ import annotations

import os

# Before torch is imported by whichever test comes first, and without importing it here.
os.environ["OMP_NUM_THREADS"] = "1"
