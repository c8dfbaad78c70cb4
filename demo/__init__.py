"""The model in the box, and how it was trained. Skip it: the engine only reads its files."""

import command.enter  # noqa: F401  its scripts import it as `enter`
