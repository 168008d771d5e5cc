"""Generated source: graphs as modules whose source goes with them, and texts as code.

In: a root and an fx graph.  Out: a module that generates its code when it is first called.
Always: torch.fx keeps the source of every module for ever, for tracebacks; of ours it is forgotten when they die.
"""

from __future__ import annotations

import linecache
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any

from torch import fx, nn
from torch.fx import graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule

LONG = 16 * 1024  # characters; parsing takes some forty times as many bytes


def code_of(text: str, name: str) -> CodeType:
    """The code of a text. A long one is parsed by a thread of its own, since malloc has a heap for each: the code stands
    above all that parsing took, and would keep it from the system, a hole in which tensors of the caller come to lie."""
    if len(text) < LONG:
        return compile(text, name, "exec", dont_inherit=True)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(compile, text, name, "exec", dont_inherit=True).result()
    except RuntimeError:  # the interpreter ends, and starts no thread
        return compile(text, name, "exec", dont_inherit=True)


class Sourced(_LazyGraphModule):
    """A lazily compiled graph module."""

    def _real_recompile(self) -> Any:
        code = super()._real_recompile()
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]  # fx's own prints to stderr where an operator raises
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
