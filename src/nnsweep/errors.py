"""The exception classes of nnsweep."""

import re

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class NnsweepError(Exception):
    """Something nnsweep refuses to go on with; the message is one line for a person."""

    def __init__(self, message: str) -> None:
        """Keep the message on one line that no terminal obeys, whatever a prompt or a key holds."""
        line = "\\n".join(message.splitlines())
        super().__init__(CONTROL.sub(lambda found: repr(found[0])[1:-1], line))


class UserError(NnsweepError):
    """Input that its author can mend: what, where, what is allowed, what next (exit 2)."""


class CheckFailed(NnsweepError):
    """A check on results did not hold: parity, a null control, a missing point (exit 1)."""
