"""A merge that is killed while it copies: ``python -m test.common.killed_merge ARGUMENTS``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from xla_fsdp.checkpoint.files import copying
from xla_fsdp.consolidate_sharded_ckpts import main


def die(*_: Any) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    copying.os.pwrite = die  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
