"""The soak: random requests for as long as one likes, while the files are changed; see `run`."""
