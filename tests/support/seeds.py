"""Seeds of the tests. `PACS_TEST_SEED=n` shifts all of them, so that the tests can be repeated with other random
numbers."""

import os


SHIFT = 1000 * int(os.environ.get("PACS_TEST_SEED", 0))


def shifted(seed: int) -> int:
    """The seed to use in the place of `seed`."""
    return seed + SHIFT
