"""``python -m gpuq``: the same as the ``gpuq`` command."""

from gpuq.cli import main

main()
