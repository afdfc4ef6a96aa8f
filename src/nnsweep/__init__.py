"""Sweeps of interventions on language models, run here or on NDIF, as a Snakemake workflow."""

__version__ = "0.1.0"

SEMANTICS = 1
"""Raised when the meaning of a point changes, so that old values are never mistaken for new."""
