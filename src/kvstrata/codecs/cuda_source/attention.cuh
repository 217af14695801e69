// One query by head over packed codes or raw vectors: scores, softmax, weighted sum. A warp has a piece of the tokens.
//
// Codes and raw 16-bit values go to the tensor cores as they are: an 8-bit code less 128 is exact in float16. What they
// are multiplied with, queries and weights, is split into two 16-bit numbers, so that nothing is lost to 16 bits. The
// columns of a product are queries, each twice: upper and lower half of the split. The sum over dims may take them in
// any order, and the sum over tokens too, which is why no code is ever moved to another thread.
//
// A product is mma.m16n8k16: rows are tokens (scores) or dims (sums of values). Lane = 4 * group + quarter. A lane
// holds rows `group` and `group + 8`, on the left columns by `quarter`, on the right rows by `quarter` of column
// `group`, and of the result columns 2 * quarter and 2 * quarter + 1.
//
// Pieces end where the mean of a segment does, so a piece has one mean for keys and one for values. Where the mean of
// keys turns, its share of the scores comes first, from tensor cores too, and waits in shared memory. Results are
// partial: not yet divided by the sum of exponentials, which stands beside the largest score. Scores are in units of
// log(2).

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

// Whose query a column is, and which half of its split. Up to four queries fill one tile, up to eight fill two.
template <int TILES>
__device__ __forceinline__ int query_of(int tile, int column) {
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

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, step));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

// In place, by one warp, without the factor 1 / sqrt(BLOCK).
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

// Of a block. The largest magnitude of `values` is 1; score = scale of the key * factor * (product + half_sum) + base.
template <int DIM, int TILES>
struct Queries {
  float values[4 * TILES][DIM];
  float factor[4 * TILES], half_sum[4 * TILES];

  __device__ __forceinline__ void normalise(int query, float factor_of_all, bool is_packed, int lane) {
    __syncwarp();
    float* x = values[query];
    float largest = 0, sum = 0;
    for (int d = lane; d < DIM; d += 32) largest = fmaxf(largest, fabsf(x[d])), sum += x[d];
    largest = warp_max(largest), sum = warp_sum(sum);
    float inverse = largest > 0 ? 1 / largest : 0;
    for (int d = lane; d < DIM; d += 32) x[d] *= inverse;
    if (lane == 0) factor[query] = largest * factor_of_all, half_sum[query] = is_packed ? 0.5f * sum * inverse : 0;
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
    queries.normalise(query, LOG2_E, false, at.lane);
  }
}

// The same, rotated. STEP is not in the factor: parts may differ in their bits.
template <int DIM, int TILES>
__device__ __forceinline__ void rotate_queries(
    Queries<DIM, TILES>& rotated, const Queries<DIM, TILES>& queries, const float* signs, int num_queries,
    const Lane& at) {
  for (int query = at.warp; query < num_queries; query += WARPS) {
    for (int d = at.lane; d < DIM; d += 32) rotated.values[query][d] = queries.values[query][d] * signs[d];
    hadamard<DIM>(rotated.values[query], at.lane);
    rotated.normalise(query, queries.factor[query] * rsqrtf(float(DIM & -DIM)), true, at.lane);
  }
}

// The right sides of products of keys with values [queries, DIM], none of which is larger than 1.
template <bool BF, typename K, int DIM, int TILES>
__device__ __forceinline__ void take_fragments(
    const float* values, int num_queries, unsigned (&fragments)[TILES][K::PRODUCTS][2], const Lane& at) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int query = query_of<TILES>(t, at.group);
    bool lower = is_lower<TILES>(t, at.group);
#pragma unroll
    for (int p = 0; p < K::PRODUCTS; ++p) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        unsigned bits = 0;
        if (query < num_queries) {
          bits = split<BF>(values[query * DIM + K::dim_of(p, 2 * pair, at)], lower);
          bits |= unsigned(split<BF>(values[query * DIM + K::dim_of(p, 2 * pair + 1, at)], lower)) << 16;
        }
        fragments[t][p][pair] = bits;
      }
    }
  }
}

