// The queries of a block, and their products with keys: see attention.cuh.

namespace kvstrata {

constexpr int WARPS = 4;  // of a block
constexpr int TOKENS = 16;  // of a step
constexpr int STRIDE = TOKENS + 4;  // of weights in shared memory: no two lanes of an access meet in a bank
constexpr float LOG2_E = 1.4426950408889634f, LOG_2 = 0.6931471805599453f;

// Two numbers of 16 bits that add up to x: upper + lower / LOWER.
template <bool BF> constexpr float LOWER = BF ? 1.0f : 2048.0f;

template <bool BF>
__device__ __forceinline__ unsigned short split(float x, bool lower) {
  unsigned short upper = to_bits<BF>(x);
  return lower ? to_bits<BF>((x - from_bits<BF>(upper)) * LOWER<BF>) : upper;
}

// Query of a column, and half of the split of that query. Up to four queries fill one tile, up to eight fill two.
template <int TILES>
__device__ __forceinline__ int query_of(int column) {
  return TILES == 1 ? column & 3 : column;
}

template <int TILES>
__device__ __forceinline__ bool is_lower(int tile, int column) {
  return TILES == 1 ? column >= 4 : tile == 1;
}

// The first of the two queries whose results a lane has once the halves of the split are added up.
template <int TILES>
__device__ __forceinline__ int query_of_lane(const Lane& at) {
  return 2 * (TILES == 1 ? at.quarter & 1 : at.quarter);
}

// With one tile the lower halves are two quarters away; both quarters then hold the sum.
template <bool BF, int TILES>
__device__ __forceinline__ float add_halves(const float (&tiles)[TILES][4], int e, const Lane& at) {
  if constexpr (TILES == 2) {
    return tiles[0][e] + tiles[1][e] / LOWER<BF>;
  } else {
    float other = __shfl_xor_sync(0xFFFFFFFF, tiles[0][e], 2);
    return at.quarter < 2 ? tiles[0][e] + other / LOWER<BF> : other + tiles[0][e] / LOWER<BF>;
  }
}

// Split of integers up to MOST into two bytes: BASE * upper + lower.
constexpr int BASE = 128, MOST = 127 * BASE;

__device__ __forceinline__ unsigned split_digits(int x, bool lower) {
  const int upper = (x + MOST + BASE / 2) / BASE - MOST / BASE;
  return (lower ? x - BASE * upper : upper) & 0xFF;
}

template <int TILES>
__device__ __forceinline__ int add_digits(const int (&tiles)[TILES][4], int e, const Lane& at) {
  if constexpr (TILES == 2) {
    return BASE * tiles[0][e] + tiles[1][e];
  } else {
    const int other = __shfl_xor_sync(0xFFFFFFFF, tiles[0][e], 2);
    return at.quarter < 2 ? BASE * tiles[0][e] + other : BASE * other + tiles[0][e];
  }
}

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, step));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

// Hadamard transform in place, by one warp, without the factor 1 / sqrt(BLOCK).
template <int DIM>
__device__ __forceinline__ void hadamard(float* x, int lane) {
  constexpr int BLOCK = DIM & -DIM;
#pragma unroll
  for (int half = 1; half < BLOCK; half *= 2) {
    __syncwarp();
#pragma unroll
    for (int k = lane; k < DIM / 2; k += 32) {
      int i = k / half * 2 * half + k % half;
      float a = x[i], b = x[i + half];
      x[i] = a + b, x[i + half] = a - b;
    }
  }
  __syncwarp();
}

// Queries of a block. The largest magnitude of `values` is 1; for codes it is MOST, and the values are integers. A
// product with values times `factor` is a score; `sum` is the sum of the values.
template <int DIM, int TILES>
struct Queries {
  float values[4 * TILES][DIM];
  float factor[4 * TILES], sum[4 * TILES];

  template <bool FOR_CODES>
  __device__ __forceinline__ void normalise(int query, float factor_of_all, int lane) {
    constexpr float LARGEST = FOR_CODES ? MOST : 1;
    __syncwarp();
    float* x = values[query];
    float largest = 0, total = 0;
    for (int d = lane; d < DIM; d += 32) largest = fmaxf(largest, fabsf(x[d]));
    largest = warp_max(largest);
    const float inverse = largest > 0 ? LARGEST / largest : 0;
    for (int d = lane; d < DIM; d += 32) {
      x[d] = FOR_CODES ? rintf(x[d] * inverse) : x[d] * inverse;
      total += x[d];
    }
    total = warp_sum(total);
    if (lane == 0) factor[query] = largest / LARGEST * factor_of_all, sum[query] = total;
    __syncwarp();
  }
};

