"""Kernel texts for the compilers of Metal and CUDA: their buffers, and whether clang accepts them.

MLX records a Metal kernel while a function is exported, on any machine, with the text that it generates. Of CUDA's the
head of the function is written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from clang import cindex

from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.metal import launch_plan as metal_launch_plan
from kvstrata.attention.segments import Segment
from kvstrata.codecs.metal import kernel_text as metal_kernel_text
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.kernel_text import KernelLaunch
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.planes import PlanesCodec
from tests.attention.test_metal_decode import KV_HEADS, queries, raw, sealed
from tests.codecs.arrays import keys, some_rotation

STUB, CUDA_STUB = (Path(__file__).parent / f"{name}_stub.h" for name in ("metal", "cuda"))
CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}
FLAGS = [
    *("-xc++", "-nostdinc", "--target=aarch64-linux-gnu"),
    *("-Wall", "-Wextra", "-Werror", "-Wdouble-promotion", "-Wno-unknown-attributes", "-Wno-unused"),
    *("-Wno-sign-compare", "-Wno-dangling-else", "-Wno-sometimes-uninitialized", "-Wno-missing-braces"),
]
DIM = 64
# A variable of a function cannot be in another space of memory for clang's C++, but for a static one.
SHARED_ARRAY = "(type, name, size) threadgroup type name[size]"

Rows = list[tuple[Segment, ...]]


def recorded(function: Callable[[mx.array], mx.array | list[mx.array]], argument: mx.array) -> list[str]:
    """The texts of all kernels that `function` launches."""
    texts: list[str] = []

    def see(entry: dict) -> None:
        if entry["type"] == "primitive" and entry["name"] == "CustomKernel":
            texts.append(next(part for part in entry["arguments"] if isinstance(part, str) and "[[kernel]]" in part))

    mx.export_function(see, function, argument)
    return texts


def texts_for(rows: Rows, group: int = 2, dtype: mx.Dtype = mx.bfloat16, sinks: mx.array | None = None) -> list[str]:
    def attended(q: mx.array) -> mx.array:
        step = metal_decode.step_of(
            q, [[metal_decode.read_of(part) for part in parts] for parts in rows], 0.1, sinks, "metal"
        )
        assert step is not None
        return metal_decode.attend(q, step, sinks)

    return recorded(attended, queries(len(rows), group, DIM).astype(dtype))


def every_case() -> dict[str, list[str]]:
    own = [raw(20, DIM, seed, mx.bfloat16) for seed in range(13)]
    eights = [sealed("planes:8 halves", "planes:8", 40, DIM, seed=i) for i in range(3)]
    fours = [sealed("planes:4", "planes:2", 40, DIM, seed=i) for i in range(3)]
    few_sinks, many_sinks = mx.zeros((KV_HEADS * 2,), mx.bfloat16), mx.zeros((KV_HEADS * 4,), mx.bfloat16)
    return {
        "raw": texts_for([(part,) for part in own]),
        "float16": texts_for([(raw(20, DIM, 1, mx.float16),)], dtype=mx.float16),
        "float32": texts_for([(raw(20, DIM, 1),)], dtype=mx.float32),
        "planes:8": texts_for([(part, tail) for part, tail in zip(eights, own, strict=False)]),
        "planes:4": texts_for([(part, tail) for part, tail in zip(fours, own, strict=False)]),
        "no raw": texts_for([(part,) for part in fours]),
        "sinks": texts_for([(own[0],)], sinks=few_sinks),
        "more sinks": texts_for([(own[0],)], group=4, sinks=many_sinks),
        "seven queries": texts_for([(own[0],)], group=7),
        **{f"codec, {bits} bits": codec_texts(bits) for bits in (8, 4, 2)},
    }


def codec_texts(bits: int) -> list[str]:
    codec = PlanesCodec(bits, some_rotation("halves", DIM))
    x = keys(KV_HEADS, 300, DIM, dtype=mx.bfloat16)
    planes = codec.encode(x, 100)
    encoding = recorded(lambda each: list(metal_planes.encode(each, bits, 100, codec.rotation, "metal").values()), x)
    decoding = recorded(lambda _: metal_planes.decode(planes, mx.bfloat16, "metal"), x)
    stored = [TokenRange(planes, 3, 200), TokenRange(planes, 0, 300)]
    joining = recorded(lambda each: metal_planes.join([*stored, TokenRange(each, 0, 90)], mx.bfloat16, "metal"), x)
    return [*encoding, *decoding, *joining]


def buffers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\[\[buffer\((\d+)\)\]\]", text)]


def test_launches_stay_within_metals_buffer_limit() -> None:
    for case, texts in every_case().items():
        assert len(texts) >= 2, case
        for text in texts:
            numbers = buffers_of(text)
            assert numbers == list(range(len(numbers)))
            assert len(numbers) <= metal_launch_plan.MOST_BUFFERS, case
            # Shapes and strides would take more.
            assert "_shape [[" not in text
            assert "_strides [[" not in text


def test_launch_shapes_stay_within_the_buffer_limit() -> None:
    for slots in metal_launch_plan.SHAPES:
        text = metal_kernel_text.attend_text("metal", metal_kernel_text.HeadSizes(DIM, DIM, 2), slots, (mx.bfloat16,))
        assert (
            len(text.inputs) + len(text.outputs)
            == sum(slots) + metal_launch_plan.OTHER_BUFFERS
            <= metal_launch_plan.MOST_BUFFERS
        )
    for slots in metal_planes.SHAPES:
        text = metal_kernel_text.decode_text("metal", DIM, slots, mx.bfloat16)
        assert len(text.inputs) + len(text.outputs) == sum(slots) + metal_planes.OTHER_BUFFERS
        assert sum(slots) + metal_planes.OTHER_BUFFERS <= metal_launch_plan.MOST_BUFFERS
    for count in metal_launch_plan.PARTIAL_COUNTS:
        text = metal_kernel_text.combine_text("metal", DIM, mx.bfloat16, count, mx.bfloat16)
        assert len(text.inputs) + len(text.outputs) <= metal_launch_plan.MOST_BUFFERS


def test_kernels_of_different_texts_have_different_names() -> None:
    """MLX compiles a kernel anew whenever its name comes with another text."""
    by_name: dict[str, str] = {}
    for texts in every_case().values():
        for text in texts:
            name = re.findall(r"\[\[kernel\]\] void (\w+)", text)[0]
            assert by_name.setdefault(name, text) == text


@pytest.mark.parametrize("standard", ["c++14", "c++17"])
def test_clang_accepts_the_metal_texts(tmp_path: Path, standard: str) -> None:
    """Spaces of memory included: a pointer to device memory is no pointer to a group's."""
    texts = {text for texts in every_case().values() for text in texts}
    assert len(texts) >= 9
    for i, text in enumerate(sorted(texts)):
        assert _complaints(tmp_path / f"{i}.cpp", text, standard) == ""


