# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Vector instructions for tiles of packed weights: 8 rows (outputs) by 32 columns (inputs).

A tile is *unpacked* first: its codes become integers of 8 bits, *levels*, in 8 vectors of 32. Vector j has columns 4j
to 4j + 3 of row 0, then these columns of row 1 and so on, since CPUs add products in fours. A weight is
scale * level + base, with a scale and a base for each row and group of columns; *factors* are both as float32, repeated
for each group of 32 columns.

Codes are stored in planes of 4, 2 or 1 bit, or as bytes: codes of 6 bits are a plane of the low 4 and, behind it, one
of the high 2. Offsets count elements of a contiguous array. No function here checks offsets.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from kvstrata.codecs.cpu.vectors import constant, load_as, place_of, shuffled, splatted
from kvstrata.packed.quantized import PLANES, TILE_COLUMNS, TILE_ROWS

TILE_VALUES = TILE_ROWS * TILE_COLUMNS

TILE_FACTORS = 2 * TILE_ROWS

NUM_VECTORS = TILE_COLUMNS // 4

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))

_F16, _F32 = ir.HalfType(), ir.FloatType()

# A vector of levels; a tile has eight of them.
_LEVELS = ir.VectorType(_I8, 4 * TILE_ROWS)

_SUMS = ir.VectorType(_I32, TILE_ROWS)

_ROWS = ir.VectorType(_F32, TILE_ROWS)

_VALUES = ir.VectorType(_F32, 4 * TILE_ROWS)

_FUSED = ("contract",)

FP4 = 0  # "bits" of MXFP4, whose codes of 4 bits are floating-point numbers

_LARGEST_FP4 = 12  # in units of 0.5

_SDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"

_VNNI = "llvm.x86.avx512.vpdpbusd.256"

_WIDE_VNNI = "llvm.x86.avx512.vpdpbusd.512"


def _fastest_dot() -> str:
    """Return the LLVM name of the instruction that adds products of bytes in fours, or "" if there is none."""
    triple = llvm.get_process_triple()
    if triple.startswith(("aarch64", "arm64")):
        return _SDOT if _llvm_uses_sdot(triple) else ""
    if config.CPU_NAME or config.CPU_FEATURES or not config.ENABLE_AVX:
        return ""  # numba compiles for another machine
    features = llvm.get_host_cpu_features()
    # Servers have VNNI as a part of AVX-512, desktops since 2021 without the rest of AVX-512.
    return _VNNI if (features.get("avx512vnni") and features.get("avx512vl")) or features.get("avxvnni") else ""


def _llvm_uses_sdot(triple: str) -> bool:
    """Whether LLVM compiles a sum of products to `sdot`. An instruction that LLVM lacks would end the process."""
    text = """
        declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
        define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
            %c = sext <16 x i8> %a to <16 x i32>
            %d = sext <16 x i8> %b to <16 x i32>
            %e = mul <16 x i32> %c, %d
            %f = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %e)
            ret i32 %f
        }"""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_triple(triple).create_target_machine(llvm.get_host_cpu_name(), features)
    return "sdot" in machine.emit_assembly(llvm.parse_assembly(text))


DOT = _fastest_dot()

_HAS_SDOT, _HAS_VNNI = DOT == _SDOT, DOT == _VNNI

# Tiles that one instruction takes. Levels of two tiles, below each other in the matrix, alternate by vectors.
NUM_INTERLEAVED = 2 if _HAS_VNNI and llvm.get_host_cpu_features().get("avx512vnni") else 1


def _base_of(bits: int) -> int:
    """Return the difference of a code's value and its level. VNNI takes levels of 0 to 255, others of -128 to 127."""
    if bits == 8:
        return 0 if _HAS_VNNI else 128
    return -_LARGEST_FP4 if bits == FP4 and _HAS_VNNI else 0


# By bits of a code; levels of MXFP4 are in units of 0.5.
BASES = {bits: float(_base_of(bits)) for bits in (*PLANES, FP4)}