// What a warp knows of its queries: fragments of all of them, facts of the two that its lane has results of.
template <bool BF, int BITS, int DIM, int TILES>
struct Asked {
  using K = Keys<BITS, DIM>;
  unsigned fragments[TILES][K::PRODUCTS][2];
  float factor[2], half_sum[2], base[2];

  __device__ __forceinline__ void take(const Queries<DIM, TILES>& queries, int num_queries, const Lane& at) {
    take_fragments<BF, K, DIM, TILES>(queries.values[0], num_queries, fragments, at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int query = query_of_lane<TILES>(at) + h;
      bool exists = query < num_queries;
      factor[h] = exists ? queries.factor[query] * (BITS == RAW ? 1.0f : STEP<BITS>) : 0;
      half_sum[h] = exists ? queries.half_sum[query] : 0;
      base[h] = 0;
    }
  }

  // Adds q . mean to all scores, of a mean that does not turn.
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
    float sums[TILES][4] = {};
    if constexpr (BITS == RAW) {
      keys.template multiply_raw<BF>(fragments, sums);
    } else {
      keys.multiply(fragments, sums);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float product = add_halves<BF, TILES>(sums, e, at) + half_sum[e % 2];
      if constexpr (BITS != RAW) product *= __half2float(keys.scales[e / 2]);
      scores[e] = product * factor[e % 2] + base[e % 2];
    }
  }
};

// What a mean that turns adds to the scores of `count` tokens from `offset` of its group on: memory [tokens][4 * TILES].
// First it has the factors of cos and sin for each query, which is why it needs 4 * TILES * DIM numbers. The columns
// are cos and sin, [GROUP, DIM] in 16 bits, and then what 16 bits leave of them, times LOWER.
template <typename TURN, int DIM, int TILES>
__device__ __forceinline__ void add_turned(
    const TURN& turn, const Queries<DIM, TILES>& queries, const __half* mean, const __half* columns, int offset, int count,
    int num_queries, float* memory, const Lane& at) {
  using K = Keys<RAW, DIM>;
  auto mean_at = [&](int d) { return __half2float(mean[d]); };
  float factor[2] = {0, 0};
  for (int query = 0; query < num_queries; ++query) {
    const float* q = queries.values[query];
    float largest = 0;
    for (int d = at.lane; d < DIM; d += 32) {
      float x = q[d] * mean_at(d);
      if (turn.turns(d)) {
        int other = turn.partner(d);
        x = turn.is_second(d) ? q[d] * mean_at(other) - q[other] * mean_at(d) : x + q[other] * mean_at(other);
      }
      memory[query * DIM + d] = x, largest = fmaxf(largest, fabsf(x));
    }
    largest = warp_max(largest);
    float inverse = largest > 0 ? 1 / largest : 0;
    for (int d = at.lane; d < DIM; d += 32) memory[query * DIM + d] *= inverse;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (query == query_of_lane<TILES>(at) + h) factor[h] = largest * queries.factor[query];
    }
  }
  __syncwarp();
  unsigned fragments[TILES][K::PRODUCTS][2];
  take_fragments<false, K, DIM, TILES>(memory, num_queries, fragments, at);
  __syncwarp();
  const Source upper{columns, nullptr, nullptr, nullptr, nullptr, DIM};
  const Source lower{columns + GROUP * DIM, nullptr, nullptr, nullptr, nullptr, DIM};
  const int last = offset + count - 1;
  for (int first = 0; first < count; first += TOKENS) {
    float sums[TILES][4] = {}, rests[TILES][4] = {};
    K keys;
    keys.load(upper, offset + first, last, at);
    keys.template multiply_raw<false>(fragments, sums);
    keys.load(lower, offset + first, last, at);
    keys.template multiply_raw<false>(fragments, rests);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = add_halves<false, TILES>(sums, e, at) + add_halves<false, TILES>(rests, e, at) / LOWER<false>;
      int token = first + at.group + 8 * (e / 2);
      if (TILES == 2 || at.quarter < 2) {
        memory[token * (4 * TILES) + query_of_lane<TILES>(at) + e % 2] = sum * factor[e % 2];
      }
    }
  }
  __syncwarp();
}

// The same of a token and query of this lane; nothing where the mean does not turn.
template <int TILES>
__device__ __forceinline__ float turned_share(const float* memory, int first, int e, const Lane& at) {
  if (memory == nullptr) return 0;
  return memory[(first + at.group + 8 * (e / 2)) * (4 * TILES) + query_of_lane<TILES>(at) + e % 2];
}

