"""The version, alone, so that building a wheel imports nothing else."""

__version__ = "0.1.0"