class _Array:
    """Array argument of an intrinsic."""

    def __init__(self, context, builder, kind, value) -> None:
        self._arguments = (context, builder, kind, value)

    def load(self, offset, vector):
        return load_as(*self._arguments, offset, vector)

    def load_one(self, offset):
        context, builder, kind, _ = self._arguments
        return builder.load(place_of(*self._arguments, offset, context.get_value_type(kind.dtype)))

    def store(self, offset, value) -> None:
        context, builder, _, _ = self._arguments
        element = value.type.element
        builder.store(value, place_of(*self._arguments, offset, value.type), align=context.get_abi_sizeof(element))


def _arguments(context, builder, signature, arguments):
    """Return the arguments, arrays as `_Array`."""
    pairs = zip(signature.args, arguments, strict=True)
    return [_Array(context, builder, kind, value) if isinstance(kind, types.Array) else value for kind, value in pairs]


def _plus(builder, offset, number: int):
    return builder.add(offset, ir.Constant(offset.type, number))


def _times(builder, offset, number: int):
    return builder.mul(offset, ir.Constant(offset.type, number))


def _unpack_intrinsic(bits: int):
    @intrinsic
    def unpack(_context, codes, _at, levels, _into, _stride):
        """Unpack the tile whose codes begin at `at` -> levels[into : into + 32], the next vector's `stride` further"""

        def code(context, builder, signature, arguments):
            codes, at, levels, into, stride = _arguments(context, builder, signature, arguments)
            for j, vector in enumerate(_unpack(builder, codes, at, bits)):
                levels.store(builder.add(into, _times(builder, stride, j)), vector)
            return context.get_dummy_value()

        return types.void(codes, types.intp, levels, types.intp, types.intp), code

    return unpack


