"""Graphs as modules whose generated source goes with them.

In: a root and an fx graph.  Out: a module that generates its code when it is first called.
Always: torch.fx keeps the source of every module for ever, for tracebacks; of ours it is forgotten when they die.
"""

from __future__ import annotations

import linecache
import weakref
from typing import Any

from torch import fx, nn
from torch.fx import graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule


class Sourced(_LazyGraphModule):
    """A lazily compiled graph module."""

    def _real_recompile(self) -> Any:
        code = super()._real_recompile()
        weakref.finalize(self, _forget, type(self).forward.__code__.co_filename).atexit = False
        return code


def sourced(root: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A module whose code is there at once."""
    module = Sourced(root, graph, name)
    module.real_recompile()
    return module


def _forget(name: str) -> None:
    graph_module._loader.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)
