"""Algebraic identities as equations, names of operators, and which operators are pointwise (table 4.1).

In: an fx node.  Out: `name_of(node)`, the operator's bare name whatever the spelling (`x.exp()`, `torch.exp(x)`,
`torch.special.exp2(x)`), or '' for anything that is not torch's; `identity(node)`, the rule whose left side it is.
Always: both sides of a rule are equal on every value where its exactness says so; one test evaluates all of them.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

EXACT = "exact"
SIGN_OF_ZERO = "the sign of zero changes"  # not taken under numerics="strict"


@dataclass(frozen=True)
class Identity:
    """An equation `left == x`: `left` applies one operator to x and a literal, or one operator twice to x."""

    left: str
    exactness: str

    @functools.cached_property
    def pattern(self) -> tuple[str, Any]:
        """(operator, literal), or (operator, operator) for one that undoes itself."""
        tree: Any = ast.parse(self.left, mode="eval").body
        if isinstance(tree, ast.BinOp):
            return _SYMBOLS[type(tree.op)], ast.literal_eval(tree.right)
        return _SYMBOLS[type(tree.op)], _SYMBOLS[type(tree.operand.op)]


_SYMBOLS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.Pow: "pow", ast.USub: "neg"}

IDENTITIES = (
    Identity("x * 1", EXACT),
    Identity("x / 1", EXACT),
    Identity("x ** 1", EXACT),
    Identity("x - 0", EXACT),
    Identity("x + -0.0", EXACT),
    Identity("-(-x)", EXACT),
    Identity("x + 0", SIGN_OF_ZERO),
)  # x * 0 is none (inf * 0 is NaN), nor is (x + y) + z == x + (y + z)


def same_literal(value: Any, literal: Any) -> bool:
    """Whether a number of a program is the literal of a rule: equal, and a zero of the same sign."""
    if type(value) not in (int, float) or value != literal:
        return False
    return value != 0 or math.copysign(1, value) == math.copysign(1, literal)


def identity(node: fx.Node) -> Identity | None:
    """The rule whose left side the node is; its x is `subject(node)`."""
    args = node.args
    if node.op != "call_function" or node.kwargs or not args or not isinstance(args[0], fx.Node):
        return None
    for rule in _BY_TARGET.get(node.target, ()):
        inner = rule.pattern[1]
        if isinstance(inner, str):
            if len(args) == 1 and args[0].op == "call_function" and args[0].target is node.target:
                return rule
        elif len(args) == 2 and same_literal(args[1], inner):
            return rule
    return None


def subject(node: fx.Node) -> fx.Node:
    """The x of the identity that the node is the left side of."""
    inner: Any = node.args[0]
    return inner.args[0] if len(node.args) == 1 else inner


_BY_TARGET: dict[Any, list[Identity]] = {}
for _rule in IDENTITIES:
    _BY_TARGET.setdefault(getattr(operator, _rule.pattern[0]), []).append(_rule)

COMMUTATIVE = frozenset(
    (operator.add, operator.mul, operator.and_, operator.or_, operator.xor, operator.eq, operator.ne)
)


# ---- names -----------------------------------------------------------------------------------------------------------

_ALIASES = {"special_exp2": "exp2", "special_logit": "logit", "clip": "clamp", "clip_": "clamp_", "truediv": "div"}
_MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._special", "torch._C._linalg",
            "torch._C._fft", "_operator", "torch.fft", "torch.linalg", "torch.special", "torch._tensor")  # fmt: skip
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType)


@functools.lru_cache(maxsize=4096)
def _name(target: Callable[..., Any]) -> str:
    if not isinstance(target, _CALLABLES) or getattr(target, "__module__", None) not in _MODULES:
        return ""
    name = target.__name__
    return _ALIASES.get(name, name.rstrip("_") if target.__module__ == "_operator" else name)


def name_of(node: fx.Node) -> str:
    """The operator's name; '' where the node calls something that is not torch's own."""
    if node.op == "call_method":
        return _ALIASES.get(node.target, node.target)  # type: ignore[arg-type, return-value]
    return _name(node.target) if node.op == "call_function" else ""  # type: ignore[arg-type]


def _words(text: str) -> Iterator[str]:
    return iter(text.split())


POINTWISE = frozenset(_words("""
    abs absolute acos acosh add addcdiv addcmul alpha_dropout angle asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh deg2rad digamma div divide elu eq erf erfc
    erfinv exp exp2 expm1 float_power floor floor_divide floordiv fmax fmin fmod frac ge gelu greater gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot invert isfinite isinf isnan isneginf isposinf le leaky_relu lerp lgamma
    log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid
    lshift lt masked_fill maximum minimum mish mod mul multiply nan_to_num ne neg negative nextafter or and xor pos positive
    pow rad2deg reciprocal relu relu6 remainder round rshift rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh
    softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc where xlogy
    special_erf special_erfc special_expit special_log1p special_expm1 special_entr special_xlog1py special_ndtr
    to type float half double bfloat16 int long short bool
""")) - {"alpha_dropout"}  # fmt: skip

# in-place operators with a functional twin of the same name and arguments
INPLACE = {
    f"{name}_": name
    for name in _words("""
        abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min copysign cos cosh
        deg2rad digamma div elu erf erfc exp exp2 expm1 floor fmod frac hypot leaky_relu lerp log log10 log1p log2 logit
        masked_fill mul nan_to_num neg pow rad2deg reciprocal relu remainder round rsqrt selu sigmoid sign sin sinh sqrt
        square sub tan tanh trunc xlogy
    """)
    if name not in ("elu", "leaky_relu", "selu")
}  # fmt: skip
