// Prelude of the kernels in CUDA C++: the names that differ between languages. A group is one warp.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned int kv_uint;
typedef long long kv_long;
typedef uint2 kv_uint2;
typedef uint4 kv_uint4;
typedef __half kv_half;

#define KV_FN __device__ __forceinline__
#define KV_DEVICE
#define KV_SHARED
#define KV_LOCAL
#define KV_SHARED_ARRAY(type, name, size) __shared__ type name[size]
#define KV_UNROLL _Pragma("unroll")
#define KV_LANE int(threadIdx.x)
#define KV_GROUP_X int(blockIdx.x)
#define KV_GROUP_Y int(blockIdx.y)
#define KV_GROUP_Z int(blockIdx.z)

KV_FN void kv_barrier() { __syncwarp(); }
KV_FN float kv_shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
KV_FN float kv_as_float(kv_uint bits) { return __uint_as_float(bits); }
KV_FN float kv_exp(float x) { return __expf(x); }
KV_FN float kv_larger(float a, float b) { return fmaxf(a, b); }
KV_FN float kv_floor(float x) { return floorf(x); }

// 2^23 and a byte of a word: a byte is put below the exponent of 2^23.
KV_FN float kv_byte(kv_uint word, int which) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 + (which & 3)));
}

// The two bytes in the middle change places.
KV_FN kv_uint kv_swap(kv_uint word) { return __byte_perm(word, 0u, 0x3120); }

KV_FN float kv_low_half(kv_uint word) { return __half2float(__ushort_as_half((unsigned short)(word & 0xffffu))); }
KV_FN float kv_high_half(kv_uint word) { return __half2float(__ushort_as_half((unsigned short)(word >> 16))); }
