"""The workflow's configuration: where and how a sweep runs, never what it is."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nnsweep.documents import Strict, parse

Count = Annotated[int, Field(strict=True, ge=1)]


class Bootstrap(Strict):
    """Intervals of the means in summary.parquet."""

    resamples: Count = Field(2000, description="bootstrap resamples of the prompt rows")
    confidence: float = Field(0.95, gt=0, lt=1, description="coverage of the interval")
    seed: Annotated[int, Field(strict=True, ge=0)] = Field(0, description="seed of the resampling")


class Config(Strict):
    """config/config.yaml, and what `--config KEY=VALUE` may change."""

    sweep: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,63}$")] = Field(
        "capitals_layers", description="name of the sweep: the file `<sweeps>/<sweep>.yaml`"
    )
    sweeps: Annotated[str, Field(min_length=1)] = Field(
        "config/sweeps", description="folder of the sweep files"
    )
    engine: Literal["local", "reference"] = Field(
        "local", description="where passes run: `local` (nnsight here) or `reference` (plain hooks)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto` takes a GPU if there is one"
    )
    threads: Count = Field(
        2, description="CPU threads of one chunk job; part of the last bits, so it never follows -c"
    )
    batch_rows: Count = Field(256, description="most prompt rows in one model call")
    recompute: Literal["fast", "exact"] = Field(
        "fast",
        description="`fast` takes the tokens before a write from the clean run's keys and values; "
        "`exact` only skips layers and keeps the bits of a full pass",
    )
    chunk_passes: Count = Field(64, description="most forward passes in one chunk (one job)")
    bootstrap: Bootstrap = Field(default=Bootstrap(), description="intervals of the means")


def read_config(value: dict[str, Any]) -> Config:
    """Validate the workflow's configuration.

    Raises:
        UserError: naming every bad key, what it got and what is allowed.
    """
    return parse(Config, value, "config")
