"""Every interleaving that matters, of the real protocol code.

The plain functions of the queue, the counters, the poller and the threads reader run in fibers
over words whose every access is a step (`memory`), on a machine of models (`machine`). A
depth-first search takes them through all schedules within its bounds (`schedule`, `search`);
`ledger` says which properties are checked, `configurations` which systems are searched. A
schedule in which a property fails is printed as a seed, and runs again step by step::

    python -m gpuq.testing.explore "pull, 2 slots" "2,0,0,0 40.1 52.2"

greenlet is needed, which the ``test`` extra brings.
"""

from gpuq.testing.explore.configurations import CONFIGURATIONS
from gpuq.testing.explore.rebinding import Edit, MutationError
from gpuq.testing.explore.schedule import Bounds, Finding, Outcome
from gpuq.testing.explore.search import Configuration, Explorer

__all__ = [
    "CONFIGURATIONS",
    "Bounds",
    "Configuration",
    "Edit",
    "Explorer",
    "Finding",
    "MutationError",
    "Outcome",
]
