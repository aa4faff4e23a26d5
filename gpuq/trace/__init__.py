"""What to do with a `gpuq.Trace`: keep it, look at it, hand it to other programs.

`Loader.trace` makes one. `save` and `load` keep it in a file; `summarize` says in figures and
`plot` in a picture where the time went; `write_csv` and `write_perfetto` are for other programs.
"""

from gpuq.trace.files import load, save
from gpuq.trace.perfetto import write_perfetto
from gpuq.trace.picture import plot
from gpuq.trace.summary import Summary, summarize
from gpuq.trace.table import write_csv

__all__ = ["Summary", "load", "plot", "save", "summarize", "write_csv", "write_perfetto"]
