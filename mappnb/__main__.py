"""``python -m mappnb``: the same as the command ``mappnb``."""

from __future__ import annotations

import sys

from mappnb.cli import main

sys.exit(main())
