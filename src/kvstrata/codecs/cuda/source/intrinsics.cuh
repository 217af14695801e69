// Instructions without a name in CUDA C++.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvstrata {

__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned which) {
  return __byte_perm(a, b, which);
}

// Loads of data that is read once: they evict nothing from the L1 cache.
__device__ __forceinline__ void load_once(const unsigned* from, unsigned& a) {
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(a) : "l"(__cvta_generic_to_global(from)));
}

__device__ __forceinline__ void load_once(const unsigned* from, unsigned& a, unsigned& b) {
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(__cvta_generic_to_global(from)));
}

__device__ __forceinline__ void load_once(const unsigned* from, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
      : "l"(__cvta_generic_to_global(from)));
}

// 2^x; 0 instead of subnormal numbers.
__device__ __forceinline__ float exp2_of(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
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

// 16 x 32 bytes without a sign times 32 x 8 bytes with one, added to sums.
__device__ __forceinline__ void multiply_add(
    int (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

}  // namespace kvstrata
