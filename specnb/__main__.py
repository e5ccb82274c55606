"""``python -m specnb``: the `specnb` command."""

import sys

from specnb.cli import main

sys.exit(main())