// q [queries, DIM], scaled and as scores in units of log(2)
template <int DIM, int TILES, typename T>
__device__ __forceinline__ void take_queries(
    Queries<DIM, TILES>& queries, const T* q, long stride, float scale, int num_queries, const Lane& at) {
  for (int query = at.warp; query < num_queries; query += WARPS) {
    for (int d = at.lane; d < DIM; d += 32) {
      queries.values[query][d] = static_cast<float>(q[query * stride + d]) * scale;
    }
    queries.template normalise<false>(query, LOG2_E, at.lane);
  }
}

// Queries rotated (Hadamard), for codes.
template <int DIM, int TILES>
__device__ __forceinline__ void rotate_queries(
    Queries<DIM, TILES>& rotated, const Queries<DIM, TILES>& queries, const float* signs, int num_queries,
    const Lane& at) {
  for (int query = at.warp; query < num_queries; query += WARPS) {
    for (int d = at.lane; d < DIM; d += 32) rotated.values[query][d] = queries.values[query][d] * signs[d];
    hadamard<DIM>(rotated.values[query], at.lane);
    rotated.template normalise<true>(query, queries.factor[query] * rsqrtf(float(DIM & -DIM)) * UNIT, at.lane);
  }
}

// Right sides of products of keys with values [queries, DIM]: two 16-bit numbers to a word, or four bytes for codes.
template <bool BF, int BITS, int DIM, int TILES>
__device__ __forceinline__ void take_fragments(
    const float* values, int num_queries, unsigned (&fragments)[TILES][Keys<BITS, DIM>::PRODUCTS][2], const Lane& at) {
  constexpr int EACH = BITS == RAW ? 2 : 4;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int query = query_of<TILES>(at.group);
    const bool lower = is_lower<TILES>(t, at.group);
#pragma unroll
    for (int p = 0; p < Keys<BITS, DIM>::PRODUCTS; ++p) {
      fragments[t][p][0] = fragments[t][p][1] = 0;
      if (query >= num_queries) continue;
#pragma unroll
      for (int place = 0; place < 2 * EACH; ++place) {
        const float x = values[query * DIM + Keys<BITS, DIM>::dim_of(p, place, at)];
        const unsigned half = BITS == RAW ? split<BF>(x, lower) : split_digits(int(x), lower);
        fragments[t][p][place / EACH] |= half << (32 / EACH * (place % EACH));
      }
    }
  }
}

// Queries of a warp: fragments of all, and factors of the two queries for which a lane has results.
template <bool BF, int BITS, int DIM, int TILES>
struct Asked {
  using K = Keys<BITS, DIM>;
  unsigned fragments[TILES][K::PRODUCTS][2];
  float factor[2], base[2];
  int over[2];  // MIDDLE times the query's sum, to be taken off
  float half[2];  // HALF times it, to be added

  __device__ __forceinline__ void take(const Queries<DIM, TILES>& queries, int num_queries, const Lane& at) {
    take_fragments<BF, BITS, DIM, TILES>(queries.values[0], num_queries, fragments, at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = query_of_lane<TILES>(at) + h;
      const bool exists = query < num_queries;
      factor[h] = exists ? queries.factor[query] : 0;
      if constexpr (BITS != RAW) {
        over[h] = exists ? MIDDLE * int(queries.sum[query]) : 0;
        half[h] = exists ? HALF<BITS> * queries.sum[query] : 0;
      }
      base[h] = 0;
    }
  }

  // Adds q . mean to all scores; for a mean that is not RoPE-aware.
  __device__ __forceinline__ void centre(
      const Queries<DIM, TILES>& queries, const __half* mean, int num_queries, const Lane& at) {
    for (int query = 0; query < num_queries; ++query) {
      float sum = 0;
      for (int d = at.lane; d < DIM; d += 32) sum += queries.values[query][d] * __half2float(mean[d]);
      sum = warp_sum(sum) * queries.factor[query];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (query == query_of_lane<TILES>(at) + h) base[h] = sum;
      }
    }
  }

  // Tokens group and group + 8 of a step, each by two queries.
  __device__ __forceinline__ void score(const K& keys, float (&scores)[4], const Lane& at) const {
    float products[4];
    if constexpr (BITS == RAW) {
      float sums[TILES][4] = {};
      keys.template multiply_raw<BF>(fragments, sums);
#pragma unroll
      for (int e = 0; e < 4; ++e) products[e] = add_halves<BF, TILES>(sums, e, at);
    } else {
      int sums[TILES][4] = {};
      keys.multiply(fragments, sums);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float product = float(add_digits<TILES>(sums, e, at) - over[e % 2]) + half[e % 2];
        products[e] = product * __half2float(keys.scales[e / 2]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[e] = products[e] * factor[e % 2] + base[e % 2];
  }
};

}  // namespace kvstrata
