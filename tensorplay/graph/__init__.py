"""The captured graph and its rewrites."""

from .gate import gate

__all__ = ["gate"]
