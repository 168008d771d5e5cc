"""The captured graph and its rewrites."""

from ..capture.marks import leaf
from .gate import gate

__all__ = ["gate", "leaf"]
