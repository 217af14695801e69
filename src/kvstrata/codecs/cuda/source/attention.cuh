// Attention of one query by head over packed codes or raw vectors: scores, softmax, weighted sum. A warp has a piece of
// the tokens.
//
// Raw values go to the tensor cores as they are. Codes of keys go as 8-bit integers, codes of values as float16 numbers
// that are 1024 more than the code: neither conversion costs an addition, and the sums are corrected for the offset.
// The other operands, queries and weights, are split into two numbers of the same type, so that little precision is
// lost. The columns of a product are queries, each twice: upper and lower half of the split. The order of dims in a sum
// is free, and so is the order of tokens, which is why no code is ever moved to another thread.
//
// A product is mma.m16n8k16, or m16n8k32 of integers: rows are tokens (scores) or dims (sums of values). Lane = 4 *
// group + quarter. A lane holds rows `group` and `group + 8`: in the left operand the columns of `quarter`, in the
// right operand the rows of `quarter` in column `group`, and in the result columns 2 * quarter and 2 * quarter + 1.
//
// Pieces end where a mean run ends, so a piece has one mean for keys and one for values. The share of a RoPE-aware mean
// of keys in the scores is computed first, by tensor cores too, and kept in shared memory. Results are partial: not yet
// divided by the sum of exponentials, which is stored beside the largest score. Scores are in units of log(2).

namespace kvstrata {

// Weighted sums of values, so far.
template <bool BF, int BITS, int DIM, int TILES>
struct Sums {
  using V = Values<BITS, DIM>;
  float sums[V::PRODUCTS][TILES][4] = {};
  float weights[TILES][4] = {};  // their own sum, for OVER and MIDDLE, which codes have too much

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

  // x[dim of the lane][query], in the basis that values are stored in. `factor`: the divisor of the weights.
  __device__ __forceinline__ void take(const float (&factor)[2], float (&x)[V::PRODUCTS][2][2], const Lane& at) const {
    const float unit = BITS == RAW ? 1.0f : UNIT * rsqrtf(float(DIM & -DIM));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float over = BITS == RAW ? 0 : (OVER + MIDDLE - HALF<BITS>) * add_halves<BF, TILES>(weights, e, at);
#pragma unroll
      for (int p = 0; p < V::PRODUCTS; ++p) {
        x[p][e / 2][e % 2] = (add_halves<BF, TILES>(sums[p], e, at) - over) * (factor[e % 2] * unit);
      }
    }
  }

