"""Command line of `experiments.paper`."""

import sys

from pacs_trl.errors import exit_code

from .command import PROGRAM, main


sys.exit(exit_code(PROGRAM, main, sys.argv[1:]))
