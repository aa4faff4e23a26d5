"""``python -m gpuq.bench``."""

from gpuq.bench.cli import app

if __name__ == "__main__":
    app(prog_name="gpuq bench")