def test_clang_rejects_invalid_metal(tmp_path: Path) -> None:
    """The check above can fail."""
    text = texts_for([(raw(20, DIM, 1, mx.bfloat16),)])[0]
    for right, wrong in (
        ("scores, asked, halves", "centres_, asked, halves"),
        ("const KV_DEVICE int* piece", "const KV_SHARED int* piece"),
        ("simd_shuffle_xor(", "__shfl_xor_sync("),
    ):
        assert right in text
        assert "error" in _complaints(tmp_path / "wrong.cpp", text.replace(right, wrong), "c++17")


SPACES = {"KV_DEVICE", "KV_LOCAL", "KV_SHARED", "device", "thread", "threadgroup", "constant"}
DECLARED = {"PARM_DECL", "VAR_DECL", "FIELD_DECL"}
POINTING = {"POINTER", "LVALUEREFERENCE"}


def without_a_space(file: Path, text: str) -> list[str]:
    """Pointers and references that name no space of memory: Metal refuses them. For clang `thread` is no word."""
    _complaints(file, text, "c++17")
    source = file.read_text()
    found = cindex.Index.create().parse(str(file), args=FLAGS).cursor.walk_preorder()
    ours = [each for each in found if each.kind.name in DECLARED and str(each.location.file) == str(file)]
    pointing = [each for each in ours if each.type.kind.name in POINTING]
    assert len(pointing) >= 4
    # Words that the compiler never sees stand before what it takes for the beginning.
    starts = [max(source.rfind(mark, 0, each.extent.start.offset) for mark in "(,;{}") + 1 for each in pointing]
    said = [source[start : each.location.offset] for start, each in zip(starts, pointing, strict=True)]
    return [text for text in said if not SPACES & {*re.findall(r"\w+", text)}]


