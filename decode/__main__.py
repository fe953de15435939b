"""`python -m decode` is `mtp-decode`."""

from decode.cli import entry

if __name__ == "__main__":
    entry()
