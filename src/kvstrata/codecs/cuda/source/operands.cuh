// Shares of a lane in keys and values, packed or raw, as operands of the tensor cores: see attention.cuh.

namespace kvstrata {

struct Lane {
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int group = lane / 4;
  int quarter = lane % 4;
};

// Arrays of one head. Packed: `values` are the top crumbs; raw: the vectors.
struct Source {
  const void* values;
  const unsigned* next;
  const unsigned* low;
  const __half* scales;  // [tokens]
  const __half* mean;  // [dim] of the piece's mean run
  long stride;  // of raw vectors, in values
};

// A lane's share of two keys (rows `group` and `group + 8` of a product): DIM / 4 values of each.
template <int BITS, int DIM>
struct Keys {
  static constexpr int UNITS = DIM / 64;  // of 16 dims
  static constexpr int PRODUCTS = DIM / 32;
  unsigned top[2][UNITS], next[2][UNITS], low[2][2 * UNITS];
  __half scales[2];

  __device__ __forceinline__ void load(const Source& source, int first, int last, const Lane& at) {
    for (int r = 0; r < 2; ++r) {
      int token = min(first + at.group + 8 * r, last);
      scales[r] = source.scales[token];
      const unsigned* words = static_cast<const unsigned*>(source.values);
      load_words(words + token * (DIM / 16) + at.quarter * UNITS, top[r]);
      if constexpr (BITS >= 4) load_words(source.next + token * (DIM / 16) + at.quarter * UNITS, next[r]);
      if constexpr (BITS == 8) load_words(source.low + token * (DIM / 8) + at.quarter * 2 * UNITS, low[r]);
    }
  }

  // `place`: of the eight bytes that a lane has of the right side.
  static __device__ __forceinline__ int dim_of(int product, int place, const Lane& at) {
    return 16 * (at.quarter * UNITS + product / 2) + 2 * (product % 2) + place / 4 + 4 * (place % 4);
  }

  template <int TILES>
  __device__ __forceinline__ void multiply(const unsigned (&q)[TILES][PRODUCTS][2], int (&sums)[TILES][4]) const {
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      unsigned codes[2][4];
      for (int r = 0; r < 2; ++r) unpack<BITS>(top[r][j], next[r][j], low[r][2 * j], low[r][2 * j + 1], codes[r]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned left[4] = {codes[0][2 * i], codes[1][2 * i], codes[0][2 * i + 1], codes[1][2 * i + 1]};
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply_add(sums[t], left, q[t][2 * j + i][0], q[t][2 * j + i][1]);
      }
    }
  }
};

template <int DIM>
struct Keys<RAW, DIM> {
  static constexpr int LOADS = DIM / 32;  // of 8 dims
  static constexpr int PRODUCTS = DIM / 16;
  unsigned words[2][LOADS][4];

  __device__ __forceinline__ void load(const Source& source, int first, int last, const Lane& at) {
    for (int r = 0; r < 2; ++r) {
      int token = min(first + at.group + 8 * r, last);
      const unsigned short* vector = static_cast<const unsigned short*>(source.values) + token * source.stride;
      for (int l = 0; l < LOADS; ++l) {
        uint4 four = *reinterpret_cast<const uint4*>(vector + 32 * l + 8 * at.quarter);
        words[r][l][0] = four.x, words[r][l][1] = four.y, words[r][l][2] = four.z, words[r][l][3] = four.w;
      }
    }
  }

  static __device__ __forceinline__ int dim_of(int product, int place, const Lane& at) {
    return 32 * (product / 2) + 8 * at.quarter + 4 * (product % 2) + place;
  }

  template <bool BF, int TILES>
  __device__ __forceinline__ void multiply_raw(
      const unsigned (&q)[TILES][PRODUCTS][2], float (&sums)[TILES][4]) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) {
      int l = p / 2, h = 2 * (p % 2);
      unsigned left[4] = {words[0][l][h], words[1][l][h], words[0][l][h + 1], words[1][l][h + 1]};
#pragma unroll
      for (int t = 0; t < TILES; ++t) multiply_add<BF>(sums[t], left, q[t][p][0], q[t][p][1]);
    }
  }
};

