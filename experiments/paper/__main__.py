"""Command line of `experiments.paper`."""

import sys

from pacs_trl.settings.command_line import exit_code

from .command import PROGRAM, main


sys.exit(exit_code(PROGRAM, main, sys.argv[1:]))
