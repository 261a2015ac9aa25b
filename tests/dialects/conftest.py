from tests.gateway.conftest import engine, serve

__all__ = ["engine", "serve"]