def _unpack(builder, codes, at, bits: int):
    found, shift, first = [None] * NUM_VECTORS, 0, 0
    for plane in PLANES[bits or 4]:
        num = plane * NUM_VECTORS // 8  # vectors that the plane takes
        for i in range(num):
            octets = codes.load(_plus(builder, at, (first + i) * _LEVELS.count), _LEVELS)
            for part in range(8 // plane):
                place = i + part * num
                field = _extract_bits(builder, octets, part * plane, plane)
                found[place] = field if shift == 0 else _join_planes(builder, found[place], field, shift)
        shift, first = shift + plane, first + num
    return [_to_levels(builder, vector, bits) for vector in found]


def _extract_bits(builder, octets, shift: int, bits: int):
    shifted = builder.lshr(octets, constant(_LEVELS, shift)) if shift else octets
    return shifted if shift + bits == 8 else builder.and_(shifted, constant(_LEVELS, 2**bits - 1))


def _join_planes(builder, low, high, shift: int):
    return builder.or_(low, builder.shl(high, constant(_LEVELS, shift)))


def _to_levels(builder, codes, bits: int):
    if bits == 8 and not _HAS_VNNI:
        return builder.xor(codes, constant(_LEVELS, 128))
    if bits == FP4:
        number = _fp4(builder, codes)
        return builder.add(number, constant(_LEVELS, _LARGEST_FP4)) if _HAS_VNNI else number
    return codes


def _fp4(builder, codes):
    """Decode a sign, two bits of exponent, one of mantissa -> the number in units of 0.5: 0 1 2 3 4 6 8 12."""
    size = builder.and_(codes, constant(_LEVELS, 7))
    mantissa = builder.or_(builder.and_(codes, constant(_LEVELS, 1)), constant(_LEVELS, 2))
    exponent = builder.sub(builder.lshr(size, constant(_LEVELS, 1)), constant(_LEVELS, 1))
    is_small = builder.icmp_unsigned("<", size, constant(_LEVELS, 4))
    shift = builder.select(is_small, constant(_LEVELS, 0), exponent)
    number = builder.select(is_small, size, builder.shl(mantissa, shift))
    is_negative = builder.icmp_unsigned(">=", codes, constant(_LEVELS, 8))
    return builder.select(is_negative, builder.sub(constant(_LEVELS, 0), number), number)


unpack_2, unpack_3, unpack_4, unpack_5, unpack_6, unpack_8, unpack_fp4 = map(_unpack_intrinsic, (2, 3, 4, 5, 6, 8, FP4))


def _factors_intrinsic(read):
    """Make an intrinsic. `read` returns scales and biases (or None) from their bytes."""

    @intrinsic
    def factors(_context, octets, _at, out, _into, _stride, _base):
        """Read scales and biases at `at` -> out[into : into + 8]: scales, `stride` further biases + base * scales"""

        def code(context, builder, signature, arguments):
            octets, at, out, into, stride, base = _arguments(context, builder, signature, arguments)
            scales, biases = read(builder, lambda offset, vector: octets.load(_plus(builder, at, offset), vector))
            bases = builder.fmul(splatted(builder, base, TILE_ROWS), scales)
            out.store(into, scales)
            out.store(builder.add(into, stride), bases if biases is None else builder.fadd(bases, biases))
            return context.get_dummy_value()

        return types.void(octets, types.intp, out, types.intp, types.intp, types.float32), code

    return factors


def _scales_and_biases(read_rows, size: int):
    """Read the scales of the 8 rows, then their biases, of `size` bytes each."""
    return lambda builder, load: (read_rows(builder, load, 0), read_rows(builder, load, TILE_ROWS * size))


def _read_half(builder, load, offset):
    return builder.fpext(builder.bitcast(load(offset, ir.VectorType(_I16, TILE_ROWS)), _row_vector(_F16)), _ROWS)


def _read_bfloat(builder, load, offset):
    wide = builder.zext(load(offset, ir.VectorType(_I16, TILE_ROWS)), _SUMS)
    return builder.bitcast(builder.shl(wide, constant(_SUMS, 16)), _ROWS)


def _read_float(_builder, load, offset):
    return load(offset, _ROWS)


def _read_exponents(builder, load):
    """Read bytes e as scales 2 ** (e - 127) / 2, because levels are in units of 0.5. There are no biases."""
    wide = builder.zext(load(0, ir.VectorType(_I8, TILE_ROWS)), _SUMS)
    powers = builder.bitcast(builder.shl(wide, constant(_SUMS, 23)), _ROWS)
    return builder.fmul(powers, constant(_ROWS, 0.5)), None


def _row_vector(element):
    return ir.VectorType(element, TILE_ROWS)


factors_half = _factors_intrinsic(_scales_and_biases(_read_half, 2))

factors_bfloat = _factors_intrinsic(_scales_and_biases(_read_bfloat, 2))

factors_float = _factors_intrinsic(_scales_and_biases(_read_float, 4))

factors_exponent = _factors_intrinsic(_read_exponents)


def _add_dots(builder, sums, levels, x):
    """Add the products of 4 columns to sums: levels <4 * rows x i8>, x <4 x i8> as one integer of 32 bits."""
    if _HAS_SDOT:
        return _add_dots_neon(builder, sums, levels, x)
    if _HAS_VNNI:
        # Operands of VNNI are declared as integers of 32 bits.
        vector, name = sums.type, _VNNI if sums.type.count == TILE_ROWS else _WIDE_VNNI
        kind = ir.FunctionType(vector, [vector, vector, vector])
        dot = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(dot, [sums, builder.bitcast(levels, vector), splatted(builder, x, vector.count)])
    wide = ir.VectorType(_I32, _LEVELS.count)
    same = builder.bitcast(splatted(builder, x, TILE_ROWS), _LEVELS)
    products = builder.mul(builder.sext(levels, wide), builder.sext(same, wide))
    while products.type.count > TILE_ROWS:
        even, odd = (shuffled(builder, products, products, range(i, products.type.count, 2)) for i in (0, 1))
        products = builder.add(even, odd)
    return builder.add(sums, products)


def _add_dots_neon(builder, sums, levels, x):
    """Add the products on NEON, whose registers hold half a vector each."""
    quarter, octets = ir.VectorType(_I32, 4), ir.VectorType(_I8, 16)
    dot = cgutils.get_or_insert_function(builder.module, ir.FunctionType(quarter, [quarter, octets, octets]), _SDOT)
    same = builder.bitcast(splatted(builder, x, 4), octets)
    halves = []
    for i in range(2):
        part = shuffled(builder, levels, levels, range(16 * i, 16 * i + 16))
        halves.append(builder.call(dot, [shuffled(builder, sums, sums, range(4 * i, 4 * i + 4)), part, same]))
    return shuffled(builder, *halves, range(8))


def _add_product(builder, total, a, b):
    return builder.fadd(total, builder.fmul(a, b, flags=_FUSED), flags=_FUSED)


def _dot_intrinsic(num: int, *, width: int, bits: int | None = None, interleaved: int = 1):
    """Make an intrinsic that multiplies `num` vectors of 8-bit or 16-bit activations by 8 * `interleaved` rows.

    With `bits` the rows are unpacked in registers: for one vector that saves a pass through memory.
    """
    rows = interleaved * TILE_ROWS
    floats = ir.VectorType(_F32, rows)

    @intrinsic
    def dot(_context, levels, _at, factors, high, low, scales, sums, _group, _num_tiles, out, _into, _stride):
        """Multiply -> out[into : into + rows], the next vector's `stride` further

        Packed weights begin at levels[at], unpacked ones at levels[0]. The vectors begin at group `group` of 32
        columns and are contiguous. `high` has the upper 8 of 16 bits, or all of 8 bits.
        """

        def code(context, builder, signature, arguments):
            given = _arguments(context, builder, signature, arguments)
            levels, at, factors, high, low, scales, sums, group, num_tiles, out, into, stride = given
            totals = [cgutils.alloca_once_value(builder, constant(floats, 0.0)) for _ in range(num)]
            with cgutils.for_range(builder, num_tiles) as loop:
                if bits is None:
                    vectors = _load_levels(builder, levels, loop.index, interleaved)
                else:
                    tile_bytes = _LEVELS.count * bits
                    place = builder.add(at, _times(builder, loop.index, tile_bytes))
                    vectors = _unpack(builder, levels, place, bits)
                scale, base = _load_factors(builder, factors, loop.index, interleaved)
                places = [
                    builder.add(group, builder.add(_times(builder, num_tiles, i), loop.index)) for i in range(num)
                ]
                halves = (high, low) if width == 16 else (high,)
                firsts = [_times(builder, place, TILE_COLUMNS) for place in places]
                products = _dot_tile(builder, vectors, halves, firsts)
                for kept, place, added in zip(totals, places, products, strict=True):
                    x_scale, x_sum = (splatted(builder, each.load_one(place), rows) for each in (scales, sums))
                    total = _add_product(builder, builder.load(kept), base, x_sum)
                    scaled = builder.fmul(scale, x_scale)
                    builder.store(_add_product(builder, total, builder.sitofp(added, floats), scaled), kept)
            for i, kept in enumerate(totals):
                out.store(builder.add(into, _times(builder, stride, i)), builder.load(kept))
            return context.get_dummy_value()

        number = types.intp
        return types.void(levels, number, factors, high, low, scales, sums, number, number, out, number, number), code

    return dot


def _load_levels(builder, levels, tile, interleaved: int = 1):
    first, kind = _times(builder, tile, interleaved * TILE_VALUES), ir.VectorType(_I8, interleaved * _LEVELS.count)
    return [levels.load(_plus(builder, first, kind.count * j), kind) for j in range(NUM_VECTORS)]


def _load_factors(builder, factors, tile, interleaved: int = 1):
    place, kind = _times(builder, tile, interleaved * TILE_FACTORS), ir.VectorType(_F32, interleaved * TILE_ROWS)
    return [factors.load(_plus(builder, place, offset), kind) for offset in (0, kind.count)]


def _dot_tile(builder, vectors, halves, places):
    """Return the integer sums of a tile's products with the activations at each place. The first of two `halves` counts
    256 times.

    A sum is a chain of dependent instructions. VNNI's take five cycles each, and the CPU looks only some dozens of
    instructions ahead: with VNNI chains are interleaved, and the chains of a single vector are cut in two.
    """
    sources = [(half, place) for place in places for half in halves]
    if not _HAS_VNNI:
        sums = [_sum_chains(builder, vectors, [source])[0] for source in sources]
    elif len(places) > 1:
        sums = _sum_chains(builder, vectors, sources)
    else:
        cut = NUM_VECTORS // 2
        rest = [(half, _plus(builder, place, 4 * cut)) for half, place in sources]
        pair = _sum_chains(builder, vectors[:cut], sources), _sum_chains(builder, vectors[cut:], rest)
        sums = [builder.add(*each) for each in zip(*pair, strict=True)]
    if len(halves) == 1:
        return sums
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return [builder.add(builder.shl(upper, constant(upper.type, 8)), lower) for upper, lower in pairs]


def _sum_chains(builder, vectors, sources):
    """Return the sum of each source, an array and a place, with the instructions of the chains interleaved."""
    kind = ir.VectorType(_I32, vectors[0].type.count // 4)
    sums = [constant(kind, 0) for _ in sources]
    for first in range(0, len(vectors), 4):
        words = []
        for codes, place in sources:
            octets = codes.load(_plus(builder, place, 4 * first), ir.VectorType(_I8, 16))
            words.append(builder.bitcast(octets, ir.VectorType(_I32, 4)))
        for j in range(4):
            for i, word in enumerate(words):
                one = builder.extract_element(word, ir.Constant(_I32, j))
                sums[i] = _add_dots(builder, sums[i], vectors[first + j], one)
    return sums


# For as many tiles as one instruction takes; `_last`: for a last tile without a neighbour.
dot8_1, dot8_4 = (_dot_intrinsic(num, width=8, interleaved=NUM_INTERLEAVED) for num in (1, 4))

dot16_1, dot16_4 = (_dot_intrinsic(num, width=16, interleaved=NUM_INTERLEAVED) for num in (1, 4))

dot8_last, dot16_last = _dot_intrinsic(1, width=8), _dot_intrinsic(1, width=16)

dot8_codes_4, dot8_codes_8 = _dot_intrinsic(1, width=8, bits=4), _dot_intrinsic(1, width=8, bits=8)

dot16_codes_4, dot16_codes_8 = _dot_intrinsic(1, width=16, bits=4), _dot_intrinsic(1, width=16, bits=8)


@intrinsic
def dot_exact(_context, levels, factors, x, sums, _group, _num_tiles, out, _into):
    """Multiply a float32 vector of activations, from group `group` on, by 8 rows of weights -> out[into : into + 8]"""

    def code(context, builder, signature, arguments):
        levels, factors, x, sums, group, num_tiles, out, into = _arguments(context, builder, signature, arguments)
        total = cgutils.alloca_once_value(builder, constant(_ROWS, 0.0))
        with cgutils.for_range(builder, num_tiles) as loop:
            place = builder.add(group, loop.index)
            added = constant(_VALUES, 0.0)
            for j, vector in enumerate(_load_levels(builder, levels, loop.index)):
                four = x.load(_plus(builder, _times(builder, place, TILE_COLUMNS), 4 * j), ir.VectorType(_F32, 4))
                same = shuffled(builder, four, four, [*range(4)] * TILE_ROWS)
                added = _add_product(builder, added, _as_floats(builder, vector), same)
            for count in (4 * TILE_ROWS, 2 * TILE_ROWS):
                even, odd = (shuffled(builder, added, added, range(i, count, 2)) for i in (0, 1))
                added = builder.fadd(even, odd)
            scale, base = _load_factors(builder, factors, loop.index)
            sums_of_x = splatted(builder, sums.load_one(place), TILE_ROWS)
            with_base = _add_product(builder, builder.load(total), base, sums_of_x)
            builder.store(_add_product(builder, with_base, added, scale), total)
        out.store(into, builder.load(total))
        return context.get_dummy_value()

    number = types.intp
    return types.void(levels, factors, x, sums, number, number, out, number), code


def _as_floats(builder, levels):
    return builder.uitofp(levels, _VALUES) if _HAS_VNNI else builder.sitofp(levels, _VALUES)


@intrinsic
def dequantize_tile(_context, levels, factors, _tile, out, _into, _stride):
    """Convert a tile to float32 -> out[into : into + 32], the next row's `stride` further"""

    def code(context, builder, signature, arguments):
        levels, factors, tile, out, into, stride = _arguments(context, builder, signature, arguments)
        four_each = [row for row in range(TILE_ROWS) for _ in range(4)]
        scale, base = (shuffled(builder, each, each, four_each) for each in _load_factors(builder, factors, tile))
        for j, vector in enumerate(_load_levels(builder, levels, tile)):
            values = _add_product(builder, base, _as_floats(builder, vector), scale)
            for row in range(TILE_ROWS):
                place = _plus(builder, builder.add(into, _times(builder, stride, row)), 4 * j)
                out.store(place, shuffled(builder, values, values, range(4 * row, 4 * row + 4)))
        return context.get_dummy_value()

    number = types.intp
    return types.void(levels, factors, number, out, number, number), code


def _quantize_intrinsic(width: int):
    # With this limit the rounded upper half of the largest code fits 8 bits.
    largest_code = 127.0 if width == 8 else 127.0 * 256

    @intrinsic
    def quantize(_context, x, high, low, scales, sums, _group):
        """Quantize group `group` of 32 values -> integers of 8 or 16 bits, their scale, the sum of rounded values"""

        def code(context, builder, signature, arguments):
            x, high, low, scales, sums, group = _arguments(context, builder, signature, arguments)
            place = _times(builder, group, TILE_COLUMNS)
            values = x.load(place, _VALUES)
            magnitudes = builder.and_(builder.bitcast(values, _WORDS), constant(_WORDS, 0x7FFFFFFF))
            # Compared by their bits: NaN is larger than all numbers and so reaches the product.
            largest = builder.bitcast(_reduce(builder, magnitudes, _larger), _F32)
            scale = builder.fdiv(largest, ir.Constant(_F32, largest_code))
            is_any = builder.fcmp_ordered(">", scale, ir.Constant(_F32, 0.0))
            factor = builder.select(is_any, builder.fdiv(ir.Constant(_F32, 1.0), scale), ir.Constant(_F32, 0.0))
            whole = _round(builder, builder.fmul(values, splatted(builder, factor, _VALUES.count)))
            codes = builder.fptosi(whole, _WORDS)
            if width == 16:
                # Rounded, so that the rest fits 8 bits with its sign.
                upper = builder.ashr(builder.add(codes, constant(_WORDS, 128)), constant(_WORDS, 8))
                rest = builder.sub(codes, builder.shl(upper, constant(_WORDS, 8)))
                low.store(place, builder.trunc(rest, _LEVELS))
                codes = upper
            high.store(place, builder.trunc(codes, _LEVELS))
            one = ir.VectorType(_F32, 1)
            # Sum of the rounded values: with it a rounding error is multiplied by a weight, not by its level.
            total = builder.fmul(_reduce(builder, whole, _sum), scale)
            for array, value in ((scales, scale), (sums, total)):
                array.store(group, builder.bitcast(value, one))
            return context.get_dummy_value()

        return types.void(x, high, low, scales, sums, types.intp), code

    return quantize


quantize_8, quantize_16 = _quantize_intrinsic(8), _quantize_intrinsic(16)


def _round(builder, values):
    name = f"llvm.rint.v{_VALUES.count}f32"
    rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VALUES, [_VALUES]), name)
    return builder.call(rint, [values])


_WORDS = ir.VectorType(_I32, _VALUES.count)


def _reduce(builder, value, join):
    """Reduce all lanes to one value."""
    while value.type.count > 1:
        half = value.type.count // 2
        halves = [shuffled(builder, value, value, range(i, i + half)) for i in (0, half)]
        value = join(builder, *halves)
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _larger(builder, a, b):
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _sum(builder, a, b):
    return builder.fadd(a, b)
