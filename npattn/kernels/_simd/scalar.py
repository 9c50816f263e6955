"""Square roots and logarithms."""

from typing import Any

from numba.extending import intrinsic

from npattn.kernels._simd.vectors import call_same


@intrinsic
def sqrt(typingctx: Any, vector: Any) -> Any:
    """The square root of each lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call_same(builder, "llvm.sqrt", arguments[0])

    return vector(vector), codegen


def _scalar_function(name: str) -> Any:
    @intrinsic
    def function(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.call(builder.module.declare_intrinsic(name, [arguments[0].type]), arguments)

        return x(x), codegen

    return function


#: Of one scalar.
sqrt_scalar, log_scalar = _scalar_function("llvm.sqrt"), _scalar_function("llvm.log")

__all__ = ["log_scalar", "sqrt", "sqrt_scalar"]
