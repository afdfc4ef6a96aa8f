"""The workflow's configuration: where and how a sweep runs, never what it is."""

import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from nnsweep.documents import Strict, parse

Count = Annotated[int, Field(strict=True, ge=1)]
NUMBER = r"-?(0|[1-9]\d*)(\.\d+)?"
Seconds = Annotated[float, Field(gt=0)]
SIDES = ("local", "ndif")
"""The two engines of a mixed run."""

ENGINES = ("local", "ndif", "reference", "mixed")


class Bootstrap(Strict):
    """Intervals of the means in summary.parquet."""

    resamples: Count = Field(2000, description="bootstrap resamples of the prompt rows")
    confidence: float = Field(0.95, gt=0, lt=1, description="coverage of the interval")
    seed: Annotated[int, Field(strict=True, ge=0)] = Field(0, description="seed of the resampling")


class Parity(Strict):
    """How many points a second engine also runs when the engine is `ndif`."""

    points: Literal["all"] | Annotated[int, Field(strict=True, ge=0)] = Field(
        "all", description="`all`, a number of points, or 0 for no parity check"
    )
    against: Literal["local", "reference"] = Field("local", description="the second engine")


class Ndif(Strict):
    """Deadlines and tries of a request; host and key are nnsight's own (docs/ndif.md)."""

    connect_s: Seconds = Field(10, description="seconds until the host must answer")
    queue_s: Seconds = Field(3600, description="seconds a job may wait in the queue")
    run_s: Seconds = Field(3600, description="seconds a session may run")
    download_s: Seconds = Field(600, description="seconds a result may take to come home")
    attempts: Count = Field(6, description="tries of a request that fails in passing")
    pause_s: Seconds = Field(2, description="first pause between tries; later ones grow to 60 s")


class Mixed(Strict):
    """Engine `mixed`: chunks here and on NDIF at the same time (docs/mixed.md)."""

    ndif_share: float = Field(0.5, ge=0, le=1, description="share of the chunks that go to NDIF")
    calibration_points: Count = Field(
        5, description="points (whole passes of them) that both sides run and agree on before"
    )
    fallback: bool = Field(
        False, description="whether a chunk that one side could not finish runs on the other"
    )

    def side(self, place: int, attempt: int = 1) -> str:
        """The engine of a chunk.

        Args:
            place: The chunk's place in the plan; NDIF's share is spread evenly over the plan.
            attempt: Every other attempt is the other side's, where `fallback` allows it.
        """
        before, after = (math.floor(n * self.ndif_share + 1e-9) for n in (place, place + 1))
        chosen, other = SIDES if after == before else SIDES[::-1]
        return other if self.fallback and attempt % 2 == 0 else chosen


class Session(Strict):
    """How large one request may become."""

    max_minutes: Seconds = Field(
        45, description="minutes a session may take by the server's own rate (NDIF ends it at 60)"
    )


class Config(Strict):
    """config/config.yaml, and what `--config KEY=VALUE` may change."""

    sweep: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,63}$")] = Field(
        "capitals_layers", description="name of the sweep: the file `<sweeps>/<sweep>.yaml`"
    )
    sweeps: Annotated[str, Field(min_length=1)] = Field(
        "config/sweeps", description="folder of the sweep files"
    )
    engine: Literal["local", "ndif", "reference", "mixed"] = Field(
        "local",
        description="where passes run: `local` (nnsight here), `ndif` (nnsight beside the "
        "weights), `reference` (plain hooks here, the oracle) or `mixed` (some chunks here, some "
        "on NDIF)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes a GPU if there is one"
    )
    threads: Count = Field(
        2, description="CPU threads of one chunk job; part of the last bits, so it never follows -c"
    )
    batch_rows: Literal["auto"] | Count = Field(
        256,
        description="most prompt rows in one model call; `auto` takes as many as the estimate says "
        "will fit into `memory_gb`; what does not fit all the same is halved",
    )
    memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="memory of one chunk job that `batch_rows: auto` may fill; left out: 80 % of "
        "the GPU, or 60 % of this machine's memory divided by the jobs that its cores can run",
    )
    recompute: Literal["fast", "exact"] = Field(
        "fast",
        description="`fast` takes the tokens before a write from the clean run's keys and values; "
        "`exact` only skips layers, one point a pass: the bits of a full pass, but for the "
        "vocabulary product, which is taken only where it is read",
    )
    chunk_passes: Count = Field(
        64, description="most forward passes in one chunk (one job, which needs 5 to 10 s to start)"
    )
    bootstrap: Bootstrap = Field(default=Bootstrap(), description="intervals of the means")
    parity: Parity = Field(default=Parity(), description="the second engine's share")
    ndif: Ndif = Field(default=Ndif(), description="deadlines and tries of a request")
    mixed: Mixed = Field(default=Mixed(), description="who runs what with engine `mixed`")
    session: Session = Field(default=Session(), description="size of a request")

    def engines_here(self) -> list[str]:
        """The engines whose chunks run on this machine, or its cluster, in such a run."""
        if self.engine == "ndif":
            return [self.parity.against] if self.parity.points else []
        return ["local", "mixed"] if self.engine == "mixed" else [self.engine]


def read_config(value: dict[str, Any]) -> Config:
    """Validate the workflow's configuration.

    Raises:
        UserError: naming every bad key, what it got and what is allowed.
    """
    return parse(Config, {key: _typed(entry) for key, entry in value.items()}, "config")


def _typed(entry: Any) -> Any:
    """Numbers in `--config parity='{points: 5}'` arrive as text; they become numbers again."""
    if not isinstance(entry, dict):
        return entry
    return {key: _number(leaf) if isinstance(leaf, str) else leaf for key, leaf in entry.items()}


def _number(text: str) -> Any:
    """The number that a text is in JSON's strict sense (007 is none), else the text."""
    return json.loads(text) if re.fullmatch(NUMBER, text) else text
