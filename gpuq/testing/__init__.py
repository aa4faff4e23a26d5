"""Stand-ins for tests: readers and copiers whose order and failures a test decides.

Nothing but tests imports this package.
"""
