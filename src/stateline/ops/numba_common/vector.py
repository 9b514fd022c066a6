"""Fixed-size vectors as values in numba functions.

LLVM's vectoriser does not keep the states of a recurrence in registers across a loop over time,
because it must assume that arrays overlap. With vectors as values it does. LLVM maps a vector to as
many machine registers as it takes, so the kernels are portable (AVX-512, AVX2, SSE, NEON).

``LANES`` neighbouring channels make a vector. A wide vector has ``k * LANES`` lanes: k modes (or k
tokens) of ``LANES`` channels each. The operators ``+ - *`` work lane by lane; a scalar is repeated
for all lanes, and a vector for all modes of a wide one.
"""

# mypy: ignore-errors

import math
import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.core.config import CPU_FEATURES
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_FUSE = ("contract",)  # a product and a sum may become one fused operation; nothing else changes


def _lanes() -> int:
    """Float32 numbers in the widest vector register of the processor that numba compiles for."""
    features = get_host_cpu_features() if CPU_FEATURES is None else CPU_FEATURES
    if "+avx512f" in features:
        return 16
    return 8 if "+avx" in features else 4


LANES = _lanes()

LOG2_E = 1 / math.log(2)
"""Kernels compute exp(x) as 2**(LOG2_E x)."""


class Vector(types.Type):
    """``lanes`` numbers of one float type."""

    def __init__(self, element, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"vector({element}, {lanes})")


def _llvm_float(element):
    return ir.FloatType() if element.bitwidth == 32 else ir.DoubleType()


def _working(array):
    """The float type that kernels compute in with entries of an array.

    An array of uint16 has the bits of bfloat16: the upper half of those of float32.
    """
    return types.float32 if array.dtype == types.uint16 else array.dtype


def _like(kind, x):
    """A type, in as many lanes as a value has."""
    return ir.VectorType(kind, x.type.count) if isinstance(x.type, ir.VectorType) else kind


