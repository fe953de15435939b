"""`mtp-train report`: the page of a run, from its folder alone.

Knows: its argument. Refuses to know: what is on the page.
"""

from pathlib import Path

from train.help import command_parser, read_options
from train.run_page import write_page

ABOUT = "Write a run's report.html and plots/ anew: of a finished, running or killed run, or one of an older version."


def run_report(arguments: list[str]) -> None:
    """Write the page, and say where it is."""
    parser = command_parser("report", ABOUT, ("runs/demo",))
    parser.add_argument("folder", type=Path, help="of the run, such as runs/demo")
    print(f"report: {write_page(read_options(parser, arguments).folder)}")
