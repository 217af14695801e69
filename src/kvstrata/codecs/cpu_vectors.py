# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Vector instructions inside numba: a value of 16 float32, and operations that the compiler left to itself gets wrong.

LLVM cuts 16 lanes into what the machine has (4 registers of NEON, 2 of AVX2). Offsets count elements from the first of
an array without gaps, whatever its shape. Nothing here checks them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

LANES = 16

_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_OCTETS = ir.VectorType(ir.IntType(8), LANES)
_PAIRS = ir.VectorType(ir.IntType(16), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


def _place(context, builder, kind, array, offset, vector):
    """Where `vector` lies in the array, as a pointer to it."""
    first = context.make_array(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(first, [offset]), vector.as_pointer())


def _load(context, builder, kind, array, offset, vector):
    place = _place(context, builder, kind, array, offset, vector)
    return builder.load(place, align=context.get_abi_sizeof(vector.element))


@intrinsic
def load(_context, array, _offset):
    """array[offset : offset + 16]"""

    def code(context, builder, signature, arguments):
        return _load(context, builder, signature.args[0], *arguments, _VECTOR)

    return _vector(array, types.intp), code


@intrinsic
def store(_context, array, _offset, _value):
    def code(context, builder, signature, arguments):
        array, offset, value = arguments
        place = _place(context, builder, signature.args[0], array, offset, _VECTOR)
        builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _vector), code


@intrinsic
def load_one(_context, array, _offset):
    def code(context, builder, signature, arguments):
        first = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        return builder.load(builder.gep(first, [arguments[1]]))

    return array.dtype(array, types.intp), code


@intrinsic
def store_one(_context, array, _offset, _value):
    def code(context, builder, signature, arguments):
        first = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        builder.store(arguments[2], builder.gep(first, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), code


@intrinsic
def zeros(_context):
    def code(_context, _builder, _signature, _arguments):
        return ir.Constant(_VECTOR, [0.0] * LANES)

    return _vector(), code


@intrinsic
def splat(_context, _value):
    """The same number in all lanes."""

    def code(_context, builder, _signature, arguments):
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), arguments[0], ir.Constant(ir.IntType(32), 0))
        return _shuffled(builder, one, one, [0] * LANES)

    return _vector(types.float32), code


@intrinsic
def multiply_add(_context, _a, _b, _c):
    """a * b + c, in one instruction where there is one."""

    def code(_context, builder, _signature, arguments):
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    return _vector(_vector, _vector, _vector), code


@intrinsic
def store_totals(_context, array, _offset, _a, _b, _c, _d):
    """array[offset : offset + 4] = the sums of the lanes of four values"""

    def code(context, builder, signature, arguments):
        array, offset, *values = arguments
        a, b, c, d = (_folded(builder, value) for value in values)
        totals = _neighbours_added(builder, _neighbours_added(builder, a, b), _neighbours_added(builder, c, d))
        place = _place(context, builder, signature.args[0], array, offset, totals.type)
        builder.store(totals, place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _vector, _vector, _vector, _vector), code


@intrinsic
def total(_context, _value):
    """The sum of the lanes."""

    def code(_context, builder, _signature, arguments):
        four = _folded(builder, arguments[0])
        two = _neighbours_added(builder, four, four)
        sums = _neighbours_added(builder, two, two)
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))

    return types.float32(_vector), code


def _folded(builder, value):
    """Halves added until 4 lanes are left."""
    while value.type.count > 4:
        half = value.type.count // 2
        lower, upper = (_shuffled(builder, value, value, range(i, i + half)) for i in (0, half))
        value = builder.fadd(lower, upper)
    return value


def _neighbours_added(builder, a, b):
    """[a0 + a1, a2 + a3, b0 + b1, b2 + b3]"""
    return builder.fadd(_shuffled(builder, a, b, (0, 2, 4, 6)), _shuffled(builder, a, b, (1, 3, 5, 7)))


def _shuffled(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


def _unpacker(bits: int):
    """Codes of `planes` less their middle, as float32. See cpu_kernels.py for how they lie."""
    middle = 2.0 ** (bits - 1) - 0.5

    @intrinsic
    def unpack(_context, top, following, low, _at, target, _into, _width):
        """16 entries from `at` on -> target[into + i * width + 0..15] for i = 0..3"""

        def code(context, builder, signature, arguments):
            top, following, low, at, target, into, width = arguments
            kinds = signature.args
            octets = _load(context, builder, kinds[0], top, at, _OCTETS)
            second = _load(context, builder, kinds[1], following, at, _OCTETS) if bits > 2 else None
            pairs = _load(context, builder, kinds[2], low, at, _PAIRS) if bits > 4 else None
            for i in range(4):
                codes = _field(builder, octets, 2 * i, 2)
                if second is not None:
                    codes = _appended(builder, codes, _field(builder, second, 2 * i, 2), 2)
                if pairs is not None:
                    nibbles = builder.trunc(builder.lshr(pairs, _same(_PAIRS, 4 * i)), _OCTETS)
                    codes = _appended(builder, codes, builder.and_(nibbles, _same(_OCTETS, 15)), 4)
                levels = builder.fsub(builder.uitofp(codes, _VECTOR), _same(_VECTOR, middle))
                offset = builder.add(into, builder.mul(width, ir.Constant(width.type, i)))
                place = _place(context, builder, kinds[4], target, offset, _VECTOR)
                builder.store(levels, place, align=4)
            return context.get_dummy_value()

        return types.void(top, following, low, types.intp, target, types.intp, types.intp), code

    return unpack


def _same(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def _field(builder, octets, shift: int, bits: int):
    return builder.and_(builder.lshr(octets, _same(_OCTETS, shift)), _same(_OCTETS, 2**bits - 1))


def _appended(builder, codes, field, bits: int):
    return builder.or_(builder.shl(codes, _same(_OCTETS, bits)), field)


unpack_8, unpack_4, unpack_2 = _unpacker(8), _unpacker(4), _unpacker(2)