// Values by weights, so far.
template <bool BF, int BITS, int DIM, int TILES>
struct Sums {
  using V = Values<BITS, DIM>;
  float sums[V::PRODUCTS][TILES][4] = {};
  float weights[TILES][4] = {};  // their own sum, for the half that codes are less than what they stand for

  __device__ __forceinline__ void add(const V& values, const unsigned (&fragments)[TILES][2]) {
    values.template add<BF>(fragments, sums);
    if constexpr (BITS != RAW) {
      const unsigned ones[4] = {0x3C003C00, 0x3C003C00, 0x3C003C00, 0x3C003C00};
#pragma unroll
      for (int t = 0; t < TILES; ++t) multiply_add<false>(weights[t], ones, fragments[t][0], fragments[t][1]);
    }
  }

  __device__ __forceinline__ void shrink(const float (&by)[2]) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weights[t][e] *= by[e % 2];
#pragma unroll
        for (int p = 0; p < V::PRODUCTS; ++p) sums[p][t][e] *= by[e % 2];
      }
    }
  }

  // x[dim of the lane][query]. Dims within a lane and, by group, between lanes; see Values::dim_of.
  static __device__ __forceinline__ void rotate_back(float (&x)[V::PRODUCTS][2][2]) {
    constexpr int REGISTERS = V::SPREAD ? 4 : V::PRODUCTS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int p = 0; p < V::PRODUCTS; ++p) butterfly(x[p][0][h], x[p][1][h]);
#pragma unroll
      for (int half = 1; half < REGISTERS; half *= 2) {
#pragma unroll
        for (int p = 0; p < V::PRODUCTS; ++p) {
          if (!(p & half)) {
            butterfly(x[p][0][h], x[p + half][0][h]);
            butterfly(x[p][1][h], x[p + half][1][h]);
          }
        }
      }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        bool upper = threadIdx.x & step;
#pragma unroll
        for (int p = 0; p < V::PRODUCTS; ++p) {
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            float other = __shfl_xor_sync(0xFFFFFFFF, x[p][row][h], step);
            x[p][row][h] = upper ? other - x[p][row][h] : x[p][row][h] + other;
          }
        }
      }
    }
  }

  // -> out [queries, DIM]. `factor`: what weights were divided by; `total`: of each query's weights, for the mean.
  __device__ __forceinline__ void finish(
      const Source& values, const float* signs, const float (&factor)[2], const float (&total)[2], int num_queries,
      float* out, const Lane& at) const {
    float x[V::PRODUCTS][2][2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float half_sum = BITS == RAW ? 0 : 0.5f * add_halves<BF, TILES>(weights, e, at);
#pragma unroll
      for (int p = 0; p < V::PRODUCTS; ++p) x[p][e / 2][e % 2] = add_halves<BF, TILES>(sums[p], e, at) + half_sum;
    }
    if constexpr (BITS != RAW) rotate_back(x);
    if (TILES == 1 && at.quarter >= 2) return;
    constexpr float UNIT = BITS == RAW ? 1.0f : STEP<BITS>;
    float rotation = BITS == RAW ? 1.0f : rsqrtf(float(DIM & -DIM));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int query = query_of_lane<TILES>(at) + h;
      if (query >= num_queries) continue;
      float scale = factor[h] * (UNIT * rotation);
#pragma unroll
      for (int p = 0; p < V::PRODUCTS; ++p) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          int dim = V::dim_of(p, row, at);
          x[p][row][h] *= scale;
          if constexpr (BITS != RAW) {
            x[p][row][h] = x[p][row][h] * signs[dim] + total[h] * __half2float(values.mean[dim]);
          }
          out[query * DIM + dim] = x[p][row][h];
        }
      }
    }
  }
};

// The largest scale of a piece. Weights are divided by it, so that 16 bits hold them well.
__device__ __forceinline__ float largest_scale(const Source& values, int start, int count, int lane) {
  float largest = 0;
  for (int token = lane; token < count; token += 32) {
    largest = fmaxf(largest, __half2float(values.scales[start + token]));
  }
  return warp_max(largest);
}

