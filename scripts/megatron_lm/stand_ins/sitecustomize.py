"""Prepares the ranks of an unmodified Megatron script for machines that Megatron was not made for.

Python imports this file when it starts with this folder on PYTHONPATH, so that launch lines stay
what users type. STAND_IN says what is missing: ``cpu`` a GPU, ``same-gpu`` all GPUs but one.
"""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]

if "RANK" in os.environ:  # torchrun itself needs nothing
    if os.environ.get("STAND_IN") == "same-gpu":
        os.environ["LOCAL_RANK"] = "0"
        sys.path.append(str(_ROOT / "tests" / "gpu"))
        import gloo_staging

        gloo_staging.enable()
    elif os.environ.get("STAND_IN") == "cpu":
        sys.path.append(str(_ROOT / "scripts" / "megatron_lm"))
        import no_gpu

        no_gpu.enable()
