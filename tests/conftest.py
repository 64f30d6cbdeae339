"""Session set-up shared by all tests."""

import os

# Ranks of one test share the cores; the fork server and its forks read this when torch starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
