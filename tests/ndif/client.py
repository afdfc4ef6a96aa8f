"""This process as a client of a server."""

import pytest


def client_of(host: str, patch: pytest.MonkeyPatch) -> None:
    """Make this process a client of a server."""
    from nnsight import CONFIG as NNSIGHT

    patch.setattr(NNSIGHT.API, "HOST", host)
    patch.setattr(NNSIGHT.API, "APIKEY", None)
