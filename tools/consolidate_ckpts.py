"""Run ``python -m xla_fsdp.consolidate_sharded_ckpts`` from a checkout.

    python tools/consolidate_ckpts.py --ckpt_prefix run/mnist --ckpt_suffix "_rank-*"

Needs torch and numpy only; neither torch_xla nor xla_fsdp has to be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Before the import below, so that it finds this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from xla_fsdp.consolidate_sharded_ckpts import main

if __name__ == "__main__":
    sys.exit(main())