// Four weights of the query that is the lane's column, to the right side of a product.
template <bool BF, int BITS, int DIM, int TILES>
__device__ __forceinline__ void split_weights(
    const float (&weights)[4], const Values<BITS, DIM>& values, float inverse, unsigned (&fragments)[TILES][2],
    const Lane& at) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    bool lower = is_lower<TILES>(t, at.group);
    unsigned short bits[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      float weight = weights[s];
      if constexpr (BITS != RAW) weight *= __half2float(values.scales[s]) * inverse;
      bits[s] = split<BF>(weight, lower);
    }
    fragments[t][0] = bits[0] | unsigned(bits[1]) << 16;
    fragments[t][1] = bits[2] | unsigned(bits[3]) << 16;
  }
}

// Weights of a step go from lanes by token to lanes by query. Two buffers: one is read while the next is written.
template <int TILES>
struct Exchange {
  alignas(16) float weights[WARPS][2][4 * TILES][STRIDE];

  __device__ __forceinline__ void pass(const float (&by_token)[4], float (&by_query)[4], int step, const Lane& at) {
    float(&buffer)[4 * TILES][STRIDE] = weights[at.warp][step % 2];
    if (TILES == 2 || at.quarter < 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        buffer[query_of_lane<TILES>(at) + e % 2][at.group + 8 * (e / 2)] = by_token[e];
      }
    }
    __syncwarp();
    float4 four = *reinterpret_cast<const float4*>(&buffer[query_of<TILES>(0, at.group)][4 * at.quarter]);
    by_query[0] = four.x, by_query[1] = four.y, by_query[2] = four.z, by_query[3] = four.w;
  }
};

// By one warp: `count` tokens from `start` on -> out [queries, V_DIM], stats [queries, 2].
template <bool BF, int K_BITS, int V_BITS, int K_DIM, int V_DIM, int TILES>
__device__ __forceinline__ void attend(
    Exchange<TILES>& exchange, const Asked<BF, K_BITS, K_DIM, TILES>& asked, Keys<K_BITS, K_DIM>& k,
    Values<V_BITS, V_DIM>& v, const Source& keys, const Source& values, const float* shares, const float* v_signs,
    int start, int count, int num_queries, float* out, float* stats, const Lane& at) {
  const int last = start + count - 1;
  float scale = V_BITS == RAW ? 1.0f : largest_scale(values, start, count, at.lane);
  float inverse = scale > 0 ? 1 / scale : 0;
  Sums<BF, V_BITS, V_DIM, TILES> sums;
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  for (int first = 0; first < count; first += TOKENS) {
    float scores[4];
    asked.score(k, scores, at);
    if (first + TOKENS < count) k.load(keys, start + first + TOKENS, last, at);
    float top[2] = {largest[0], largest[1]};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[e] += turned_share<TILES>(shares, first, e, at);
      if (first + at.group + 8 * (e / 2) >= count) scores[e] = -INFINITY;
      top[e % 2] = fmaxf(top[e % 2], scores[e]);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      top[0] = fmaxf(top[0], __shfl_xor_sync(0xFFFFFFFF, top[0], step));
      top[1] = fmaxf(top[1], __shfl_xor_sync(0xFFFFFFFF, top[1], step));
    }
    if (__any_sync(0xFFFFFFFF, top[0] > largest[0] || top[1] > largest[1])) {
      float by[2] = {exp2f(largest[0] - top[0]), exp2f(largest[1] - top[1])};
      sums.shrink(by);
#pragma unroll
      for (int h = 0; h < 2; ++h) total[h] *= by[h], largest[h] = top[h];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[e] = exp2f(scores[e] - largest[e % 2]);
      total[e % 2] += scores[e];
    }
    float weights[4];
    exchange.pass(scores, weights, first / TOKENS, at);
    unsigned fragments[TILES][2];
    split_weights<BF, V_BITS, V_DIM, TILES>(weights, v, inverse, fragments, at);
    sums.add(v, fragments);
    if (first + TOKENS < count) v.load(values, start + first + TOKENS, last, at);
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    total[0] += __shfl_xor_sync(0xFFFFFFFF, total[0], step);
    total[1] += __shfl_xor_sync(0xFFFFFFFF, total[1], step);
  }
  const float factor[2] = {scale, scale};
  sums.finish(values, v_signs, factor, total, num_queries, out, at);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int query = query_of_lane<TILES>(at) + h;
    if (at.group == 0 && (TILES == 2 || at.quarter < 2) && query < num_queries) {
      stats[2 * query] = largest[h] * LOG_2;
      stats[2 * query + 1] = total[h];
    }
  }
}

