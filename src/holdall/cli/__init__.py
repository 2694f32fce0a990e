"""Command line: one typed function a command, grouped by what they work on."""

from holdall.cli.run_command import COMMANDS as COMMANDS
from holdall.cli.run_command import main as main