// A lane's share of four values (4 * quarter and on): DIM / 8 dims of each, two rows of a product at a time.
template <int BITS, int DIM>
struct Values {
  static constexpr int UNITS = DIM / 64;  // of 8 dims
  static constexpr int PRODUCTS = DIM / 16;
  static constexpr bool SPREAD = UNITS == 3;  // a unit of each 64 dims, else neighbours: see Sums::rotate_back
  unsigned top[4][(UNITS + 1) / 2], next[4][(UNITS + 1) / 2], low[4][UNITS];
  __half scales[4];

  __device__ __forceinline__ void load(const Source& source, int first, int last, const Lane& at) {
    for (int s = 0; s < 4; ++s) {
      int token = min(first + 4 * at.quarter + s, last);
      scales[s] = source.scales[token];
      const unsigned short* crumbs = static_cast<const unsigned short*>(source.values);
      const unsigned short* others = reinterpret_cast<const unsigned short*>(source.next);
      int unit = token * (DIM / 8) + at.group * (SPREAD ? 1 : UNITS);
      load_halves<UNITS, SPREAD ? 8 : 1>(crumbs + unit, top[s]);
      if constexpr (BITS >= 4) load_halves<UNITS, SPREAD ? 8 : 1>(others + unit, next[s]);
      if constexpr (BITS == 8 && SPREAD) {
        for (int j = 0; j < UNITS; ++j) low[s][j] = __ldg(source.low + unit + 8 * j);
      } else if constexpr (BITS == 8) {
        load_words(source.low + unit, low[s]);
      }
    }
  }

  static __device__ __forceinline__ int dim_of(int product, int row, const Lane& at) {
    int unit = SPREAD ? 8 * (product / 4) + at.group : at.group * UNITS + product / 4;
    return 8 * unit + product % 4 + 4 * row;
  }

  template <bool BF, int TILES>
  __device__ __forceinline__ void add(const unsigned (&weights)[TILES][2], float (&sums)[PRODUCTS][TILES][4]) const {
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      unsigned half = j % 2 ? 0x7632 : 0x5410;
      unsigned codes[2][4];
      for (int pair = 0; pair < 2; ++pair) {
        int a = 2 * pair, b = 2 * pair + 1;
        unpack<BITS>(
            permute(top[a][j / 2], top[b][j / 2], half), permute(next[a][j / 2], next[b][j / 2], half), low[a][j],
            low[b][j], codes[pair]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned left[4] = {to_halves(codes[0][i], 0x4240), to_halves(codes[0][i], 0x4341),
                            to_halves(codes[1][i], 0x4240), to_halves(codes[1][i], 0x4341)};
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply_add<false>(sums[4 * j + i][t], left, weights[t][0], weights[t][1]);
      }
    }
  }
};

template <int DIM>
struct Values<RAW, DIM> {
  static constexpr int LOADS = DIM / 64;  // of 8 dims
  static constexpr int PRODUCTS = DIM / 16;
  unsigned words[4][LOADS][4];

  __device__ __forceinline__ void load(const Source& source, int first, int last, const Lane& at) {
    for (int s = 0; s < 4; ++s) {
      int token = min(first + 4 * at.quarter + s, last);
      const unsigned short* vector = static_cast<const unsigned short*>(source.values) + token * source.stride;
      for (int l = 0; l < LOADS; ++l) {
        uint4 four = *reinterpret_cast<const uint4*>(vector + 64 * l + 8 * at.group);
        words[s][l][0] = four.x, words[s][l][1] = four.y, words[s][l][2] = four.z, words[s][l][3] = four.w;
      }
    }
  }

  static __device__ __forceinline__ int dim_of(int product, int row, const Lane& at) {
    return 64 * (product / 4) + 8 * at.group + 2 * (product % 4) + row;
  }

  template <bool BF, int TILES>
  __device__ __forceinline__ void add(const unsigned (&weights)[TILES][2], float (&sums)[PRODUCTS][TILES][4]) const {
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) {
      int l = p / 4, i = p % 4;
      unsigned left[4] = {permute(words[0][l][i], words[1][l][i], 0x5410),
                          permute(words[0][l][i], words[1][l][i], 0x7632),
                          permute(words[2][l][i], words[3][l][i], 0x5410),
                          permute(words[2][l][i], words[3][l][i], 0x7632)};
#pragma unroll
      for (int t = 0; t < TILES; ++t) multiply_add<BF>(sums[p][t], left, weights[t][0], weights[t][1]);
    }
  }
};

}  // namespace kvstrata
