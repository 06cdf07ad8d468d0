"""Other projects' training loops on this package: ``accelerate``, ``transformers``, ``lightning``.

Each module imports the project that it is named after, which this package does not depend on.
"""

from __future__ import annotations
