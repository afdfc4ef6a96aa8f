"""The loopback ports of a local server: given, or free ones."""

import dataclasses
import random
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from nnsweep.errors import UserError

HOST = "127.0.0.1"
"""The only address that any part of a local server listens on."""

# Ray hands these out itself: to its workers, and to the servers of its clients.
_RAY_RANGES = (range(10002, 20000), range(23000, 24000))

# Below the numbers that the kernel deals out: a port is claimed seconds before its server binds
# it, and until then any connection or listener on this machine may be given one of those.
_QUIET = range(24000, 32768)


@dataclass(frozen=True)
class Ports:
    """One port a listener; None means any free one.

    Attributes:
        api: the NDIF API, the one that clients talk to.
        redis: request queue and status channels.
        store: object store that holds results.
        ray: Ray's control service.
        ray_client: Ray's server for clients; outside the ranges that Ray deals from.
        dashboard: Ray's state service.
        agent: Ray's agent on this node.
    """

    api: int | None = None
    redis: int | None = None
    store: int | None = None
    ray: int | None = None
    ray_client: int | None = None
    dashboard: int | None = None
    agent: int | None = None

    def resolve(self) -> dict[str, int]:
        """Return a port for every name: the given ones, checked to be free, and free ones.

        Raises:
            UserError: if a given port is taken, or one that Ray deals out itself.
        """
        with ExitStack() as held:
            # All stay bound until the last is found, so that no number is found twice.
            return {name: _claim(held, name, number) for name, number in self._fields().items()}

    def conflicts(self, ports: dict[str, int]) -> list[str]:
        """Return the names of the ports given here that differ from those in use."""
        given = {name: number for name, number in self._fields().items() if number is not None}
        return [name for name, number in given.items() if number != ports[name]]

    def _fields(self) -> dict[str, int | None]:
        return dataclasses.asdict(self)


def is_open(port: int) -> bool:
    """Tell whether something accepts connections on the loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _claim(held: ExitStack, name: str, number: int | None) -> int:
    if number is None:
        return _claim_any(held)
    if name != "api" and any(number in taken for taken in _RAY_RANGES):
        raise UserError(
            f"port {number} for '{name}' lies in the ranges that Ray deals out itself "
            "(10002-19999, 23000-23999). Give one outside them, or leave it out"
        )
    if not 1024 <= number <= 65535:
        raise UserError(f"port {number} for '{name}': give one from 1024 to 65535")
    try:
        _bind(held, number)
    except OSError as error:
        raise UserError(
            f"port {number} for '{name}' is taken ({error.strerror}). "
            "Give another, or leave it out to get a free one"
        ) from error
    return number


def _claim_any(held: ExitStack) -> int:
    # Not the seeded generator: two processes with one seed would claim the same ports.
    for number in random.SystemRandom().sample(_QUIET, len(_QUIET)):
        with suppress(OSError):
            return _bind(held, number)
    raise UserError("no port from 24000 to 32767 is free on this machine")


def _bind(held: ExitStack, number: int) -> int:
    listener = held.enter_context(socket.socket())
    # As the servers do: a port whose last connections are still closing counts as free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, number))
    # SO_REUSEADDR alone would let two sockets bind the same port as long as none listens.
    listener.listen(1)
    return int(listener.getsockname()[1])
