// Prelude of the kernels in Metal's language: the names that differ between languages. A group is one SIMD group.

typedef uint kv_uint;
typedef long kv_long;
typedef uint2 kv_uint2;
typedef uint4 kv_uint4;
typedef half kv_half;

#define KV_FN inline
#define KV_DEVICE device
#define KV_SHARED threadgroup
#define KV_LOCAL thread
#define KV_SHARED_ARRAY(type, name, size) threadgroup type name[size]
#define KV_UNROLL _Pragma("clang loop unroll(full)")

KV_FN void kv_barrier() { simdgroup_barrier(mem_flags::mem_threadgroup); }
KV_FN float kv_shuffle_xor(float x, int mask) { return simd_shuffle_xor(x, ushort(mask)); }
KV_FN float kv_as_float(kv_uint bits) { return as_type<float>(bits); }
KV_FN float kv_exp(float x) { return metal::exp(x); }
KV_FN float kv_larger(float a, float b) { return metal::max(a, b); }
KV_FN float kv_floor(float x) { return metal::floor(x); }

// 2^23 and a byte of a word: a byte is put below the exponent of 2^23.
KV_FN float kv_byte(kv_uint word, int which) {
  return as_type<float>(((word >> (8 * which)) & 255u) | 0x4B000000u);
}

// The two bytes in the middle change places.
KV_FN kv_uint kv_swap(kv_uint word) {
  return (word & 0xFF0000FFu) | ((word & 0x0000FF00u) << 8) | ((word >> 8) & 0x0000FF00u);
}

KV_FN float kv_low_half(kv_uint word) { return float(as_type<half>(ushort(word & 0xFFFFu))); }
KV_FN float kv_high_half(kv_uint word) { return float(as_type<half>(ushort(word >> 16))); }