def test_every_pointer_has_an_address_space(tmp_path: Path) -> None:
    texts = {text for texts in every_case().values() for text in texts}
    for text in texts:
        assert without_a_space(tmp_path / "text.cpp", text) == []
    decoding = next(text for text in texts if "kv_decode<" in text)
    for right in ("const KV_LOCAL kv_source& source, const KV_LOCAL kv_centring", "KV_DEVICE T* out"):
        assert right in decoding
        wrong = decoding.replace(right, right.replace("KV_LOCAL ", "", 1).replace("KV_DEVICE ", ""))
        assert without_a_space(tmp_path / "wrong.cpp", wrong)


def test_clang_accepts_the_cuda_texts(tmp_path: Path) -> None:
    rows: Rows = [
        (sealed("planes:8 halves", "planes:8", 40, DIM), raw(20, DIM, 1, mx.bfloat16)),
        (sealed("planes:4", "planes:2", 40, DIM), raw(20, DIM, 3, mx.bfloat16)),
    ]
    q, sinks = queries(2, 2, DIM).astype(mx.bfloat16), mx.zeros((4,), mx.bfloat16)
    launches: list[KernelLaunch] = []

    def see(launch: KernelLaunch) -> list[mx.array]:
        launches.append(launch)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]

    step = metal_decode.step_of(
        q, [[metal_decode.read_of(part) for part in parts] for parts in rows], 0.1, sinks, "cuda"
    )
    assert step is not None
    metal_decode.attend(q, step, sinks, see)
    assert [launch.text.name for launch in launches] == ["attend_segments", "combine_partials"]
    for bits in (8, 2):
        codec = PlanesCodec(bits)
        metal_planes.encode(keys(KV_HEADS, 40, DIM, dtype=mx.bfloat16), bits, 0, None, "cuda", see)
        planes = codec.encode(keys(KV_HEADS, 40, DIM))
        metal_planes.decode(planes, mx.bfloat16, "cuda", see)
        metal_planes.join([TokenRange(planes, 0, 40)] * 2, mx.bfloat16, "cuda", see)
    for i, launch in enumerate(launches):
        text = launch.text
        inputs = [f"const {CUDA_TYPES[x.dtype]}* {name}" for name, x in zip(text.inputs, launch.inputs, strict=True)]
        outputs = [f"{CUDA_TYPES[dtype]}* {name}" for name, dtype in zip(text.outputs, launch.dtypes, strict=True)]
        head = f"void kernel({', '.join([*inputs, *outputs])}) {{\n"
        header = "\n".join(line for line in text.header.splitlines() if not line.startswith("#include"))
        file = tmp_path / f"{i}.cpp"
        file.write_text(f'#include "{CUDA_STUB}"\n{header}\n{head}{text.body}\n}}\n')
        assert _checked(file, "c++17") == ""


def _complaints(file: Path, text: str, standard: str) -> str:
    assert text.count(SHARED_ARRAY) == 1
    static = text.replace(SHARED_ARRAY, SHARED_ARRAY.replace("threadgroup", "static threadgroup"))
    file.write_text(f'#include "{STUB}"\nusing namespace metal;\n{static}')
    return _checked(file, standard)


def _checked(file: Path, standard: str) -> str:
    found = cindex.Index.create().parse(str(file), args=[*FLAGS, f"-std={standard}"]).diagnostics
    return "\n".join(f"error: {each.spelling} ({each.location.line})" for each in found)[:3000]
