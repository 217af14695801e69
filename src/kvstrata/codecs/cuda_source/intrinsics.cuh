// What has no name in CUDA C++.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvstrata {

__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned which) {
  return __byte_perm(a, b, which);
}

// Two float16 numbers less two others.
__device__ __forceinline__ unsigned subtract_halves(unsigned a, unsigned b) {
  unsigned difference;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

template <bool BF>
__device__ __forceinline__ unsigned short to_bits(float x) {
  if constexpr (BF) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  } else {
    return __half_as_ushort(__float2half_rn(x));
  }
}

template <bool BF>
__device__ __forceinline__ float from_bits(unsigned short bits) {
  if constexpr (BF) {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  } else {
    return __half2float(__ushort_as_half(bits));
  }
}

// 16 x 16 times 16 x 8, added to sums. BF: bfloat16, else float16.
template <bool BF>
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
  if constexpr (BF) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  }
}

}  // namespace kvstrata
