// Stands in for Metal's standard library, as far as the kernels use it: enough for clang to check types and spaces of
// memory. Nothing here can be run.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef _Float16 bfloat16_t;
typedef unsigned int uint2 __attribute__((ext_vector_type(2)));
typedef unsigned int uint3 __attribute__((ext_vector_type(3)));
typedef unsigned int uint4 __attribute__((ext_vector_type(4)));

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}

void simdgroup_barrier(mem_flags);
float simd_shuffle_xor(float, ushort);
float exp(float);
float max(float, float);
float min(float, float);
float floor(float);
float abs(float);

}  // namespace metal
