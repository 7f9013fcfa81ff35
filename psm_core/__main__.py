"""`python -m psm_core`: the command line."""

import sys

from psm_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
