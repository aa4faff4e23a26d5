"""Search configurations, or run one schedule again and print its steps."""

from __future__ import annotations

import argparse

from gpuq.testing.explore import CONFIGURATIONS, Explorer


def main() -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m gpuq.testing.explore", description=__doc__)
    parser.add_argument("configuration", nargs="?", help="one of: " + "; ".join(CONFIGURATIONS))
    parser.add_argument("seed", nargs="?", help="of a schedule, as a finding prints it")
    parser.add_argument("--long", action="store_true", help="use the bounds of the long form")
    parser.add_argument("--most", type=int, help="schedules of each configuration")
    given = parser.parse_args()
    names = [given.configuration] if given.configuration else list(CONFIGURATIONS)
    found = False
    for name in names:
        configuration = CONFIGURATIONS[name]
        explorer = Explorer(configuration)
        bounds = configuration.long_bounds if given.long else configuration.bounds
        if given.seed is not None:
            finding, steps = explorer.replay(given.seed)
            print("\n".join(steps))
            print(finding or "nothing is wrong with this schedule")
        else:
            outcome = explorer.search(bounds, given.most)
            finding = outcome.finding
            print(outcome)
        found = found or finding is not None
    return int(found)


if __name__ == "__main__":
    raise SystemExit(main())
