"""`python -m psm_core.reload PATH [ARCHITECTURE]`: what `verify_checkpoint` runs, alone."""

import dataclasses
import json
import sys

from psm_core.checkpoint import reload_checkpoint
from psm_core.errors import PsmError

if __name__ == "__main__":
    try:
        print(json.dumps(dataclasses.asdict(reload_checkpoint(*sys.argv[1:]))))
    except PsmError as error:
        sys.exit(str(error))
