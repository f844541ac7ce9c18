"""`python -m greenroom` is `greenroom`."""

import sys

from greenroom.cli.main import main

sys.exit(main())
