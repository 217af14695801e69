// Prelude of the kernels in C++17, for tests: the 32 lanes of a group are 32 fibres of one thread.
//
// A fibre runs until it has to meet the others (a shuffle or a barrier), then the next one runs. Lanes that do not meet
// at the same point, and shared memory that is read without a barrier in one of the two orders, are found this way.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>

typedef std::uint32_t kv_uint;
typedef std::int64_t kv_long;
struct kv_uint2 { kv_uint x, y; };
struct kv_uint4 { kv_uint x, y, z, w; };

#define KV_FN static inline
#define KV_DEVICE
#define KV_SHARED
#define KV_LOCAL
#define KV_SHARED_ARRAY(type, name, size) static type name[size]; kv_poison(name, sizeof name)
#define KV_UNROLL
#define KV_LANE kv_lane
#define KV_GROUP_X kv_group[0]
#define KV_GROUP_Y kv_group[1]
#define KV_GROUP_Z kv_group[2]

enum { KV_LANES = 32, KV_STACK_BYTES = 1 << 16 };

static int kv_lane, kv_group[3], kv_step = 1, kv_running, kv_diverged;
static unsigned kv_meetings[KV_LANES], kv_places[KV_LANES];
static float kv_exchanged[2][KV_LANES];
static jmp_buf kv_fibres[KV_LANES], kv_home;
static bool kv_is_done[KV_LANES];
static ucontext_t kv_contexts[KV_LANES], kv_main;
alignas(64) static char kv_stacks[KV_LANES][KV_STACK_BYTES];

static void kv_go_on() {
  const int from = kv_lane;
  int to = (from + kv_step + KV_LANES) % KV_LANES;
  while (kv_is_done[to] && to != from) to = (to + kv_step + KV_LANES) % KV_LANES;
  if (to == from) return;
  if (_setjmp(kv_fibres[from]) == 0) {
    kv_lane = to;
    _longjmp(kv_fibres[to], 1);
  }
}

// Barrier of all lanes. `place` distinguishes lanes that meet at another point.
static unsigned kv_meet(unsigned place) {
  const unsigned meeting = kv_meetings[kv_lane]++;
  kv_places[kv_lane] = place;
  kv_go_on();
  for (int lane = 0; lane < KV_LANES; ++lane) {
    const bool is_here = kv_meetings[lane] == meeting + 1 && kv_places[lane] == place;
    const bool was_here = kv_meetings[lane] == meeting + 2;
    if (kv_running != KV_LANES && kv_is_done[lane] && kv_meetings[lane] < meeting + 1) kv_diverged = 1;
    if (!is_here && !was_here && !kv_is_done[lane]) kv_diverged = 1;
  }
  return meeting;
}

// Fills the memory of a group with values that no kernel may rely on.
static void kv_poison(void* memory, std::size_t num_bytes) {
  if (kv_lane == (kv_step > 0 ? 0 : KV_LANES - 1)) std::memset(memory, 0xFF, num_bytes);
}

KV_FN void kv_barrier() { kv_meet(0); }

KV_FN float kv_shuffle_xor(float x, int mask) {
  kv_exchanged[kv_meetings[kv_lane] & 1][kv_lane] = x;
  const unsigned meeting = kv_meet(unsigned(mask));
  return kv_exchanged[meeting & 1][kv_lane ^ mask];
}

KV_FN float kv_as_float(kv_uint bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
KV_FN kv_uint kv_as_uint(float x) {
  kv_uint bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
KV_FN float kv_exp(float x) { return std::exp(x); }
KV_FN float kv_larger(float a, float b) { return a > b ? a : b; }
KV_FN float kv_floor(float x) { return std::floor(x); }
KV_FN float kv_byte(kv_uint word, int which) { return kv_as_float(((word >> (8 * which)) & 255u) | 0x4B000000u); }
KV_FN kv_uint kv_swap(kv_uint word) {
  return (word & 0xFF0000FFu) | ((word & 0x0000FF00u) << 8) | ((word >> 8) & 0x0000FF00u);
}

KV_FN float kv_of_half(kv_uint bits) {
  const kv_uint sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, rest = bits & 0x3FFu;
  if (exponent == 31) return kv_as_float(sign | 0x7F800000u | (rest << 13));
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(rest) * 5.9604644775390625e-8f;
  return kv_as_float(sign | ((exponent + 112) << 23) | (rest << 13));
}
KV_FN float kv_low_half(kv_uint word) { return kv_of_half(word & 0xFFFFu); }
KV_FN float kv_high_half(kv_uint word) { return kv_of_half(word >> 16); }

struct kv_half {
  std::uint16_t bits;
  kv_half() = default;
  explicit kv_half(float x) {  // to the nearest, halves to even
    const kv_uint sign = (kv_as_uint(x) >> 16) & 0x8000u;
    const float size = std::fabs(x);
    if (!(size < 65520.0f)) {
      bits = std::uint16_t(sign | (size != size ? 0x7E00u : 0x7C00u));
    } else if (size < 6.103515625e-5f) {
      bits = std::uint16_t(sign | kv_uint(std::nearbyint(size * 16777216.0f)));
    } else {
      const kv_uint wide = kv_as_uint(size), odd = (wide >> 13) & 1u;
      bits = std::uint16_t(sign | ((wide - 0x38000000u + 0xFFFu + odd) >> 13));
    }
  }
  operator float() const { return kv_of_half(bits); }
};

struct kv_bfloat {
  std::uint16_t bits;
  kv_bfloat() = default;
  explicit kv_bfloat(float x) {
    const kv_uint wide = kv_as_uint(x);
    bits = std::uint16_t((wide + 0x7FFFu + ((wide >> 16) & 1u)) >> 16);
  }
  operator float() const { return kv_as_float(kv_uint(bits) << 16); }
};
