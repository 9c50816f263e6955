"""Parts of kernels: plain functions on numbers and vectors, put into their caller's LLVM module directly.

Numba's pipeline spends two milliseconds of processor time a statement on what kernels do not use: Python
objects, arrays, type unification, reference counts. The forward kernel took 8.5 s to compile as ``njit``
functions and 3.7 s as parts that Numba lowers; lowered here it takes 1.4 (Zen 4), and LLVM is most of that. A
part is still ordinary Numba-flavoured Python (Numba compiles the same text: see
tests/kernels/test_numba_parts.py), restricted to what this file reads:

- values: integers (64 bits), floats of one precision or another, booleans, vectors, records; of a tuple only
  the type is passed on, for intrinsics that ask for its length; no other object;
- names: parameters, variables, and constants or functions of the module;
- calls: other parts, Numba intrinsics (`npattn.kernels._simd`), ``np.float32`` under a name of the module;
- statements: assignment (also of tuples), augmented assignment, ``if``, ``while``, ``for ... in range`` and
  ``return``; expressions: arithmetic, comparison, ``and``, ``or``, ``not``, ``a if b else c``, fields of
  records.

A variable keeps the type of its first assignment; integers of 32 bits are widened when read. A kernel proper
is a function of one line that calls a part (`_jit.jit`); functions compiled by Numba may call parts as well.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BOOL = ir.IntType(1)


def part(returns: Any = types.void, static: tuple[str, ...] = ()) -> Any:
    """Make a function callable from kernels and other parts.

    ``returns`` is the Numba type of its result, or "one" for the type of its last argument. Parameters named
    in ``static`` are True or False while compiling: each value gets a version of its own, in which an ``if``
    on the parameter keeps one branch.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        names = list(inspect.signature(function).parameters)
        scope: dict[str, Any] = {
            "emit": lambda *kinds: _call_from_numba(function, returns, static, names, kinds)
        }
        exec(f"def part(typingctx, {', '.join(names)}): return emit({', '.join(names)})", scope)
        made = scope["part"]
        made.__name__ = made.__qualname__ = function.__name__
        made.__doc__ = function.__doc__
        made.__module__ = function.__module__
        made = intrinsic(prefer_literal=True)(made) if static else intrinsic(made)
        made.function, made.returns = function, returns
        made.static = [name in static for name in names]
        return made

    return decorate


def _call_from_numba(
    function: Callable[..., Any],
    returns: Any,
    static: tuple[str, ...],
    names: list[str],
    kinds: tuple[Any, ...],
) -> Any:
    """Signature and code generator of a call out of a function that Numba lowers."""
    kinds = tuple(
        kind if name in static else _widened(types.unliteral(kind))
        for name, kind in zip(names, kinds, strict=True)
    )
    result = kinds[-1] if returns == "one" else returns

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target = lowered(context, builder.module, function, kinds, result)
        arguments = [
            _to_part(builder, kind, value)
            for kind, value in zip(kinds, values, strict=True)
            if _is_passed(kind)
        ]
        value = builder.call(target, arguments)
        return context.get_dummy_value() if result == types.void else value

    return result(*kinds), codegen


def _widened(kind: Any) -> Any:
    return types.intp if isinstance(kind, types.Integer) else kind


def _is_passed(kind: Any) -> bool:
    """Whether a parameter of this type has a value when the code runs: a tuple only tells its length."""
    return not isinstance(kind, types.Literal | types.UniTuple)


def _to_part(builder: Any, kind: Any, value: Any) -> Any:
    if kind == types.boolean and value.type != BOOL:
        return builder.trunc(value, BOOL)
    return value


class Value(NamedTuple):
    """A value while lowering: its Numba type and its LLVM value."""

    kind: Any
    ir: Any


