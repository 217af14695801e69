// Shares of a RoPE-aware mean in the scores of a piece: see rope.py, and attention.cuh for the products.
//
// The tokens of a piece are 8 columns of 32 rows. A token is rotated like the first token of its column, and then like
// its row. So the factors of cos and sin are rotated to the 8 columns, and one product with the cos and sin of 32 rows
// gives the shares of all tokens. Both sides are split into two 16-bit numbers.
//
// The table of a rotation: float32 [GROUP][2][DIM], cos and sin that rotate factors to each token of a group; then
// float16 cos (of a pair's first dim) and sin (of its second) of each row, and the rest that 16 bits leave of them,
// times LOWER. The order is that of the products: [2][DIM / 32][2 products][2 halves of the rows][lane][8]. A dim that
// RoPE does not rotate has cos 1 and sin 0 in the first, 1 in the second.

namespace kvstrata {

constexpr int ROWS = 32;
constexpr int SHARES = GROUP + 4;  // numbers of a query in shared memory: those of two queries are not in one bank
template <int TILES> constexpr int AT_ONCE = TILES == 1 ? 2 : 1;  // queries

// Factors of cos and sin for the queries of a warp, by dim. The largest magnitude of `own` is 1.
template <int DIM, int TILES>
struct Factors {
  alignas(16) float own[AT_ONCE<TILES>][DIM];
  alignas(16) float other[AT_ONCE<TILES>][DIM];  // of the pair's other dim, with the sign of the rotation

  // Returns the divisor of the factors.
  template <typename ROTATION>
  __device__ __forceinline__ float take(
      const ROTATION& rotation, int place, const float* q, const __half* mean, int lane) {
    auto mean_at = [&](int d) { return __half2float(mean[d]); };
    float largest = 0;
    for (int d = lane; d < DIM; d += 32) {
      float x = q[d] * mean_at(d);
      if (rotation.rotates(d)) {
        const int partner = rotation.partner(d);
        const bool is_second = rotation.is_second(d);
        x = is_second ? q[d] * mean_at(partner) - q[partner] * mean_at(d) : x + q[partner] * mean_at(partner);
        other[place][partner] = is_second ? x : -x;
      } else {
        other[place][d] = 0;
      }
      own[place][d] = x, largest = fmaxf(largest, fabsf(x));
    }
    largest = warp_max(largest);
    const float inverse = largest > 0 ? 1 / largest : 0;
    __syncwarp();
    for (int d = lane; d < DIM; d += 32) own[place][d] *= inverse, other[place][d] *= inverse;
    return largest;
  }
};

__device__ __forceinline__ void load_eight(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = reinterpret_cast<const float4*>(from)[i];
    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
  }
}

__device__ __forceinline__ void load_four(const uint4* from, unsigned (&to)[4]) {
  const uint4 four = __ldg(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// Eight numbers, none larger than 2, as pairs of upper halves and of lower ones.
__device__ __forceinline__ void split_eight(const float (&x)[8], unsigned (&upper)[4], unsigned (&lower)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 top = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    const float2 wide = __half22float2(top);
    const __half2 rest =
        __floats2half2_rn((x[2 * i] - wide.x) * LOWER<false>, (x[2 * i + 1] - wide.y) * LOWER<false>);
    upper[i] = *reinterpret_cast<const unsigned*>(&top), lower[i] = *reinterpret_cast<const unsigned*>(&rest);
  }
}

// By one warp: shares of the mean for the tokens from `offset` of their group on -> shares [queries][SHARES].
template <typename ROTATION, int DIM, int TILES>
__device__ __forceinline__ void compute_rotated_shares(
    const ROTATION& rotation, const Queries<DIM, TILES>& queries, const __half* mean, const float* table, int offset,
    int num_queries, Factors<DIM, TILES>& factors, float* shares, const Lane& at) {
  constexpr int HALVES = ROWS / TOKENS;  // of the rows
  const float* rotations = table + 2 * DIM * min(offset + ROWS * at.group, GROUP - 1);
  const uint4* rows = reinterpret_cast<const uint4*>(table + 2 * GROUP * DIM) + at.lane;
  for (int first = 0; first < num_queries; first += AT_ONCE<TILES>) {
    float factor[AT_ONCE<TILES>];
    __syncwarp();
#pragma unroll
    for (int a = 0; a < AT_ONCE<TILES>; ++a) {
      const int query = min(first + a, num_queries - 1);
      factor[a] = factors.take(rotation, a, queries.values[query], mean, at.lane) * queries.factor[query];
    }
    __syncwarp();
    float sums[AT_ONCE<TILES>][HALVES][4] = {}, rests[AT_ONCE<TILES>][HALVES][4] = {};
#pragma unroll
    for (int d = 0; d < DIM; d += 32) {
      const int dim = d + 8 * at.quarter;
      float cos[8], sin[8];
      load_eight(rotations + dim, cos);
      load_eight(rotations + DIM + dim, sin);
      unsigned right[AT_ONCE<TILES>][4], rest[AT_ONCE<TILES>][4];
#pragma unroll
      for (int a = 0; a < AT_ONCE<TILES>; ++a) {
        float own[8], other[8];
        load_eight(factors.own[a] + dim, own);
        load_eight(factors.other[a] + dim, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = own[i] * cos[i] + other[i] * sin[i];
        split_eight(own, right[a], rest[a]);
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int place = 32 * (half + HALVES * (p + d / 16));
          unsigned upper[4], lower[4];
          load_four(rows + place, upper);
          load_four(rows + 2 * HALVES * DIM + place, lower);
#pragma unroll
          for (int a = 0; a < AT_ONCE<TILES>; ++a) {
            multiply_add<false>(sums[a][half], upper, right[a][2 * p], right[a][2 * p + 1]);
            multiply_add<false>(rests[a][half], upper, rest[a][2 * p], rest[a][2 * p + 1]);
            multiply_add<false>(rests[a][half], lower, right[a][2 * p], right[a][2 * p + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < AT_ONCE<TILES>; ++a) {
      if (first + a >= num_queries) continue;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = 2 * at.quarter + e % 2, row = half * TOKENS + at.group + 8 * (e / 2);
          const float sum = sums[a][half][e] + rests[a][half][e] / LOWER<false>;
          shares[(first + a) * SHARES + ROWS * column + row] = sum * factor[a];
        }
      }
    }
  }
  __syncwarp();
}

// Share of the mean for a token and query of this lane; 0 if the mean is not RoPE-aware.
template <int TILES>
__device__ __forceinline__ float rotated_share(const float* shares, int first, int e, const Lane& at) {
  if (shares == nullptr) return 0;
  return shares[(query_of_lane<TILES>(at) + e % 2) * SHARES + first + at.group + 8 * (e / 2)];
}

}  // namespace kvstrata
