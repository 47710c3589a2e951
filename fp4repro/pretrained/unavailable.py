"""The error that a pipeline may turn into a "not run" row."""

from fp4repro.errors import Fp4ReproError


class Unavailable(Fp4ReproError):
    """A model that this machine cannot get: a package or the network is missing."""