def _constant(kind, value):
    """A number, in all lanes."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _widened(builder, halves):
    """Float32 numbers from the bits of bfloat16."""
    wide = _like(_I32, halves)
    bits = builder.shl(builder.zext(halves, wide), _constant(wide, 16))
    return builder.bitcast(bits, _like(ir.FloatType(), halves))


def _rounded(builder, x):
    """The bits of the nearest numbers in bfloat16; of two, those of the even one."""
    wide = _like(_I32, x)
    bits, half = builder.bitcast(x, wide), _constant(wide, 16)
    odd = builder.and_(builder.lshr(bits, half), _constant(wide, 1))
    near = builder.add(bits, builder.add(odd, _constant(wide, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", x, x)
    near = builder.select(nan, _constant(wide, 0x7FC00000), near)
    return builder.trunc(builder.lshr(near, half), _like(_I16, x))


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector) -> None:
        registers = ir.VectorType(_llvm_float(vector.element), vector.lanes)
        super().__init__(manager, vector, registers)


def _shuffle(builder, a, b, places):
    mask = ir.Constant(ir.VectorType(_I32, len(places)), list(places))
    return builder.shuffle_vector(a, b, mask)


def _spread(builder, scalar, lanes: int):
    """The same number in all lanes."""
    one = ir.Constant(ir.VectorType(scalar.type, 1), ir.Undefined)
    one = builder.insert_element(one, scalar, _I32(0))
    return _shuffle(builder, one, one, [0] * lanes)


def _widen(context, builder, value, kind, vector):
    """A scalar or a shorter vector, repeated until it has the lanes of ``vector``."""
    if not isinstance(kind, Vector):
        return _spread(builder, context.cast(builder, value, kind, vector.element), vector.lanes)
    if kind.lanes == vector.lanes:
        return value
    return _shuffle(builder, value, value, list(range(kind.lanes)) * (vector.lanes // kind.lanes))


def _define(function, instruction: str) -> None:
    """Let a Python operator work on vectors."""

    @infer_global(function)
    class Operator(AbstractTemplate):
        def generic(self, args, kws):
            vectors = [kind for kind in args if isinstance(kind, Vector)]
            if not vectors or kws:
                return None
            return signature(max(vectors, key=lambda vector: vector.lanes), *args)

    def generate(context, builder, signature, args):
        kinds, vector = signature.args, signature.return_type
        pairs = zip(args, kinds, strict=True)
        a, b = (_widen(context, builder, x, kind, vector) for x, kind in pairs)
        return getattr(builder, instruction)(a, b, flags=_FUSE)

    for kinds in ((Vector, Vector), (Vector, types.Float), (types.Float, Vector)):
        lower_builtin(function, *kinds)(generate)


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")


def _address(context, builder, array_type, array, index, vector):
    data = context.make_array(array_type)(context, builder, array).data
    kind = _I16 if array_type.dtype == types.uint16 else _llvm_float(vector.element)
    pointer = ir.VectorType(kind, vector.lanes).as_pointer()
    return builder.bitcast(builder.gep(data, [index]), pointer)


@intrinsic(prefer_literal=True)
def load(typing, array, index, lanes):
    """Load ``lanes`` neighbouring entries of a flat array, starting at ``index``."""
    vector = Vector(_working(array), lanes.literal_value)

    def generate(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1], vector)
        found = builder.load(address, align=array.dtype.bitwidth // 8)
        return _widened(builder, found) if array.dtype == types.uint16 else found

    return vector(array, types.intp, lanes), generate


@intrinsic
def store(typing, array, index, vector):
    """Write all lanes to a flat array, starting at ``index``."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1], vector)
        written = _rounded(builder, args[2]) if array.dtype == types.uint16 else args[2]
        builder.store(written, address, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic(prefer_literal=True)
def zeros(typing, array, lanes):
    """A vector of zeros, of the array's float type."""
    vector = Vector(array.dtype, lanes.literal_value)
    registers = ir.VectorType(_llvm_float(vector.element), vector.lanes)
    return vector(array, lanes), lambda *_: ir.Constant(registers, None)


@intrinsic
def fold(typing, vector):
    """Sum of a wide vector over its modes: one vector of channels."""

    def generate(context, builder, signature, args):
        total, *others = _split(builder, args[0])
        for part in others:
            total = builder.fadd(total, part, flags=_FUSE)
        return total

    return Vector(vector.element, LANES)(vector), generate


def _addresses(context, builder, array_type, array, first, apart, count, vector):
    """Addresses of ``count`` vectors that begin ``apart`` entries after each other."""
    places = (builder.add(first, builder.mul(apart, apart.type(i))) for i in range(count))
    return [_address(context, builder, array_type, array, place, vector) for place in places]


def _join(builder, parts):
    """One vector of the lanes of several, whose number is a power of two."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffle(builder, a, b, range(2 * a.type.count)) for a, b in pairs]
    return parts[0]


def _split(builder, wide):
    """The parts of ``LANES`` lanes of a wide vector."""
    starts = range(0, wide.type.count, LANES)
    return [_shuffle(builder, wide, wide, range(i, i + LANES)) for i in starts]


@intrinsic(prefer_literal=True)
def load_rows(typing, array, index, apart, count):
    """``count`` vectors that begin ``apart`` entries after each other, as a wide vector."""
    row, wide = (Vector(array.dtype, n * LANES) for n in (1, count.literal_value))

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        places = _addresses(context, builder, kind, *args[:3], count.literal_value, row)
        return _join(builder, [builder.load(p, align=row.element.bitwidth // 8) for p in places])

    return wide(array, types.intp, types.intp, count), generate


@intrinsic
def store_rows(typing, array, index, apart, vector):
    """Write the vectors of a wide vector so that they begin ``apart`` entries after each other."""
    row = Vector(vector.element, LANES)

    def generate(context, builder, signature, args):
        kind, rows = signature.args[0], _split(builder, args[3])
        places = _addresses(context, builder, kind, *args[:3], len(rows), row)
        for x, place in zip(rows, places, strict=True):
            builder.store(x, place, align=row.element.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), generate


@intrinsic
def transposed(typing, vector):
    """The transpose of ``LANES`` rows. Each round swaps a bit of the row and of the entry."""

    def generate(context, builder, signature, args):
        rows, bit = _split(builder, args[0]), 1
        while bit < LANES:
            low = [i - bit + LANES if i & bit else i for i in range(LANES)]
            high = [i + LANES if i & bit else i + bit for i in range(LANES)]
            for i in range(LANES):
                if not i & bit:
                    pair = rows[i], rows[i + bit]
                    rows[i], rows[i + bit] = (_shuffle(builder, *pair, k) for k in (low, high))
            bit *= 2
        return _join(builder, rows)

    return vector(vector), generate


@intrinsic(prefer_literal=True)
def load_each(typing, array, index, count):
    """``count`` neighbouring entries as a wide vector: one for each mode, for all its channels."""
    vector = Vector(array.dtype, count.literal_value * LANES)

    def generate(context, builder, signature, args):
        few = Vector(vector.element, count.literal_value)
        address = _address(context, builder, signature.args[0], args[0], args[1], few)
        entries = builder.load(address, align=vector.element.bitwidth // 8)
        places = [i for i in range(few.lanes) for _ in range(LANES)]
        return _shuffle(builder, entries, entries, places)

    return vector(array, types.intp, count), generate


@intrinsic(prefer_literal=True)
def load_column(typing, array, index, apart, count):
    """Like ``load_each``, for entries at a distance of ``apart``."""
    one, wide = Vector(array.dtype, 1), Vector(array.dtype, count.literal_value * LANES)

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        places = _addresses(context, builder, kind, *args[:3], count.literal_value, one)
        entries = (builder.load(p, align=wide.element.bitwidth // 8) for p in places)
        return _join(builder, [_shuffle(builder, x, x, [0] * LANES) for x in entries])

    return wide(array, types.intp, types.intp, count), generate


@intrinsic
def sum_channels(typing, vector):
    """Sums over the channels of a wide vector: a short vector with one entry for each mode."""
    modes = vector.lanes // LANES

    def generate(context, builder, signature, args):
        def add_neighbours(a, b):  # halves both, and joins them inside each four lanes
            even = [
                i for at in range(0, LANES, 4) for i in (at, at + 2, at + LANES, at + LANES + 2)
            ]
            odd = [i + 1 for i in even]
            x, y = _shuffle(builder, a, b, even), _shuffle(builder, a, b, odd)
            return builder.fadd(x, y, flags=_FUSE)

        parts = _split(builder, args[0])
        total = add_neighbours(add_neighbours(*parts[:2]), add_neighbours(*parts[2:]))
        lanes = LANES
        while lanes > 4:
            lanes //= 2
            halves = [_shuffle(builder, total, total, range(k, k + lanes)) for k in (0, lanes)]
            total = builder.fadd(*halves, flags=_FUSE)
        return total

    return (Vector(vector.element, 4)(vector), generate) if modes == 4 else None


# Coefficients of 2**x for |x| <= 1/2, the highest first. Float32: least relative error, but exactly
# 1 at 0, where a bias would add up over time. Float64: the Taylor series.
_POWER = {
    32: (
        0.00015353362062543556, 0.0013398874588536093, 0.009618437358493256, 0.055503324707021046,
        0.24022647913611142, 0.6931472028552524, 1.0,
    ),
    64: tuple(math.log(2) ** k / math.factorial(k) for k in range(13, -1, -1)),
}  # fmt: skip


@intrinsic
def exp2(typing, x):
    """2**x of a number or of each lane, for x <= 127; below x = -126 it is 2**-126."""
    element, lanes = (x.element, x.lanes) if isinstance(x, Vector) else (x, 0)
    bits, mantissa = element.bitwidth, 23 if element.bitwidth == 32 else 52
    whole, real = ir.IntType(bits), _llvm_float(element)
    if lanes:
        whole, real = ir.VectorType(whole, lanes), ir.VectorType(real, lanes)

    def generate(context, builder, signature, args):
        least = _constant(real, -126.0)
        low = builder.fcmp_ordered("<", args[0], least)  # a NaN stays one
        z = builder.select(low, least, args[0])
        name = f"llvm.rint.v{lanes}f{bits}" if lanes else f"llvm.rint.f{bits}"
        kind = ir.FunctionType(real, [real])
        n = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [z])
        f = builder.fsub(z, n)
        highest, *others = _POWER[bits]
        y = _constant(real, highest)
        for coefficient in others:
            product = builder.fmul(y, f, flags=_FUSE)
            y = builder.fadd(product, _constant(real, coefficient), flags=_FUSE)
        bias = _constant(whole, (1 << (bits - mantissa - 2)) - 1)
        exponent = builder.add(builder.fptosi(n, whole), bias)
        power = builder.bitcast(builder.shl(exponent, _constant(whole, mantissa)), real)
        return builder.fmul(y, power)

    return x(x), generate


@intrinsic
def align_stack(typing):
    """Align the vectors that LLVM moves to the stack; every large kernel calls this first.

    Numba's stack is aligned to 16 bytes, so that every second such vector would cross a cache line.
    """

    def generate(context, builder, signature, args):
        builder.function.attributes.add("noinline")  # one copy of a loop compiles sooner than many
        builder.function.attributes.alignstack = 64
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def maximum(typing, a, b):
    """The larger number of each lane."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return (a(a, b), generate) if a == b else None


@intrinsic
def minimum(typing, a, b):
    """The smaller number of each lane; the number of b where a is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return (a(a, b), generate) if a == b else None


@intrinsic
def entry(typing, array, index):
    """One entry of a flat array, without numba's test for a negative index."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        found = builder.load(builder.gep(data, [args[1]]))
        return _widened(builder, found) if array.dtype == types.uint16 else found

    return _working(array)(array, types.intp), generate


@intrinsic
def put(typing, array, index, value):
    """Write an entry of a flat array, to bfloat16 rounded."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        found = _rounded(builder, args[2]) if array.dtype == types.uint16 else args[2]
        builder.store(found, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@intrinsic
def number(typing, array, value):
    """A number in the type that kernels compute in with entries of an array."""
    kind = _working(array)

    def generate(context, builder, signature, args):
        return context.cast(builder, args[1], value, kind)

    return kind(array, value), generate
