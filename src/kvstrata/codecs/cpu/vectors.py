# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Vector instructions inside numba: a value of 16 float32, and operations that the compiler alone vectorizes badly.

LLVM splits 16 lanes into the machine's registers (4 of NEON, 2 of AVX2). Offsets count elements from the first element
of an array without gaps, whatever its shape. No function here checks offsets.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

LANES = 16

_F32 = ir.FloatType()

_VECTOR = ir.VectorType(_F32, LANES)

_OCTETS = ir.VectorType(ir.IntType(8), LANES)

_PAIRS = ir.VectorType(ir.IntType(16), LANES)

_LARGEST = np.float32(65504)  # of float16

_SMALLEST_NORMAL = np.float32(2.0**-14)

_STEPS_DOWN = np.float32(2.0**24)  # subnormal float16 numbers are multiples of 2**-24

_WORDS = ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


def place_of(context, builder, kind, array, offset, vector):
    """Return a pointer to the `vector` at an offset of the array."""
    first = context.make_array(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(first, [offset]), vector.as_pointer())


def load_as(context, builder, kind, array, offset, vector):
    place = place_of(context, builder, kind, array, offset, vector)
    return builder.load(place, align=context.get_abi_sizeof(vector.element))


@intrinsic
def load(_context, array, _offset):
    """array[offset : offset + 16]"""

    def code(context, builder, signature, arguments):
        return load_as(context, builder, signature.args[0], *arguments, _VECTOR)

    return _vector(array, types.intp), code


@intrinsic
def store(_context, array, _offset, _value):
    def code(context, builder, signature, arguments):
        array, offset, value = arguments
        place = place_of(context, builder, signature.args[0], array, offset, _VECTOR)
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
    """Broadcast a number to all lanes."""

    def code(_context, builder, _signature, arguments):
        return splatted(builder, arguments[0])

    return _vector(types.float32), code


def splatted(builder, value, lanes: int = LANES):
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return shuffled(builder, one, one, [0] * lanes)


@intrinsic
def multiply_add(_context, _a, _b, _c):
    """a * b + c, in one instruction where there is one."""

    def code(_context, builder, _signature, arguments):
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    return _vector(_vector, _vector, _vector), code


@intrinsic
def add(_context, _a, _b):
    def code(_context, builder, _signature, arguments):
        return builder.fadd(*arguments)

    return _vector(_vector, _vector), code


@intrinsic
def larger(_context, _a, _b):
    """The larger magnitude of each lane, compared by bits, so that NaN is larger than all numbers."""

    def code(_context, builder, _signature, arguments):
        return builder.bitcast(_larger(builder, *(_magnitude(builder, each) for each in arguments)), _VECTOR)

    return _vector(_vector, _vector), code


@intrinsic
def largest(_context, _value):
    """The largest magnitude of the lanes."""

    def code(_context, builder, _signature, arguments):
        return _largest(builder, _magnitude(builder, arguments[0]))

    return types.float32(_vector), code


def _largest(builder, magnitudes):
    while magnitudes.type.count > 1:
        half = magnitudes.type.count // 2
        halves = (shuffled(builder, magnitudes, magnitudes, range(i, i + half)) for i in (0, half))
        magnitudes = _larger(builder, *halves)
    return builder.bitcast(builder.extract_element(magnitudes, ir.Constant(ir.IntType(32), 0)), _F32)


def _magnitude(builder, value):
    return builder.and_(builder.bitcast(value, _WORDS), constant(_WORDS, 0x7FFFFFFF))


def _larger(builder, a, b):
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


@intrinsic
def store_totals(_context, array, _offset, _a, _b, _c, _d):
    """array[offset : offset + 4] = the sums of the lanes of four values"""

    def code(context, builder, signature, arguments):
        array, offset, *values = arguments
        a, b, c, d = (_folded(builder, value) for value in values)
        totals = _neighbours_added(builder, _neighbours_added(builder, a, b), _neighbours_added(builder, c, d))
        place = place_of(context, builder, signature.args[0], array, offset, totals.type)
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
        lower, upper = (shuffled(builder, value, value, range(i, i + half)) for i in (0, half))
        value = builder.fadd(lower, upper)
    return value


def _neighbours_added(builder, a, b):
    """[a0 + a1, a2 + a3, b0 + b1, b2 + b3]"""
    return builder.fadd(shuffled(builder, a, b, (0, 2, 4, 6)), shuffled(builder, a, b, (1, 3, 5, 7)))


