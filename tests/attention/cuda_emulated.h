// CUDA on a CPU, as far as our kernels use it: the threads of a block are fibers, and wait for each other where lanes of
// a warp or threads of a block meet. Between two meetings they run one after the other, forwards or backwards: what one
// reads that another has yet to write is seen in one of the two orders, unless a shuffle or a product lies between.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __shared__ static
#undef INFINITY
#define INFINITY __builtin_inff()

using std::isnan;
using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// 16-bit numbers.

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) { _Float16 h = x; memcpy(&bits, &h, 2); }
  operator float() const { _Float16 h; memcpy(&h, &bits, 2); return h; }
};

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = (x != x) ? 0x7FFF : (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
  }
  operator float() const { uint32_t word = uint32_t(bits) << 16; float x; memcpy(&x, &word, 4); return x; }
};

struct __half2 { __half x, y; };
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }

template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T __ldcg(const T* at) { return *at; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

// Threads.

struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

struct Meeting {
  int alive = 0, come = 0;
  unsigned number = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done;
};

constexpr int MOST_WORDS = 6;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static std::vector<Meeting> warps;
static Meeting block;
static std::vector<unsigned> words;  // [parity][thread][MOST_WORDS]
static std::vector<int> votes;  // [parity][thread]

static void meet(Meeting& meeting) {
  const unsigned number = meeting.number;
  if (++meeting.come == meeting.alive) {
    meeting.come = 0, ++meeting.number;
    return;
  }
  while (meeting.number == number) {
    swapcontext(&fibers[current].context, &scheduler);
  }
}

inline void __syncwarp() { meet(warps[current / 32]); }
inline void __syncthreads() { meet(block); }
inline void __threadfence() {}

inline int __syncthreads_or(int x) {
  const auto first = votes.begin() + block.number % 2 * fibers.size();
  first[current] = x;
  meet(block);
  return std::any_of(first, first + fibers.size(), [](int vote) { return vote != 0; });
}

// What all lanes of a warp say, in turns in two places: no lane is two meetings ahead of another.
inline unsigned* place_of(unsigned parity, int thread) { return &words[(parity * fibers.size() + thread) * MOST_WORDS]; }

inline unsigned say(const unsigned* said, int count) {
  const unsigned parity = warps[current / 32].number % 2;
  std::copy(said, said + count, place_of(parity, current));
  meet(warps[current / 32]);
  return parity;
}

template <typename T>
T __shfl_xor_sync(unsigned, T x, int by) {
  unsigned word;
  memcpy(&word, &x, 4);
  const unsigned parity = say(&word, 1);
  memcpy(&x, place_of(parity, current ^ by), 4);
  return x;
}

inline int __any_sync(unsigned, int x) {
  const unsigned word = x != 0, parity = say(&word, 1);
  unsigned any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= *place_of(parity, current / 32 * 32 + lane);
  return any;
}

inline unsigned atomicAdd(unsigned* at, unsigned x) { unsigned before = *at; *at += x; return before; }

// As in intrinsics.cuh.

namespace kvstrata {

inline unsigned permute(unsigned a, unsigned b, unsigned which) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(both >> (8 * ((which >> (4 * i)) & 7)) & 0xFF) << (8 * i);
  return out;
}

inline void load_once(const unsigned* from, unsigned& a) { a = from[0]; }
inline void load_once(const unsigned* from, unsigned& a, unsigned& b) { a = from[0], b = from[1]; }
inline void load_once(const unsigned* from, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
  a = from[0], b = from[1], c = from[2], d = from[3];
}

inline float exp2_of(float x) { return exp2f(x); }

template <bool BF>
unsigned short to_bits(float x) {
  if constexpr (BF) return __nv_bfloat16(x).bits;
  else return __half(x).bits;
}

template <bool BF>
float from_bits(unsigned short bits) {
  if constexpr (BF) { __nv_bfloat16 x; x.bits = bits; return x; }
  else { __half x; x.bits = bits; return x; }
}

// Register `word` of the lane that has row (or column) `group` and place k of K, which has `each` places to a register.
inline unsigned register_of(unsigned parity, int group, int k, int each, int word) {
  return place_of(parity, current / 32 * 32 + 4 * group + k % (4 * each) / each)[word];
}

template <typename T, typename F>
void product(T (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1, int each, const F& times) {
  const unsigned said[MOST_WORDS] = {left[0], left[1], left[2], left[3], right0, right1};
  const unsigned parity = say(said, MOST_WORDS);
  const int lane = current % 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
    T sum = 0;
    for (int k = 0; k < 8 * each; ++k) {
      const int upper = k / (4 * each);
      const unsigned a = register_of(parity, row % 8, k, each, 2 * upper + row / 8);
      const unsigned b = register_of(parity, column, k, each, 4 + upper);
      sum += times(a, b, k % each);
    }
    sums[e] += sum;
  }
}

template <bool BF>
void multiply_add(float (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
  product(sums, left, right0, right1, 2, [](unsigned a, unsigned b, int place) {
    return from_bits<BF>(a >> (16 * place)) * from_bits<BF>(b >> (16 * place));
  });
}

inline void multiply_add(int (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
  product(sums, left, right0, right1, 4, [](unsigned a, unsigned b, int place) {
    return int(uint8_t(a >> (8 * place))) * int(int8_t(b >> (8 * place)));
  });
}

}  // namespace kvstrata