// What the warps of a block found, to be one piece.
template <int V_DIM, int TILES>
struct Found {
  float sums[WARPS][4 * TILES][V_DIM];
  float stats[WARPS][4 * TILES][2];

  // A warp that has no tokens says so.
  __device__ __forceinline__ void nothing(const Lane& at) {
    for (int query = at.lane; query < 4 * TILES; query += 32) {
      stats[at.warp][query][0] = -INFINITY, stats[at.warp][query][1] = 0;
    }
  }

  // -> out [queries, V_DIM], stats [queries, 2]. All warps of the block.
  __device__ __forceinline__ void merge(int num_queries, float* out, float* out_stats) const {
    __syncthreads();
    for (int i = threadIdx.x; i < num_queries * V_DIM; i += 32 * WARPS) {
      int query = i / V_DIM, dim = i % V_DIM;
      float largest = -INFINITY, sum = 0, total = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, stats[w][query][0]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (stats[w][query][1] == 0) continue;
        float weight = exp2f((stats[w][query][0] - largest) * LOG2_E);
        sum += weight * sums[w][query][dim], total += weight * stats[w][query][1];
      }
      out[i] = sum;
      if (dim == 0) out_stats[2 * query] = largest, out_stats[2 * query + 1] = total;
    }
  }
};

// By one warp: scores as they are, to scores [queries, stride].
template <int BITS, int DIM, int TILES>
__device__ __forceinline__ void score(
    const Asked<false, BITS, DIM, TILES>& asked, const Source& keys, const float* shares, int start, int count,
    int num_queries, float* scores, long stride, const Lane& at) {
  for (int first = 0; first < count; first += TOKENS) {
    Keys<BITS, DIM> k;
    k.load(keys, start + first, start + count - 1, at);
    float found[4];
    asked.score(k, found, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int query = query_of_lane<TILES>(at) + e % 2, token = first + at.group + 8 * (e / 2);
      if ((TILES == 2 || at.quarter < 2) && query < num_queries && token < count) {
        float score = found[e] + turned_share<TILES>(shares, first, e, at);
        scores[query * stride + start + token] = score * LOG_2;
      }
    }
  }
}

// By one warp: values by given weights [queries, stride] -> out [queries, DIM].
template <int BITS, int DIM, int TILES>
__device__ __forceinline__ void mix(
    const Source& values, const float* given, long stride, const float* signs, int start, int count, int num_queries,
    float* out, const Lane& at) {
  float largest[2] = {0, 0}, total[2] = {0, 0}, own = 0;
  for (int query = 0; query < num_queries; ++query) {
    float top = 0, sum = 0;
    for (int token = at.lane; token < count; token += 32) {
      float weight = given[query * stride + start + token];
      top = fmaxf(top, fabsf(weight * __half2float(values.scales[start + token]))), sum += weight;
    }
    top = warp_max(top), sum = warp_sum(sum);
    if (query == query_of<TILES>(0, at.group)) own = top;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (query == query_of_lane<TILES>(at) + h) largest[h] = top, total[h] = sum;
    }
  }
  Sums<false, BITS, DIM, TILES> sums;
  int query = query_of<TILES>(0, at.group);
  for (int first = 0; first < count; first += TOKENS) {
    Values<BITS, DIM> v;
    v.load(values, start + first, start + count - 1, at);
    float weights[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      int token = first + 4 * at.quarter + s;
      weights[s] = query < num_queries && token < count ? given[query * stride + start + token] : 0;
    }
    unsigned fragments[TILES][2];
    split_weights<false, BITS, DIM, TILES>(weights, v, own > 0 ? 1 / own : 0, fragments, at);
    sums.add(v, fragments);
  }
  sums.finish(values, signs, largest, total, num_queries, out, at);
}

}  // namespace kvstrata
