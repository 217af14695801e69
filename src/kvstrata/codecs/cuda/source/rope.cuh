// Means that turn with RoPE: see rope.py. A row of angles has cos of all pairs, then sin; GROUP rows.

namespace kvstrata {

constexpr int GROUP = 256;  // tokens that share a mean

// Without pairs nothing turns.
template <int NUM_PAIRS, int FIRST, bool INTERLEAVED>
struct Turn {
  static constexpr int PAIRS = NUM_PAIRS, GAP = INTERLEAVED ? 1 : NUM_PAIRS;

  static __device__ __forceinline__ bool turns(int d) { return d >= FIRST && d < FIRST + 2 * PAIRS; }

  static __device__ __forceinline__ bool is_second(int d) {
    return INTERLEAVED ? (d - FIRST) & 1 : d - FIRST >= PAIRS;
  }

  static __device__ __forceinline__ int partner(int d) { return is_second(d) ? d - GAP : d + GAP; }

  static __device__ __forceinline__ int pair(int d) {
    return INTERLEAVED ? (d - FIRST) / 2 : is_second(d) ? d - FIRST - PAIRS : d - FIRST;
  }

  // Dim d of a vector at an offset into its group; `at(d)`: at the start of it.
  template <typename F>
  static __device__ __forceinline__ float turned(const F& at, int d, const float* angles, int offset) {
    if (!turns(d)) return at(d);
    const float* row = angles + offset * (2 * PAIRS) + pair(d);
    float aside = at(partner(d)) * row[PAIRS];
    return at(d) * row[0] + (is_second(d) ? aside : -aside);
  }

  // The other way.
  template <typename F>
  static __device__ __forceinline__ float turned_back(const F& at, int d, const float* angles, int offset) {
    if (!turns(d)) return at(d);
    const float* row = angles + offset * (2 * PAIRS) + pair(d);
    float aside = at(partner(d)) * row[PAIRS];
    return at(d) * row[0] + (is_second(d) ? -aside : aside);
  }
};

// The same, known when it runs; as much of it as attention needs.
struct AnyTurn {
  int pairs, first_dim;
  bool is_interleaved;

  __device__ __forceinline__ bool turns(int d) const { return d >= first_dim && d < first_dim + 2 * pairs; }

  __device__ __forceinline__ bool is_second(int d) const {
    return is_interleaved ? (d - first_dim) & 1 : d - first_dim >= pairs;
  }

  __device__ __forceinline__ int partner(int d) const {
    const int gap = is_interleaved ? 1 : pairs;
    return is_second(d) ? d - gap : d + gap;
  }
};

}  // namespace kvstrata
