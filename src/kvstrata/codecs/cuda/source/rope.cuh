// RoPE-aware means: see rope.py. A row of angles has cos of all pairs, then sin; there are GROUP rows.

namespace kvstrata {

constexpr int GROUP = 256;  // tokens that share a mean

// RoPE rotation that is known when a kernel is compiled. Without pairs it rotates no dim.
template <int NUM_PAIRS, int FIRST, bool INTERLEAVED>
struct Rotation {
  static constexpr int PAIRS = NUM_PAIRS, GAP = INTERLEAVED ? 1 : NUM_PAIRS;

  static __device__ __forceinline__ bool rotates(int d) { return d >= FIRST && d < FIRST + 2 * PAIRS; }

  static __device__ __forceinline__ bool is_second(int d) {
    return INTERLEAVED ? (d - FIRST) & 1 : d - FIRST >= PAIRS;
  }

  static __device__ __forceinline__ int partner(int d) { return is_second(d) ? d - GAP : d + GAP; }

  static __device__ __forceinline__ int pair(int d) {
    return INTERLEAVED ? (d - FIRST) / 2 : is_second(d) ? d - FIRST - PAIRS : d - FIRST;
  }

  // Dim d of a vector, rotated to an offset into its group; `at(d)` is the dim at the start of the group.
  template <typename F>
  static __device__ __forceinline__ float rotated(const F& at, int d, const float* angles, int offset) {
    if (!rotates(d)) return at(d);
    const float* row = angles + offset * (2 * PAIRS) + pair(d);
    float aside = at(partner(d)) * row[PAIRS];
    return at(d) * row[0] + (is_second(d) ? aside : -aside);
  }

  // Dim d of a vector, rotated back from an offset to the start of its group.
  template <typename F>
  static __device__ __forceinline__ float rotated_back(const F& at, int d, const float* angles, int offset) {
    if (!rotates(d)) return at(d);
    const float* row = angles + offset * (2 * PAIRS) + pair(d);
    float aside = at(partner(d)) * row[PAIRS];
    return at(d) * row[0] + (is_second(d) ? -aside : aside);
  }
};

// RoPE rotation that is known when a kernel runs, with the functions that attention needs.
struct AnyRotation {
  int pairs, first_dim;
  bool is_interleaved;

  __device__ __forceinline__ bool rotates(int d) const { return d >= first_dim && d < first_dim + 2 * pairs; }

  __device__ __forceinline__ bool is_second(int d) const {
    return is_interleaved ? (d - first_dim) & 1 : d - first_dim >= pairs;
  }

  __device__ __forceinline__ int partner(int d) const {
    const int gap = is_interleaved ? 1 : pairs;
    return is_second(d) ? d - gap : d + gap;
  }
};

}  // namespace kvstrata
