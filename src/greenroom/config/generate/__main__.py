"""`python -m greenroom.config.generate`."""

import sys

from greenroom.config.generate.reference import main

if __name__ == "__main__":
    sys.exit(main())
