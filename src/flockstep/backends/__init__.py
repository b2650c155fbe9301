"""What starts workers and carries their tensors."""

from flockstep.backends.base import Backend, Program, Watcher

__all__ = ["Backend", "Program", "Watcher"]
