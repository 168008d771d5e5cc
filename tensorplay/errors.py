"""The errors that a user can see, each saying what to do next."""

from __future__ import annotations


class TensorPlayError(RuntimeError):
    """Every error of ours derives from it (and so from RuntimeError)."""


class GraphCaptureError(TensorPlayError):
    """The function does something that capture cannot represent. Names the user's file and line."""


class FirstCallError(GraphCaptureError):
    """The first call makes state that later calls find, as an optimizer does: call the function once, then compile it."""


class UnsupportedError(TensorPlayError):
    """A part of the compiler has no row for this program; the message names the operator and the reason."""


class NeedsDataError(UnsupportedError):
    """An operator's result has a shape, or is a number, that only the data tell."""


class StrictNativeError(TensorPlayError):
    """strict_native=True (or fullgraph=True) and the function could not be compiled as a whole."""


class CompilerError(TensorPlayError):
    """The C++ compiler is missing or refused our source; holds what it printed."""


class VerificationError(TensorPlayError):
    """tp.compile(..., verify=True) found a difference from eager; names the first level, pass and node."""


class RecompileLimitError(TensorPlayError):
    """strict_native=True and a version limit was reached; names the component of the key that varies."""


class FallbackWarning(UserWarning):
    """A function, or a part of it, runs eagerly; said once for each reason."""


class CheckFailed(Exception):
    """A run-time check failed: `code` of entry `segment`, or `message` (segment None)."""

    def __init__(self, segment: int | None, code: int, message: str = "a library operator's result has another shape") -> None:
        self.segment = segment
        self.code = code
        self.message = message
