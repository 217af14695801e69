// Stands in for CUDA's headers, as far as the kernels use them: enough for clang to check types. Nothing can be run.
#pragma once

#define __device__
#define __forceinline__ inline
#define __shared__ static

typedef unsigned int uint32_t;
typedef int int32_t;
struct uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct __half {
  explicit __half(float);
  operator float() const;
};
struct __nv_bfloat16 {
  explicit __nv_bfloat16(float);
  operator float() const;
};

extern const uint3 threadIdx, blockIdx;

void __syncwarp(unsigned mask = 0xffffffffu);
float __shfl_xor_sync(unsigned mask, float x, int lane_mask, int width = 32);
float __uint_as_float(unsigned bits);
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);
__half __ushort_as_half(unsigned short bits);
float __half2float(__half x);
float __expf(float x);
float fmaxf(float a, float b);
float floorf(float x);
