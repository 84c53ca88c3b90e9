"""`python -m pacs_trl COMMAND ...`, the same as `pacs-trl COMMAND ...`."""

import sys

from .cli import main


sys.exit(main())
