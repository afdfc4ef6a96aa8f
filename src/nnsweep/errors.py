"""The exception classes of nnsweep."""


class NnsweepError(Exception):
    """Something nnsweep refuses to go on with; the message is one line for a person."""

    def __init__(self, message: str) -> None:
        """Keep the message on one line, whatever a prompt or a key brought into it."""
        super().__init__("\\n".join(message.splitlines()))


class UserError(NnsweepError):
    """Input that its author can mend: what, where, what is allowed, what next (exit 2)."""


class CheckFailed(NnsweepError):
    """A check on results did not hold: parity, a null control, a missing point (exit 1)."""
