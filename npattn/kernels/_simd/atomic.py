"""Atomic access to 64-bit words, and calling a compiled kernel by its address: what `_team` is made of.

All accesses are sequentially consistent. Addresses are plain integers, as everywhere in these kernels.
"""

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from npattn.kernels._simd import _host

I64 = ir.IntType(64)
ORDER = "seq_cst"


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """The word at ``address``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), ORDER, 8)

    return types.intp(types.intp), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write ``value``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add ``value``; returns what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], ORDER)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def atomic_replace(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write ``value`` if ``expected`` is there; returns whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, expected, value = arguments
        pair = builder.cmpxchg(_word(builder, address), expected, value, ORDER, ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(types.intp, types.intp, types.intp), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a waiting loop (x86); nothing elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _host.IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def give_way(typingctx: Any) -> Any:
    """Let another thread have this processor, where the system has ``sched_yield``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(
    typingctx: Any, kernel: Any, where: Any, start: Any, stop: Any, scratch: Any, one: Any
) -> Any:
    """``kernel(where, start, stop, scratch, one)``, ``kernel`` being the address of a compiled function."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments[1:]])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 5, one), codegen


__all__ = ["atomic_add", "atomic_load", "atomic_replace", "atomic_store", "call_kernel", "give_way", "pause"]