def shuffled(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


def _unpacker(bits: int):
    """Make an intrinsic that unpacks codes of `planes` to float32, less their middle. See blocks.py for the layout."""
    middle = 2.0 ** (bits - 1) - 0.5

    @intrinsic
    def unpack(_context, top, following, low, _at, target, _into, _width):
        """16 entries from `at` on -> target[into + i * width + 0..15] for i = 0..3"""

        def code(context, builder, signature, arguments):
            top, following, low, at, target, into, width = arguments
            kinds = signature.args
            octets = load_as(context, builder, kinds[0], top, at, _OCTETS)
            second = load_as(context, builder, kinds[1], following, at, _OCTETS) if bits > 2 else None
            pairs = load_as(context, builder, kinds[2], low, at, _PAIRS) if bits > 4 else None
            for i in range(4):
                codes = _field(builder, octets, 2 * i, 2)
                if second is not None:
                    codes = _appended(builder, codes, _field(builder, second, 2 * i, 2), 2)
                if pairs is not None:
                    nibbles = builder.trunc(builder.lshr(pairs, constant(_PAIRS, 4 * i)), _OCTETS)
                    codes = _appended(builder, codes, builder.and_(nibbles, constant(_OCTETS, 15)), 4)
                levels = builder.fsub(builder.uitofp(codes, _VECTOR), constant(_VECTOR, middle))
                offset = builder.add(into, builder.mul(width, ir.Constant(width.type, i)))
                place = place_of(context, builder, kinds[4], target, offset, _VECTOR)
                builder.store(levels, place, align=4)
            return context.get_dummy_value()

        return types.void(top, following, low, types.intp, target, types.intp, types.intp), code

    return unpack


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def _field(builder, octets, shift: int, bits: int):
    return builder.and_(builder.lshr(octets, constant(_OCTETS, shift)), constant(_OCTETS, 2**bits - 1))


def _appended(builder, codes, field, bits: int):
    return builder.or_(builder.shl(codes, constant(_OCTETS, bits)), field)


unpack_8, unpack_4, unpack_2 = _unpacker(8), _unpacker(4), _unpacker(2)


def _encoder(dim: int, to_scale):
    """Make an intrinsic from a vector, centred and rotated, to its codes of `planes:8`, without a detour over memory.

    `to_scale` rounds the largest magnitude to the stored scale. See blocks.py for the order of codes.
    """

    @intrinsic
    def encode(_context, x, _at, mean, signs, top, following, low, _into):
        """x[at : at + dim] -> dim / 4 entries of the planes from `into` on; returns the scale"""

        def code(context, builder, signature, arguments):
            x, at, mean, signs, *planes, into = arguments
            kinds = signature.args
            vectors = []
            for first in range(0, dim, LANES):
                offset = ir.Constant(at.type, first)
                value = load_as(context, builder, kinds[0], x, builder.add(at, offset), _VECTOR)
                middle = load_as(context, builder, kinds[2], mean, offset, _VECTOR)
                sign = load_as(context, builder, kinds[3], signs, offset, _VECTOR)
                vectors.append(builder.fmul(builder.fsub(value, middle), sign))
            vectors = _rotated(builder, vectors)
            magnitudes = reduce(lambda a, b: _larger(builder, a, b), (_magnitude(builder, v) for v in vectors))
            one = types.float32(types.float32)
            scale = context.compile_internal(builder, to_scale, one, [_largest(builder, magnitudes)])
            factor = splatted(builder, context.compile_internal(builder, _steps_by, one, [scale]))
            codes = [_codes(builder, vector, factor) for vector in vectors]
            for first in range(0, dim // 4, LANES):
                entry = builder.add(into, ir.Constant(into.type, first))
                four = codes[first // LANES :: dim // 4 // LANES]
                _store_packed(context, builder, kinds[4:7], planes, entry, four)
            return scale

        return types.float32(x, types.intp, mean, signs, top, following, low, types.intp), code

    return encode


def _steps_by(scale):
    """The factor from a value to steps of its code."""
    return np.float32(128) / scale if scale > 0 else np.float32(0)


def _rotated(builder, vectors):
    """All stages of a Hadamard transform, from the natural order to that of codes. Stages run in pairs, which weave
    distant elements together; the last pair keeps the order."""
    num_stages = (len(vectors) * LANES).bit_length() - 3
    for _ in range(num_stages // 2):
        vectors = [v for four in _quarters(vectors) for v in _woven(builder, _butterflies(builder, *four))]
    if num_stages % 2:
        middle = len(vectors) // 2
        pairs = zip(vectors[:middle], vectors[middle:], strict=True)
        vectors = [v for a, b in pairs for v in _zipped(builder, builder.fadd(a, b), builder.fsub(a, b))]
    made = [_butterflies(builder, *four) for four in _quarters(vectors)]
    return [four[i] for i in range(4) for four in made]


def _quarters(vectors):
    """The first vector of each quarter, then the second of each ..."""
    quarter = len(vectors) // 4
    return [vectors[k::quarter] for k in range(quarter)]


def _butterflies(builder, a, b, c, d):
    """Two stages of a Hadamard transform."""
    sums, differences = (builder.fadd(a, c), builder.fadd(b, d)), (builder.fsub(a, c), builder.fsub(b, d))
    return [each(*pair) for pair in (sums, differences) for each in (builder.fadd, builder.fsub)]


def _woven(builder, values):
    """Interleave four values of 16 lanes: lane 0 of all four first, then lane 1 of all four ..."""
    a, b, c, d = values
    pairs = zip(_zipped(builder, a, c), _zipped(builder, b, d), strict=True)
    return [each for even, odd in pairs for each in _zipped(builder, even, odd)]


def _zipped(builder, a, b):
    """a0, b0, a1, b1 ... in two values"""
    lanes = [i + part * LANES for i in range(LANES) for part in range(2)]
    return shuffled(builder, a, b, lanes[:LANES]), shuffled(builder, a, b, lanes[LANES:])


def _store_packed(context, builder, kinds, planes, into, codes):
    """Store 16 entries of each plane, packed from four values of codes."""
    crumbs = (_joined(builder, [_field(builder, code, shift, 2) for code in codes], 2) for shift in (6, 4))
    nibbles = [builder.zext(_field(builder, code, 0, 4), _PAIRS) for code in codes]
    for kind, plane, values in zip(kinds, planes, (*crumbs, _joined(builder, nibbles, 4)), strict=True):
        place = place_of(context, builder, kind, plane, into, values.type)
        builder.store(values, place, align=context.get_abi_sizeof(values.type.element))


def _codes(builder, values, factor):
    """value * factor + 128, truncated to a whole number and clamped to 0..255"""
    scaled = builder.fmul(values, factor, flags=("contract",))
    shifted = builder.fadd(scaled, constant(_VECTOR, 128), flags=("contract",))
    whole = builder.fptosi(shifted, _WORDS)
    for limit, beyond in ((0, "<"), (255, ">")):
        edge = constant(_WORDS, limit)
        whole = builder.select(builder.icmp_signed(beyond, whole, edge), edge, whole)
    return builder.trunc(whole, _OCTETS)


def _joined(builder, fields, bits: int):
    """Join bit fields, the first field in the lowest bits."""
    joined = fields[0]
    for i, field in enumerate(fields[1:], 1):
        joined = builder.or_(joined, builder.shl(field, constant(field.type, i * bits)))
    return joined


def to_half(a):
    """Round a >= 0 to the nearest float16 number, as float32."""
    if a >= _LARGEST:
        return _LARGEST
    if a < _SMALLEST_NORMAL:
        return np.float32(np.rint(a * _STEPS_DOWN) / _STEPS_DOWN)
    bits = np.float32(a).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.uint32(rounded).view(np.float32)


_LOG2_E = np.float32(1.4426950408889634)

# A weight of 1e-30 has no effect. Products with much smaller weights would be subnormal numbers, which are slow.
_SMALLEST, _LARGEST_POWER = np.float32(-100.0), np.float32(126.0)

# 2**f on [0, 1), a least-squares polynomial; relative error below 1e-6 in float32.
_C0 = np.float32(9.9999994e-1)

_C1 = np.float32(6.9315308e-1)

_C2 = np.float32(2.4015361e-1)

_C3 = np.float32(5.5826318e-2)

_C4 = np.float32(8.9893397e-3)

_C5 = np.float32(1.8775767e-3)


@njit(inline="always", fastmath=True)
def exp(x):
    """e**x without a branch or a call, so that the loops around it become vector instructions."""
    t = min(max(x * _LOG2_E, _SMALLEST), _LARGEST_POWER)
    whole = np.floor(t)
    f = t - whole
    power = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0
    bits = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return power * np.int32(bits).view(np.float32)


encode_64, encode_128 = _encoder(64, to_half), _encoder(128, to_half)
