"""Registrations of a test that end with it."""

import contextlib


@contextlib.contextmanager
def restored(*registries):
    before = [registry.copy() for registry in registries]
    try:
        yield
    finally:
        for registry, kept in zip(registries, before, strict=True):
            registry.clear()
            registry.update(kept)
            registry._origins = kept._origins