  // -> out [queries, DIM]
  static __device__ __forceinline__ void store(
      const float (&x)[V::PRODUCTS][2][2], int num_queries, float* out, const Lane& at) {
    if (TILES == 1 && at.quarter >= 2) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = query_of_lane<TILES>(at) + h;
      if (query >= num_queries) continue;
#pragma unroll
      for (int p = 0; p < V::PRODUCTS; ++p) {
#pragma unroll
        for (int row = 0; row < 2; ++row) out[query * DIM + V::dim_of(p, row, at)] = x[p][row][h];
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

// Exchange of weights within a warp, from lanes by token to lanes by query. Two buffers: one is read while the next is
// written.
template <int TILES>
struct Exchange {
  alignas(16) float weights[2][4 * TILES][STRIDE];

  __device__ __forceinline__ void pass(const float (&by_token)[4], float (&by_query)[4], int step, const Lane& at) {
    float(&buffer)[4 * TILES][STRIDE] = weights[step % 2];
    if (TILES == 2 || at.quarter < 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        buffer[query_of_lane<TILES>(at) + e % 2][at.group + 8 * (e / 2)] = by_token[e];
      }
    }
    __syncwarp();
    float4 four = *reinterpret_cast<const float4*>(&buffer[query_of<TILES>(at.group)][4 * at.quarter]);
    by_query[0] = four.x, by_query[1] = four.y, by_query[2] = four.z, by_query[3] = four.w;
  }
};

// Scores of a step, and the largest of each query: -INFINITY from `count` on.
struct Scored {
  float scores[4], top[2];

  template <bool BF, int BITS, int DIM, int TILES>
  __device__ __forceinline__ void take(
      const Asked<BF, BITS, DIM, TILES>& asked, const Keys<BITS, DIM>& keys, const float* shares, int first, int count,
      const Lane& at) {
    asked.score(keys, scores, at);
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[e] += rotated_share<TILES>(shares, first, e, at);
      if (first + at.group + 8 * (e / 2) >= count) scores[e] = -INFINITY;
      top[e % 2] = fmaxf(top[e % 2], scores[e]);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      top[0] = fmaxf(top[0], __shfl_xor_sync(0xFFFFFFFF, top[0], step));
      top[1] = fmaxf(top[1], __shfl_xor_sync(0xFFFFFFFF, top[1], step));
    }
  }
};

// By one warp: `count` tokens from `start` on -> out [queries, V_DIM], in the basis that values are stored in and
// without their mean; stats [queries, 2]. The scores of a step are found beside the sums of the one before, so that
// neither waits for its own results. So keys are loaded two steps ahead, and beyond the end the last token again and
// again.
template <bool BF, int K_BITS, int V_BITS, int K_DIM, int V_DIM, int TILES, bool K_BF>
__device__ __forceinline__ void attend(
    Exchange<TILES>& exchange, const Asked<K_BF, K_BITS, K_DIM, TILES>& asked, Keys<K_BITS, K_DIM>& k,
    Values<V_BITS, V_DIM>& v, const Source& keys, const Source& values, const float* shares, int start,
    int count, int num_queries, float* out, float* stats, const Lane& at) {
  const int last = start + count - 1;
  float scale = V_BITS == RAW ? 1.0f : largest_scale(values, start, count, at.lane);
  float inverse = scale > 0 ? 1 / scale : 0;
  Sums<BF, V_BITS, V_DIM, TILES> sums;
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  Scored scored;
  scored.take(asked, k, shares, 0, count, at);
  k.load(keys, start + TOKENS, last, at);
  for (int first = 0; first < count; first += TOKENS) {
    if (__any_sync(0xFFFFFFFF, scored.top[0] > largest[0] || scored.top[1] > largest[1])) {
      float by[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = fmaxf(largest[h], scored.top[h]);
        by[h] = exp2_of(largest[h] - top);
        total[h] *= by[h], largest[h] = top;
      }
      sums.shrink(by);
    }
    float by_token[4], weights[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      by_token[e] = exp2_of(scored.scores[e] - largest[e % 2]);
      total[e % 2] += by_token[e];
    }
    exchange.pass(by_token, weights, first / TOKENS, at);
    scored.take(asked, k, shares, first + TOKENS, count, at);
    k.load(keys, start + first + 2 * TOKENS, last, at);
    unsigned fragments[TILES][2];
    split_weights<BF, V_BITS, V_DIM, TILES>(weights, v, inverse, fragments, at);
    sums.add(v, fragments);
    v.load(values, start + first + TOKENS, last, at);
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    total[0] += __shfl_xor_sync(0xFFFFFFFF, total[0], step);
    total[1] += __shfl_xor_sync(0xFFFFFFFF, total[1], step);
  }
  const float factor[2] = {scale, scale};
  float x[Values<V_BITS, V_DIM>::PRODUCTS][2][2];
  sums.take(factor, x, at);
  __syncwarp();  // `out` is where the shares were
  sums.store(x, num_queries, out, at);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int query = query_of_lane<TILES>(at) + h;
    if (at.group == 0 && (TILES == 2 || at.quarter < 2) && query < num_queries) {
      stats[2 * query] = largest[h] * LOG_2;
      stats[2 * query + 1] = total[h];
    }
  }
}

