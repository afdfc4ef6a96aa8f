"""Before a sweep goes to NDIF: is the server there, and will it compute what is asked?

Asked once a run, not once a chunk. Every answer that would make the sweep fail or mean something
else is one sentence that says what to do.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nnsweep.config import Config
from nnsweep.errors import UserError
from nnsweep.ndif import transport
from nnsweep.ndif.transport import BadSession, Deadlines, StillQueued, TooLong, Transient

logger = logging.getLogger(__name__)
Plain = dict[str, Any]
CRITICAL = ("nnsight", "torch", "transformers")
TRIAL = "a trial session on NDIF failed: {}. See nnsweep ndif status, then try again."
HERE = ("127.0.0.1", "localhost", "::1")


class NoServer(UserError):
    """NDIF is not reachable, or does not have the model now."""


def check(model: Plain, config: Config, gradients: bool = False) -> Plain:
    """Check the server for one model.

    Args:
        model: The prepared model.
        config: The workflow's configuration.
        gradients: Whether a measure needs them.

    Returns:
        dtype, attention, device_name, threads, versions (of the server), state, mismatches.

    Raises:
        UserError: unreachable, refused, not deployed, another version, another dtype, no gradients.
    """
    from nnsweep.models import model_key, open_model

    if model["attention"] != "sdpa":
        raise UserError(
            f"model.attention: an NDIF server uses sdpa, the sweep asks for {model['attention']}. "
            "Use sdpa, or engine=local."
        )
    if model["kind"] == "packaged" and urlsplit(transport.host()).hostname not in HERE:
        raise UserError(
            f"model {model['id']} is a local folder that this NDIF host cannot have. Use a Hugging "
            "Face id, or a local server: nnsweep ndif serve."
        )
    connect = config.ndif.connect_s
    deployments = _service(connect)
    shell = open_model(model, None)
    key = model_key(shell)
    state = _deployed(deployments, key, model["id"])
    versions, mismatches = _versions(connect)
    found = _probe(shell, key, model, config)
    if gradients:
        _probe_gradients(shell, key, model, config)
    if found["dtype"] != model["dtype"]:
        raise UserError(
            f"the NDIF server serves {found['dtype']}, the sweep asks for {model['dtype']}. "
            f"Set model.dtype: {found['dtype']}, or use a server of that dtype."
        )
    return {
        "dtype": found["dtype"],
        "attention": "sdpa",
        "device_name": found["device"],
        "threads": found["threads"],
        "versions": versions,
        "state": state,
        "mismatches": mismatches,
    }


def describe_service(connect: float = 10) -> list[str]:
    """What the NDIF host of this shell says of itself, a line each."""
    try:
        deployments = _service(connect)
        versions, different = _versions(connect)
    except UserError as error:
        return [str(error)]
    lines = [f"host         {transport.host()}", f"key          {_key_state()}"]
    lines.append("versions     " + ", ".join(f"{name} {v}" for name, v in versions.items()))
    lines += [
        f"differs      {n}: {here} here, {there} there" for n, (here, there) in different.items()
    ]
    for entry in deployments.values():
        state = entry.get("application_state") or entry.get("state")
        lines.append(f"deployed     {entry.get('repo_id') or entry.get('model_key')} ({state})")
    return lines


def _key_state() -> str:
    return "set" if transport.headers() else "not set (NDIF_API_KEY)"


def _service(connect: float) -> Mapping[str, Any]:
    try:
        answer = transport.get_json("/status", connect)
    except Transient as error:
        raise NoServer(
            f"NDIF does not answer: {error}. Is NDIF_HOST right ({transport.host()})? A server of "
            "your own: nnsweep ndif serve."
        ) from None
    return dict(answer.get("deployments", {}))


def _deployed(deployments: Mapping[str, Any], key: str, name: str) -> str:
    """The state of the model's deployment.

    Raises:
        UserError: it is not deployed; the message names what is.
    """
    for entry in deployments.values():
        if entry.get("model_key") == key:
            return str(entry.get("application_state") or entry.get("state") or "deployed")
    shown = sorted({str(e.get("repo_id") or e.get("model_key")) for e in deployments.values()})
    have = ", ".join(Path(one).name if one.startswith("/") else one for one in shown) or "none"
    raise NoServer(f"model {name} is not deployed on this NDIF host. Deployed: {have}.")


def _versions(connect: float) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Versions on the server, and the packages on which both sides differ.

    Raises:
        UserError: nnsight, torch or transformers differ in a way that breaks sessions.
    """
    from nnsight.ndif import EnvComparison, get_local_env

    try:
        remote = transport.get_json("/env", connect)
    except Transient as error:
        raise NoServer(f"NDIF does not tell its versions: {error}. Try again.") from None
    compared = EnvComparison(get_local_env(), remote)
    theirs = remote.get("packages", {})
    versions = {name: str(theirs[name]) for name in CRITICAL if name in theirs}
    different = {
        name: [str(found["local"]), str(found["remote"])]
        for name, found in compared.critical_mismatches.items()
    }
    ours, served = different.get("nnsight", ("", ""))
    if _minor(ours) != _minor(served):
        raise UserError(
            f"nnsight is {ours} here and {served} on the NDIF server. Install {served} here."
        )
    for name, (here, there) in different.items():
        logger.warning("%s is %s here and %s on the server", name, here, there)
    return versions | {"python": compared.remote_python}, different


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _probe_gradients(shell: Any, key: str, model: Plain, config: Config) -> None:
    """Run a backward pass, which a server refuses in its sandbox."""
    try:
        _ask(shell, key, model, config, gradients=True)
    except BadSession as error:
        raise UserError(
            f"measures: attribution needs gradients, which this NDIF server does not run for this "
            f"key ({error}). Use engine=local, or leave attribution out."
        ) from None
    except (Transient, StillQueued, TooLong) as error:
        raise UserError(f"a trial session on NDIF failed: {error}. Try again.") from None


def _ask(shell: Any, key: str, model: Plain, config: Config, gradients: bool) -> Plain:
    from nnsweep.engines.ndif import pack_probe

    ndif = config.ndif
    deadlines = Deadlines(ndif.connect_s, ndif.queue_s, ndif.run_s, ndif.download_s)
    job = transport.submit(pack_probe(shell, model["shape"], gradients), key, deadlines)
    content, _ = transport.wait(job, deadlines, logger.info)
    return unpack_probe(content)


def _probe(shell: Any, key: str, model: Plain, config: Config) -> Plain:
    """Run the smallest session there is and see what ran it."""
    try:
        return _ask(shell, key, model, config, gradients=False)
    except BadSession as error:
        raise UserError(TRIAL.format(error)) from None
    except (Transient, StillQueued, TooLong) as error:
        raise NoServer(TRIAL.format(error)) from None


def unpack_probe(content: bytes) -> Plain:
    """The plain values of a probe's result.

    Raises:
        Transient: the result holds none.
    """
    saved = transport.unpack(content)
    if not isinstance(saved, Mapping) or "found" not in saved:
        raise Transient("the result holds no values")
    return dict(saved["found"])