@cache
def _definitions(module: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module, parsed."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def lowered(context: Any, module: Any, function: Any, kinds: tuple[Any, ...], result: Any) -> Any:
    """The LLVM function of a part for argument types ``kinds`` in ``module``, made at its first use."""
    made = module.__dict__.setdefault("_npattn_parts", {})
    key = (function, kinds)
    if key not in made:
        returns = ir.VoidType() if result == types.void else _llvm(context, result)
        passed = [_llvm(context, kind) for kind in kinds if _is_passed(kind)]
        signature = ir.FunctionType(returns, passed)
        name = f"npattn.{function.__module__.rpartition('.')[2]}.{function.__name__}.{len(made)}"
        target = ir.Function(module, signature, name)
        target.linkage = "internal"
        target.attributes.add("nounwind")
        definition = _definitions(function.__module__)[function.__name__]
        if any(isinstance(node, ast.For | ast.While) for node in ast.walk(definition)):
            target.attributes.add("noinline")  # a call is nothing beside a loop; copies cost compile time
        made[key] = target
        _Lowering(context, target, function, kinds, result).run()
    return made[key]


def _llvm(context: Any, kind: Any) -> ir.Type:
    return BOOL if kind == types.boolean else context.get_value_type(kind)


class _Lowering:
    """Emits the body of one part."""

    def __init__(
        self, context: Any, target: ir.Function, function: Any, kinds: Sequence[Any], result: Any
    ) -> None:
        self.context = context
        self.builder = ir.IRBuilder(target.append_basic_block("entry"))
        self.function = function
        self.names = function.__globals__
        self.result = result
        self.node = _definitions(function.__module__)[function.__name__]
        self.variables: dict[str, tuple[Any, Any]] = {}  # name -> (type, where it is kept)
        self.known: dict[str, bool] = {}  # static parameters
        self.tuples: dict[str, Value] = {}  # parameters of which only the type counts
        values = iter(target.args)
        for parameter, kind in zip(self.node.args.args, kinds, strict=True):
            if isinstance(kind, types.Literal):
                self.known[parameter.arg] = kind.literal_value
            elif not _is_passed(kind):
                self.tuples[parameter.arg] = Value(kind, ir.Constant(_llvm(context, kind), ir.Undefined))
            else:
                self.assign(parameter.arg, Value(kind, next(values)))

    def run(self) -> None:
        self.block(self.node.body)
        if not self.builder.block.is_terminated:
            if self.result == types.void:
                self.builder.ret_void()
            else:
                self.builder.unreachable()

    # --- statements -----------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if self.builder.block.is_terminated:
                return
            getattr(self, f"do_{type(statement).__name__}", self.refuse)(statement)

    def refuse(self, node: ast.AST) -> Any:
        raise NotImplementedError(
            f"{self.function.__module__}.{self.function.__name__}, line {getattr(node, 'lineno', '?')}: a "
            f"part cannot hold {type(node).__name__}: {ast.unparse(node)}"
        )

    def assign(self, name: str, value: Value) -> None:
        if name not in self.variables:
            kind = _widened(value.kind)
            slot = cgutils.alloca_once(self.builder, _llvm(self.context, kind), name=name)
            self.variables[name] = kind, slot
        kind, slot = self.variables[name]
        self.builder.store(self.cast(value, kind), slot)

    def do_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            values = [self.value(element) for element in node.value.elts]  # all read before any is written
            for element, value in zip(target.elts, values, strict=True):
                assert isinstance(element, ast.Name)
                self.assign(element.id, value)
        elif isinstance(target, ast.Name):
            self.assign(target.id, self.value(node.value))
        else:
            self.refuse(node)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        assert isinstance(node.target, ast.Name)
        self.assign(
            node.target.id, self.binary(node.op, self.value(node.target), self.value(node.value), node)
        )

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.value(node.value)

    def do_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.builder.ret_void()
        else:
            self.builder.ret(self.cast(self.value(node.value), self.result))

    def do_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id in self.known:
            self.block(node.body if self.known[node.test.id] else node.orelse)
            return
        then, other, after = (self.builder.append_basic_block(name) for name in ("then", "else", "after"))
        self.builder.cbranch(self.truth(node.test), then, other)
        for start, body in ((then, node.body), (other, node.orelse)):
            self.builder.position_at_end(start)
            self.block(body)
            if not self.builder.block.is_terminated:
                self.builder.branch(after)
        self.builder.position_at_end(after)
        if not self._is_reached(after):
            self.builder.unreachable()

    def _is_reached(self, block: Any) -> bool:
        for other in self.builder.function.blocks:
            if other.terminator is not None and block in getattr(other.terminator, "operands", ()):
                return True
        return False

    def do_While(self, node: ast.While) -> None:
        test, body, after = (self.builder.append_basic_block(name) for name in ("test", "body", "after"))
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.builder.cbranch(self.truth(node.test), body, after)
        self.builder.position_at_end(body)
        self.block(node.body)
        if not self.builder.block.is_terminated:
            self.builder.branch(test)
        self.builder.position_at_end(after)

    def do_For(self, node: ast.For) -> None:
        call = node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            self.refuse(node)
        assert isinstance(call, ast.Call)
        assert isinstance(node.target, ast.Name)
        limits = [self.cast(self.value(argument), types.intp) for argument in call.args]
        one, zero = limits[0].type(1), limits[0].type(0)
        start = limits[0] if len(limits) > 1 else zero
        stop = limits[1] if len(limits) > 1 else limits[0]
        step = limits[2] if len(limits) > 2 else one
        down = len(call.args) == 3 and isinstance(call.args[2], ast.UnaryOp)  # a step like -1; others are > 0
        counter = cgutils.alloca_once(self.builder, start.type)
        self.builder.store(start, counter)
        test, body, after = (self.builder.append_basic_block(name) for name in ("range", "body", "after"))
        self.builder.branch(test)
        self.builder.position_at_end(test)
        at = self.builder.load(counter)
        self.builder.cbranch(self.builder.icmp_signed(">" if down else "<", at, stop), body, after)
        self.builder.position_at_end(body)
        self.assign(node.target.id, Value(types.intp, at))
        self.block(node.body)
        if not self.builder.block.is_terminated:
            self.builder.store(self.builder.add(at, step), counter)
            self.builder.branch(test)
        self.builder.position_at_end(after)

    # --- expressions ----------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        result: Value = getattr(self, f"of_{type(node).__name__}", self.refuse)(node)
        return result

    def truth(self, node: ast.expr) -> Any:
        value = self.value(node)
        if value.kind == types.boolean:
            return value.ir
        return self.builder.icmp_signed("!=", value.ir, value.ir.type(0))

    def cast(self, value: Value, kind: Any) -> Any:
        """The LLVM value of ``value`` as ``kind``."""
        have, builder = value.kind, self.builder
        if have == kind:
            return value.ir
        if isinstance(kind, types.Integer) and isinstance(have, types.Integer):
            wanted = ir.IntType(kind.bitwidth)
            if kind.bitwidth == have.bitwidth:
                return value.ir
            return (
                builder.sext(value.ir, wanted)
                if kind.bitwidth > have.bitwidth
                else builder.trunc(value.ir, wanted)
            )
        if isinstance(kind, types.Integer) and have == types.boolean:
            return builder.zext(value.ir, ir.IntType(kind.bitwidth))
        if isinstance(kind, types.Float) and isinstance(have, types.Float):
            wanted = _llvm(self.context, kind)
            longer = kind.bitwidth > have.bitwidth
            return builder.fpext(value.ir, wanted) if longer else builder.fptrunc(value.ir, wanted)
        if isinstance(kind, types.Float) and isinstance(have, types.Integer):
            return builder.sitofp(value.ir, _llvm(self.context, kind))
        if kind == types.boolean and isinstance(have, types.Integer):
            return builder.icmp_signed("!=", value.ir, value.ir.type(0))
        raise TypeError(f"{self.function.__name__}: cannot make {kind} of {have}")

    def constant(self, value: Any) -> Value:
        if isinstance(value, bool):
            return Value(types.boolean, BOOL(int(value)))
        if isinstance(value, int):
            return Value(types.intp, ir.IntType(64)(value))
        if isinstance(value, np.float32):
            return Value(types.float32, ir.FloatType()(float(value)))
        return Value(types.float64, ir.DoubleType()(float(value)))

    def of_Constant(self, node: ast.Constant) -> Value:
        return self.constant(node.value)

    def of_Name(self, node: ast.Name) -> Value:
        if node.id in self.variables:
            kind, slot = self.variables[node.id]
            return Value(kind, self.builder.load(slot))
        if node.id in self.tuples:
            return self.tuples[node.id]
        value = self.known.get(node.id, self.names.get(node.id))
        if not isinstance(value, (bool, int, float, np.float32)):
            self.refuse(node)
        return self.constant(value)

    def of_Attribute(self, node: ast.Attribute) -> Value:
        record = self.value(node.value)
        field = record.kind.fields[node.attr]
        start = self.builder.ptrtoint(record.ir, ir.IntType(64))
        kind = field.type
        place = self.builder.add(start, start.type(field.offset))
        pointer = self.builder.inttoptr(place, _llvm(self.context, kind).as_pointer())
        return Value(kind, self.builder.load(pointer))

    def of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return Value(types.boolean, self.builder.not_(self.truth(node.operand)))
        if not isinstance(node.op, ast.USub):
            self.refuse(node)
        value = self.value(node.operand)
        if isinstance(value.kind, types.Float):
            return Value(value.kind, self.builder.fneg(value.ir))
        return Value(value.kind, self.builder.neg(value.ir))

    def of_BinOp(self, node: ast.BinOp) -> Value:
        return self.binary(node.op, self.value(node.left), self.value(node.right), node)

    def unified(self, a: Value, b: Value) -> Any:
        """The type in which two numbers meet."""
        if isinstance(a.kind, types.Float) or isinstance(b.kind, types.Float):
            floats = [value.kind for value in (a, b) if isinstance(value.kind, types.Float)]
            return max(floats, key=lambda kind: kind.bitwidth)
        return types.intp

    def binary(self, operation: ast.operator, a: Value, b: Value, node: ast.AST) -> Value:
        kind = self.unified(a, b)
        x, y = self.cast(a, kind), self.cast(b, kind)
        builder = self.builder
        name = type(operation).__name__
        if isinstance(kind, types.Float):
            names = {"Add": "fadd", "Sub": "fsub", "Mult": "fmul", "Div": "fdiv"}
            return Value(kind, getattr(builder, names[name])(x, y) if name in names else self.refuse(node))
        names = {"Add": "add", "Sub": "sub", "Mult": "mul", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor"}
        if name in names:
            return Value(kind, getattr(builder, names[name])(x, y))
        if name not in ("FloorDiv", "Mod"):
            self.refuse(node)
        # Python rounds down, the processor towards zero
        quotient, rest = builder.sdiv(x, y), builder.srem(x, y)
        uneven = builder.icmp_signed("!=", rest, rest.type(0))
        apart = builder.icmp_signed("<", builder.xor(rest, y), rest.type(0))
        fix = builder.and_(uneven, apart)
        if name == "FloorDiv":
            return Value(kind, builder.sub(quotient, builder.zext(fix, quotient.type)))
        return Value(kind, builder.add(rest, builder.select(fix, y, y.type(0))))

    def of_Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1:
            self.refuse(node)
        a, b = self.value(node.left), self.value(node.comparators[0])
        signs = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}
        sign = signs[type(node.ops[0]).__name__]
        kind = self.unified(a, b)
        x, y = self.cast(a, kind), self.cast(b, kind)
        if isinstance(kind, types.Integer):
            return Value(types.boolean, self.builder.icmp_signed(sign, x, y))
        compare = self.builder.fcmp_unordered if sign == "!=" else self.builder.fcmp_ordered
        return Value(types.boolean, compare(sign, x, y))

    def of_BoolOp(self, node: ast.BoolOp) -> Value:
        done = self.builder.append_basic_block("known")
        is_and = isinstance(node.op, ast.And)
        incoming = []
        for operand in node.values[:-1]:
            test = self.truth(operand)
            more = self.builder.append_basic_block("more")
            incoming.append((BOOL(0 if is_and else 1), self.builder.block))
            self.builder.cbranch(test, more if is_and else done, done if is_and else more)
            self.builder.position_at_end(more)
        last = self.truth(node.values[-1])
        incoming.append((last, self.builder.block))
        self.builder.branch(done)
        self.builder.position_at_end(done)
        result = self.builder.phi(BOOL)
        for value, block in incoming:
            result.add_incoming(value, block)
        return Value(types.boolean, result)

    def of_IfExp(self, node: ast.IfExp) -> Value:
        then, other, after = (self.builder.append_basic_block(name) for name in ("then", "else", "after"))
        self.builder.cbranch(self.truth(node.test), then, other)
        ends = []
        for start, branch in ((then, node.body), (other, node.orelse)):
            self.builder.position_at_end(start)
            value = self.value(branch)
            kind = _widened(value.kind)
            ends.append((kind, self.cast(value, kind), self.builder.block))
            self.builder.branch(after)
        if ends[0][0] != ends[1][0]:
            self.refuse(node)
        self.builder.position_at_end(after)
        result = self.builder.phi(ends[0][1].type)
        for _, value, block in ends:
            result.add_incoming(value, block)
        return Value(ends[0][0], result)

    def of_Call(self, node: ast.Call) -> Value:
        if not isinstance(node.func, ast.Name) or node.keywords:
            self.refuse(node)
        assert isinstance(node.func, ast.Name)
        callee = self.names.get(node.func.id)
        if callee is np.float32:
            return Value(types.float32, self.cast(self.value(node.args[0]), types.float32))
        function = getattr(callee, "function", None)
        if function is not None:
            kinds, arguments = [], []
            for argument, is_static in zip(node.args, callee.static, strict=True):
                if is_static:
                    known = argument.value if isinstance(argument, ast.Constant) else self.known[argument.id]  # type: ignore[attr-defined]
                    kinds.append(types.literal(known))
                    continue
                value = self.value(argument)
                kinds.append(_widened(value.kind))
                if _is_passed(kinds[-1]):
                    arguments.append(self.cast(value, kinds[-1]))
            result = kinds[-1] if callee.returns == "one" else callee.returns
            target = lowered(self.context, self.builder.module, function, tuple(kinds), result)
            return Value(result, self.builder.call(target, arguments))
        if not hasattr(callee, "_defn"):
            self.refuse(node)
        values = [self.value(argument) for argument in node.args]
        signature, codegen = callee._defn(self.context.typing_context, *(value.kind for value in values))
        arguments = [self.cast(value, kind) for value, kind in zip(values, signature.args, strict=True)]
        return Value(signature.return_type, codegen(self.context, self.builder, signature, arguments))


__all__ = ["lowered", "part"]
