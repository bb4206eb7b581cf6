"""What holds for all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, here or in a process that a test starts: models of tests are so small that a second thread
costs more than it brings, and much more on a machine that does other things, too."""