// Results of the warps of a block, to be merged to one piece.
template <int V_DIM, int TILES>
struct Found {
  static_assert(V_DIM <= SHARES, "a warp's sums lie where the shares of its mean were");
  static constexpr int ROOM = 4 * TILES * SHARES + TOKENS;  // shares are read up to a step beyond the last, for nothing
  float sums[WARPS][ROOM];
  float stats[WARPS][4 * TILES][2];
  const __half* means[WARPS];  // of the values; nullptr: they are raw, or there are none

  __device__ __forceinline__ void says(const __half* mean, const Lane& at) {
    if (at.lane == 0) means[at.warp] = mean;
  }

  // A warp that has no tokens says so.
  __device__ __forceinline__ void nothing(const Lane& at) {
    says(nullptr, at);
    for (int query = at.lane; query < 4 * TILES; query += 32) {
      stats[at.warp][query][0] = -INFINITY, stats[at.warp][query][1] = 0;
    }
  }

  // -> out [queries, V_DIM], stats [queries, 2]. All warps of the block. Codes are rotated back once for all of them.
  __device__ __forceinline__ void merge(int num_queries, const float* signs, float* out, float* out_stats) {
    __syncthreads();
    bool is_coded = false;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) is_coded |= means[w] != nullptr;
    float *coded = sums[0], *plain = sums[1];
    for (int i = threadIdx.x; i < num_queries * V_DIM; i += 32 * WARPS) {
      const int query = i / V_DIM, dim = i % V_DIM;
      float largest = -INFINITY, total = 0, code = 0, rest = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, stats[w][query][0]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (stats[w][query][1] == 0) continue;
        const float weight = exp2f((stats[w][query][0] - largest) * LOG2_E), share = weight * stats[w][query][1];
        total += share;
        if (means[w] == nullptr) {
          rest += weight * sums[w][i];
        } else {
          code += weight * sums[w][i], rest += share * __half2float(means[w][dim]);
        }
      }
      if (dim == 0) out_stats[2 * query] = largest, out_stats[2 * query + 1] = total;
      if (is_coded) {
        coded[i] = code, plain[i] = rest;
      } else {
        out[i] = rest;
      }
    }
    if (!is_coded) return;
    __syncthreads();
    const Lane at;
    for (int query = at.warp; query < num_queries; query += WARPS) {
      hadamard<V_DIM>(coded + query * V_DIM, at.lane);
      for (int d = at.lane; d < V_DIM; d += 32) {
        const int i = query * V_DIM + d;
        out[i] = coded[i] * signs[d] + plain[i];
      }
    }
  }
};

// Memory of a warp, first for the mean of its keys, then for each step.
template <int K_DIM, int TILES>
union Scratch {
  Factors<K_DIM, TILES> factors;
  Exchange<TILES> exchange;
};

template <int K_DIM, int V_DIM, int TILES>
struct Shared {
  Queries<K_DIM, TILES> queries, rotated;
  Scratch<K_DIM, TILES> scratch[WARPS];
  Found<V_DIM, TILES> found;
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
        float score = found[e] + rotated_share<TILES>(shares, first, e, at);
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
    if (query == query_of<TILES>(at.group)) own = top;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (query == query_of_lane<TILES>(at) + h) largest[h] = top, total[h] = sum;
    }
  }
  Sums<false, BITS, DIM, TILES> sums;
  int query = query_of<TILES>(at.group);
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
  float x[Values<BITS, DIM>::PRODUCTS][2][2];
  sums.take(largest, x, at);
  sums.rotate_back(x);
#pragma unroll
  for (int p = 0; p < Values<BITS, DIM>::PRODUCTS; ++p) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int dim = Values<BITS, DIM>::dim_of(p, row, at);
      const float sign = signs[dim], mean = __half2float(values.mean[dim]);
#pragma unroll
      for (int h = 0; h < 2; ++h) x[p][row][h] = x[p][row][h] * sign + total[h] * mean;
    }
  }
  sums.store(x, num_queries, out, at);
}

}  // namespace kvstrata
