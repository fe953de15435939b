"""The one exception that users are meant to read.

Knows: nothing but the type. Applications print its message in one line and exit with code 2; every other exception is a
fault of the software and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input. The message names the option, the value, what is allowed and the remedy."""
