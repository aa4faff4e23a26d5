"""What runs on the host."""

import gpuq.host.lowering  # noqa: F401
